"""Features, class scores and networks from the files people have; predictions into files.

`read_features` takes features in every format: one safetensors file, a folder of Parquet shards, or class
scores of any framework as ``.npz``, ``.csv`` or Parquet. `open_network` makes the network that a text names.
`open_data` reads its inputs as batches. The command line reads all its files with these functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import salgp
from salgp.features import Features, features_of
from salgp.file_signatures import PREDICTION_TABLE
from salgp.io import read_header, read_tensors, reading, write_header
from salgp.io.arrays import write_table
from salgp.io.class_scores import read_scores
from salgp.io.loader import open_data
from salgp.io.weights import load_weights
from salgp.labels import as_labels
from salgp.network.reader import FORMAT, FORMAT_VERSION, Reader, module_header
from salgp.prediction import Prediction
from salgp.store.store import FeatureStore

__all__ = [
    "FeatureFile",
    "first_shard",
    "has_own_weights",
    "hugging_face_folder",
    "import_object",
    "network_metadata",
    "open_data",
    "open_network",
    "open_tokenizer",
    "origin_of",
    "read_features",
    "write_metadata",
    "write_prediction",
]

METADATA = "network.json"
"""Beside Parquet shards: what a safetensors file of features has in its header."""
TABLES = (".npz", ".csv", ".parquet")
"""Files of class scores, see `salgp.io.class_scores`."""
HUGGING_FACE = "hf:"
ONNX = ".onnx"


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """Features of a file, and what the file records about them.

    Args:
        path: of the file or folder.
        features: of its samples.
        labels: ``(n,)`` true classes, or None.
        metadata: texts by name: the ``output`` that the scores were, names of the ``classes``, the
            ``network`` and how it was read.
    """

    path: Path
    features: Features
    labels: Tensor | None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> list[str] | None:
        """Class names, where the file has them."""
        stored = self.metadata.get("classes")
        return None if stored is None else _class_names(stored, self.path)

    @property
    def known_labels(self) -> Tensor:
        """Its labels; refused where it has none."""
        if self.labels is None:
            advice = "store them under 'labels' (extract does where the data have them)"
            raise ValueError(f"{self.path} has no labels, and this needs them; {advice}")
        return self.labels

    @property
    def origin(self) -> dict[str, Any]:
        """Description of the features, kept with a calibrator that is fitted on them."""
        return origin_of(self.path.name, len(self.features), self.metadata, self.classes)

    def without_augmented(self) -> FeatureFile:
        """The samples themselves; augmented ones are there to be fitted on."""
        plain, rows = self.features.without_augmented()
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, features=plain, labels=labels)


def _class_names(stored: str, path: Path) -> list[str]:
    with reading(path, "features with a list of class names in UTF-8"):
        names = list(map(str, json.loads(stored)))
        "".join(names).encode()
    return names


def origin_of(name: str, n: int, metadata: Mapping[str, str], classes: list[str] | None) -> dict[str, Any]:
    """Description of the data a calibrator was fitted on: their name, number, network and meaning."""
    told = {"features": name, "n": n, "salgp": salgp.__version__}
    return told | _known(network=metadata.get("network"), output=metadata.get("output"), classes=classes)


def _known(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def network_metadata(network: nn.Module, reader: Reader, classes: Sequence[str] | None) -> dict[str, str]:
    """Description of the network in a file of features: enough to put network and calibrator together."""
    header = module_header(network, reader)
    kept = {
        "network": header["fingerprint"]["weights"],
        "output": reader.output or "logits",
        "salgp": salgp.__version__,
        "module": json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION} | header),
    }
    if classes is not None:
        kept["classes"] = json.dumps(list(classes))
    return kept


def read_features(path: str | os.PathLike[str], probs: Sequence[str] | None = None) -> FeatureFile:
    """Features from a safetensors file, Parquet shards, or a table of class scores.

    Args:
        path: file or folder.
        probs: columns of a table that hold the probabilities of the classes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "x.csv").write_text("ant,bee,label\\n0.9,0.1,ant\\n0.2,0.8,bee\\n")
        ...     found = read_features(folder + "/x.csv", probs=["ant", "bee"])
        >>> found.classes, found.labels, found.metadata["output"]
        (['ant', 'bee'], tensor([0, 1]), 'probabilities')
    """
    path = Path(path)
    if (path / "calibrator.safetensors").is_file():
        raise ValueError(f"{path} is a calibrator, but features were expected; are two arguments swapped?")
    if (path / "manifest.json").is_file():
        return _read_store(path)
    if path.suffix in TABLES or any(path.glob("*.parquet")):
        return _read_scores(path, probs)
    if path.is_dir():
        forms = "one .safetensors file, a folder of .parquet files, or class scores as .npz or .csv"
        raise ValueError(f"{path} is a folder without Parquet shards; features are {forms}")
    tensors, metadata = read_tensors(path)
    return FeatureFile(path, *features_of(path, tensors, metadata), metadata)


def _read_store(folder: Path) -> FeatureFile:
    features, labels = FeatureStore(folder).to_features()
    metadata = _beside(folder)
    return FeatureFile(folder, replace(features, network=metadata.get("network")), labels, metadata)


def first_shard(folder: Path) -> tuple[FeatureFile, int]:
    """The first shard of a feature store, and the number of rows in all."""
    store = FeatureStore(folder)
    return FeatureFile(folder, *store.shard(0), _beside(folder)), len(store)


def write_metadata(folder: Path, metadata: Mapping[str, str]) -> Path:
    """Keep beside Parquet shards what a safetensors file has in its header."""
    return write_header(folder / METADATA, "salgp-network", 1, metadata)


def _beside(folder: Path) -> dict[str, str]:
    return read_header(folder / METADATA, "salgp-network", 1) if (folder / METADATA).is_file() else {}


def _read_scores(path: Path, probs: Sequence[str] | None) -> FeatureFile:
    """Class scores as features; with their meaning, class names and unused columns as metadata."""
    scores = read_scores(path, probs)
    make = Features.from_logits if scores.output == "logits" else Features.from_probs
    y = None
    with reading(path, "class scores"):
        features = make(scores.values, scores.layers)
        if scores.labels is not None:
            y = as_labels(scores.labels, len(features), features.n_classes)
    metadata = {"output": scores.output}
    if scores.classes is not None:
        metadata["classes"] = json.dumps(scores.classes)
    if scores.unused:
        metadata["unused"] = ", ".join(scores.unused)
    return FeatureFile(path, features, y, metadata)


def write_prediction(
    path: Path,
    prediction: Prediction,
    before: Tensor,
    classes: Sequence[str] | None = None,
    act: Tensor | None = None,
    sets: Tensor | None = None,
) -> Path:
    """Write one row per sample: label, confidence, its error bar, and the network's own confidence.

    Args:
        path: of a ``.csv`` or ``.parquet`` file.
        prediction: calibrated.
        before: ``(n,)`` the network's own confidence.
        classes: names; a table has them in a column ``class``, and in ``probs.NAME``.
        act: ``(n,)`` decision of a rule on each answer.
        sets: ``(n, c)`` prediction sets; a table has them in ``set.NAME``.
    """
    n_classes = prediction.probs.shape[1]
    if classes is not None and len(set(classes)) != n_classes:
        classes = None
    columns = _figures(prediction, classes) | {"network_confidence": before.cpu().numpy()}
    if act is not None:
        columns["act"] = act.cpu().numpy()
    if prediction.layers is not None:
        columns |= _by_column("correction", prediction.layers.names, prediction.layers.mean)
    names = range(n_classes) if classes is None else classes
    columns |= _by_column("probs", names, prediction.probs)
    if sets is not None:
        columns |= _by_column("set", names, sets)
    return write_table(path, columns, PREDICTION_TABLE)


def _figures(prediction: Prediction, classes: Sequence[str] | None) -> dict[str, Any]:
    """What is one number per sample, and the name of the class beside its number."""
    arrays = prediction.numpy()
    columns = {"label": arrays["label"]}
    if classes is not None:
        columns["class"] = np.array(classes)[arrays["label"]]
    return columns | {name: x for name, x in arrays.items() if x.ndim == 1}


def _by_column(kind: str, names: Iterable[object], matrix: Tensor) -> dict[str, Any]:
    """The columns of a matrix, called after what each is of."""
    parts = matrix.cpu().numpy().T
    return {f"{kind}.{name}": part for name, part in zip(names, parts, strict=True)}


def open_network(spec: str, weights: Path | None = None) -> nn.Module:
    """The network that ``spec`` names, with its weights, in evaluation mode.

    Args:
        spec: ``package.module:factory`` or ``path/to/file.py:factory`` runs the user's own code, by explicit
            request; ``net.onnx`` is run by onnxruntime; ``hf:FOLDER`` is a local Hugging Face folder, nothing
            is downloaded.
        weights: ``.safetensors``, or ``.pt``, ``.pth``, ``.ckpt`` with tensors only.
    """
    if has_own_weights(spec) and weights is not None:
        raise ValueError(f"--weights does not go with {spec}, which has its own")
    folder = hugging_face_folder(spec)
    if folder is not None:
        return _hugging_face(folder).eval()
    if spec.endswith(ONNX):
        from salgp.onnx import OnnxNetwork

        return OnnxNetwork(spec).eval()
    model = _made_by_user(spec)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def hugging_face_folder(spec: str) -> Path | None:
    """The folder of a network named ``hf:FOLDER``.

    Example:
        >>> hugging_face_folder("net.onnx") is None
        True
    """
    return Path(spec.removeprefix(HUGGING_FACE)) if spec.startswith(HUGGING_FACE) else None


def has_own_weights(spec: str) -> bool:
    """Does the name stand for a network with its weights?

    Example:
        >>> has_own_weights("net.onnx"), has_own_weights("net.py:make")
        (True, False)
    """
    return spec.startswith(HUGGING_FACE) or spec.endswith(ONNX)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer in the folder of a Hugging Face model, or None where there is none."""
    import transformers

    if not any(folder.glob("tokenizer*")) and not (folder / "vocab.txt").is_file():
        return None
    read = transformers.AutoTokenizer.from_pretrained
    return read(folder, local_files_only=True, trust_remote_code=False)


def import_object(spec: str) -> Any:
    """What ``package.module:name`` or ``path/to/file.py:name`` stands for."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        forms = "package.module:name or path/to/file.py:name (networks also as net.onnx or hf:FOLDER)"
        raise ValueError(f"{spec!r}: expected {forms}")
    module = _imported(where)
    found = vars(module).get(name)
    if found is None:
        known = [key for key, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        raise ValueError(f"{where} has no {name!r}; it has {', '.join(known) or 'no functions'}")
    return found


def _imported(where: str) -> Any:
    """The module of this name, or in this file."""
    is_file = where.endswith(".py")
    folder = str(Path(where).absolute().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)  # importable, as Python does for a script there
    try:
        return _run_file(Path(where)) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and f"{where}.".startswith(f"{error.name}."):
            advice = "give an installed module, one in this folder, or a path ending in .py"
            raise ValueError(f"cannot import {where!r} from here; {advice}") from error
        raise
    finally:
        sys.path.remove(folder)


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"salgp_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _made_by_user(spec: str) -> nn.Module:
    model = import_object(spec)
    if callable(model) and not isinstance(model, nn.Module):
        model = _called(model, spec)
    if not isinstance(model, nn.Module):
        expected = "a torch.nn.Module, or a function without arguments that returns one"
        raise TypeError(f"{spec} gives a {type(model).__name__}; expected {expected}")
    return model


def _called(factory: Callable[[], Any], spec: str) -> Any:
    """What the user's factory returns; where it fails, its name stands before its own words."""
    try:
        return factory()
    except Exception as error:
        raise RuntimeError(f"{spec}() failed: {type(error).__name__}: {error}") from error


def _hugging_face(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        why = "no config.json here; expected a local folder written by save_pretrained"
        raise FileNotFoundError(f"{folder}: {why}")
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not name.endswith("Classification"):
        expected = "...ForSequenceClassification or ...ForImageClassification"
        raise ValueError(f"{folder}: {name or 'no architecture'} is no classifier; expected {expected}")
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the command line has its own
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    finally:
        if shown:
            logging.enable_progress_bar()
