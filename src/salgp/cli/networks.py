"""The user's network, named on the command line.

``package.module:factory`` or ``path/to/file.py:factory`` runs the user's own code, by explicit request.
``net.onnx`` is run by onnxruntime. ``hf:FOLDER`` is a local Hugging Face model folder; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.console import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HUGGING_FACE", "has_own_weights", "import_object", "open_network", "open_tokenizer"]

HUGGING_FACE = "hf:"
ONNX = ".onnx"


def open_network(spec: str, weights: Path | None = None) -> nn.Module:
    """Build the network ``spec`` names and load its weights; it is returned in evaluation mode."""
    if has_own_weights(spec) and weights is not None:
        raise UsageError(f"--weights does not go with {spec}, which has its own")
    if spec.startswith(HUGGING_FACE):
        return _hugging_face(Path(spec.removeprefix(HUGGING_FACE))).eval()
    if spec.endswith(ONNX):
        return _onnx(spec).eval()
    model = _made_by_user(spec)
    if weights is not None:
        from salgp.io.weights import load_weights

        load_weights(model, weights)
    return model.eval()


def open_tokenizer(spec: str) -> Any:
    """The tokenizer in the folder of a Hugging Face model, or None where there is none."""
    import transformers

    folder = Path(spec.removeprefix(HUGGING_FACE))
    if not any(folder.glob("tokenizer*")) and not (folder / "vocab.txt").is_file():
        return None
    options: Any = {"local_files_only": True, "trust_remote_code": False}
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def has_own_weights(spec: str) -> bool:
    """Does the name stand for a network with its weights?

    Example:
        >>> has_own_weights("net.onnx"), has_own_weights("net.py:make")
        (True, False)
    """
    return spec.startswith(HUGGING_FACE) or spec.endswith(ONNX)


def import_object(spec: str, what: str) -> Any:
    """What ``package.module:name`` or ``path/to/file.py:name`` stands for."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{what} {spec!r}: expected package.module:name or path/to/file.py:name")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found = vars(module).get(name)
    if found is None:
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise UsageError(
            f"{where} has no {name!r}; {did_you_mean(name, known)}it has {', '.join(known) or 'no functions'}"
        )
    return found


def _made_by_user(spec: str) -> nn.Module:
    from torch import nn

    if ":" not in spec:
        raise UsageError(
            f"MODEL {spec!r}: expected package.module:factory, path/to/file.py:factory, net.onnx or hf:FOLDER"
        )
    found = import_object(spec, "MODEL")
    model = found if isinstance(found, nn.Module) else _made(found, spec)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{spec} gave a {type(model).__name__}; expected a torch.nn.Module, or a function "
            f"without arguments that returns one"
        )
    return model


def _made(factory: Any, spec: str) -> Any:
    """What the user's factory returns; where it fails, its name stands before its own words."""
    if not callable(factory):
        raise TypeError(
            f"{spec} is a {type(factory).__name__}; expected a torch.nn.Module, or a function without "
            f"arguments that returns one"
        )
    try:
        return factory()
    except Exception as error:
        raise RuntimeError(f"{spec}() failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"salgp_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _in_folder(path.absolute().parent, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _import_module(name: str) -> Any:
    try:
        return _in_folder(Path.cwd(), lambda: importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"cannot import {name!r} from here; give an installed module, one in this "
                f"folder, or a path ending in .py"
            ) from error
        raise


def _in_folder(folder: Path, run: Any) -> Any:
    """Run with ``folder`` importable, as Python does for a script there."""
    sys.path.insert(0, str(folder))
    try:
        return run()
    finally:
        sys.path.remove(str(folder))


def _onnx(path: str) -> nn.Module:
    from salgp.io import reading
    from salgp.io.files import open_regular
    from salgp.onnx import OnnxNetwork

    open_regular(path).close()
    with reading(path, "an ONNX graph that onnxruntime accepts"):
        return OnnxNetwork(path)


def _hugging_face(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no config.json here; expected a local folder written by save_pretrained"
        )
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not name.endswith("Classification"):
        raise ValueError(
            f"{folder}: {name or 'no architecture'} is no classifier; expected "
            f"...ForSequenceClassification or ...ForImageClassification"
        )
    with _no_bars(transformers):
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return model


@contextmanager
def _no_bars(transformers: Any) -> Iterator[None]:
    """Keep the library's own progress bars off the screen."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
