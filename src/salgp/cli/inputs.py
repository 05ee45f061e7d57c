"""The user's data, named on the command line, as batches for `salgp.extract`.

Arrays come from ``.npz``, ``.safetensors``, Parquet or ``.csv``: ``labels`` (or ``label``, ``target``, ``y``)
are the labels, the rest are inputs. One input is passed to the network as it is; several are chosen with
``--inputs``, or passed by name to a Hugging Face network. Columns of a table are stacked by a pattern:
``--inputs 'f*'``. An image folder has one sub-folder per class, or images only where there
are no labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.arrays import matching, pop_labels, read_arrays, stacked

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["Images", "Inputs", "open_inputs"]

Prepare = Callable[[dict[str, Any]], Any]
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Images:
    """How images become tensors: ``(C, H, W)`` in [0, 1], then standardised.

    Args:
        size: height and width, or None to keep the images' own.
        gray: one channel instead of three.
        mean: taken off each channel.
        std: each channel is divided by.
    """

    size: tuple[int, int] | None = None
    gray: bool = False
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches of inputs with labels; iterate as a loader.

    Args:
        n: samples.
        batch_size: samples per batch.
        take: rows ``start..stop`` as one positional input, a tuple of them, or a mapping by name.
        labels: ``(n,)`` or None.
        classes: class names or None.
        tokenizer: that made the inputs from a ``text`` column, or None.
        columns: of the table that were stacked by a pattern, in their order.
        numbered: were the classes numbered by the names of their sub-folders?
    """

    n: int
    batch_size: int
    take: Any
    labels: Tensor | None = None
    classes: list[str] | None = None
    tokenizer: Any = None
    columns: tuple[str, ...] = ()
    numbered: bool = False

    def __len__(self) -> int:
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.n, self.batch_size):
            rows = slice(start, min(start + self.batch_size, self.n))
            found = self.take(rows)
            y = None if self.labels is None else self.labels[rows]
            if isinstance(found, Mapping):
                yield found if y is None else {**found, "labels": y}
            else:
                yield found if y is None and len(found) > 1 else (*found, y) if y is not None else found[0]


def open_inputs(
    path: Path,
    *,
    batch_size: int = 64,
    inputs: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    images: Images | None = None,
    scale: float | None = None,
    by_name: bool = False,
    tokenizer: Path | None = None,
    labels: bool = True,
    prepare: Prepare | None = None,
) -> Inputs:
    """Data of any of the formats above.

    Args:
        path: file or folder.
        batch_size: samples per batch.
        inputs: names of the arrays to pass, in order; by default the only one. A name with ``*`` stacks the
            columns of a table that match it.
        classes: class names, where the labels are strings or folders; their order gives the class numbers.
        images: how to read an image folder.
        scale: numbers are multiplied by it, e.g. 1/255 for bytes.
        by_name: pass inputs by name (Hugging Face).
        tokenizer: folder of the tokenizer for a ``text`` column.
        labels: read the labels of arrays, where there are some.
        prepare: the user's own preprocessing: the named arrays without labels -> one array, or named arrays.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if path.is_dir() and not any(path.glob("*.parquet")):
        return _image_folder(path, batch_size, classes, images or Images())
    arrays = read_arrays(path)
    stored = pop_labels(arrays)
    known, names = (None, None) if stored is None or not labels else _labels(stored, classes, path)
    if prepare is not None:
        arrays = _prepared(arrays, prepare)
    coder = None if tokenizer is None or "text" not in arrays else _tokenizer(tokenizer)
    if coder is not None:
        arrays = dict(coder(arrays["text"].tolist(), padding=True, truncation=True, return_tensors="np"))
    found = _of_arrays(arrays, path, batch_size, inputs, by_name, scale, known, names)
    return replace(found, tokenizer=coder)


def _of_arrays(
    arrays: dict[str, Any],
    path: Path,
    batch_size: int,
    inputs: Sequence[str] | None,
    by_name: bool,
    scale: float | None,
    labels: Tensor | None,
    classes: list[str] | None,
) -> Inputs:
    if not arrays:
        raise ValueError(f"{path}: no inputs here, only labels")
    patterns = [name for name in inputs or () if "*" in name or "?" in name]
    columns = tuple(column for pattern in patterns for column in matching(arrays, pattern))
    arrays |= {name: stacked(arrays, name) for name in patterns}
    unknown = [name for name in inputs or () if name not in arrays]
    if unknown:
        raise KeyError(f"{path}: no array named {unknown[0]!r}; it has {', '.join(arrays)}")
    if inputs is None and len(arrays) > 1 and all(x.ndim == 1 for x in arrays.values()) and not by_name:
        texts = [name for name, x in arrays.items() if x.dtype.kind not in "fiub"]
        how = (
            f"{texts[0]!r} holds text, so turn them into numbers with a function of yours: --prepare "
            f"FILE.py:NAME"
            if texts
            else "say which of them are the network's input with --inputs and a pattern, e.g. --inputs '*'"
        )
        raise ValueError(f"{path}: a table with the columns {', '.join(list(arrays)[:20])}; {how}")
    if inputs is None and len(arrays) > 1 and not by_name:
        raise ValueError(
            f"{path}: several arrays could be the input ({', '.join(arrays)}); choose with "
            f"--inputs, in the order of the network's arguments"
        )
    tensors = {name: _numbers(arrays[name], name, path, scale) for name in inputs or arrays}
    n = len(next(iter(tensors.values())))
    for name, x in {**tensors, **({} if labels is None else {"labels": labels})}.items():
        if len(x) != n:
            raise ValueError(
                f"{path}: {name!r} has {len(x)} rows, {next(iter(tensors))!r} has {n}; they "
                f"must describe the same samples"
            )

    def take(rows: slice) -> Any:
        return (
            {name: x[rows] for name, x in tensors.items()}
            if by_name
            else tuple(x[rows] for x in tensors.values())
        )

    return Inputs(n, batch_size, take, labels, classes, columns=columns)


def _prepared(arrays: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
    import numpy as np

    try:
        inspect.signature(prepare).bind(arrays)
    except TypeError as error:
        takes = ", ".join(inspect.signature(prepare).parameters) or "nothing"
        raise TypeError(
            f"--prepare: the function takes {takes}; it must take one argument, the dictionary of columns by "
            f"name, e.g. def prepare(columns): return columns['age'] / 100"
        ) from error
    found = prepare(arrays)
    if isinstance(found, Mapping):
        return {str(name): np.asarray(x) for name, x in found.items()}
    return {"prepared": np.asarray(found)}


def _numbers(x: Any, name: str, path: Path, scale: float | None) -> Tensor:
    import torch

    if x.dtype.kind not in "fiub":
        raise TypeError(f"{path}: {name!r} holds {x.dtype}, not numbers")
    tensor = torch.as_tensor(x)
    if tensor.dtype == torch.uint8 and scale is None:
        raise TypeError(
            f"{path}: {name!r} holds bytes; say what they mean with --scale, e.g. --scale "
            f"0.00392157 for 0..255 -> 0..1"
        )
    return tensor if scale is None else tensor.float() * scale


def _labels(
    x: np.ndarray[Any, Any], classes: Sequence[str] | None, path: Path
) -> tuple[Tensor, list[str] | None]:
    import numpy as np

    from salgp.labels import as_labels

    names = None if classes is None else list(classes)
    if x.dtype.kind in "OSU":
        found = sorted({str(value) for value in x.tolist()})
        if names is None:
            raise TypeError(
                f"{path}: the labels are names ({', '.join(found[:3])}, ...), not class "
                f"numbers; give the order of the classes with --classes A,B,..."
            )
        unknown = [value for value in found if value not in names]
        if unknown:
            raise ValueError(f"{path}: label {unknown[0]!r} is not among --classes {','.join(names)}")
        x = np.asarray([names.index(str(value)) for value in x.tolist()], dtype=np.int64)
    return as_labels(x, len(x), None if names is None else len(names)), names


def _tokenizer(folder: Path) -> Any:
    import transformers

    options: Any = {"local_files_only": True, "trust_remote_code": False}
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _image_folder(folder: Path, batch_size: int, classes: Sequence[str] | None, how: Images) -> Inputs:
    import torch

    folders = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    names = list(classes) if classes is not None else folders
    unknown = [name for name in folders if name not in names]
    if unknown:
        raise ValueError(f"{folder}: sub-folder {unknown[0]!r} is not among --classes {','.join(names)}")
    paths = [p for name in folders for p in _images(folder / name)] if folders else _images(folder)
    if not paths:
        raise ValueError(
            f"{folder}: no images here; expected one sub-folder per class, or image files "
            f"({', '.join(IMAGES)})"
        )
    labels = torch.tensor([names.index(p.relative_to(folder).parts[0]) for p in paths]) if folders else None

    def take(rows: slice) -> tuple[Tensor]:
        return (torch.stack([_read_image(p, how) for p in paths[rows]]),)

    return Inputs(len(paths), batch_size, take, labels, names or None, numbered=classes is None)


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES)


def _read_image(path: Path, how: Images) -> Tensor:
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            image = file.convert("L" if how.gray else "RGB")
            pixels = (
                np.asarray(image if how.size is None else image.resize((how.size[1], how.size[0]))).astype(
                    np.float32
                )
                / 255
            )
    except UnidentifiedImageError as error:
        raise ValueError(f"{path}: not a readable image") from error
    x = torch.as_tensor(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)
    return (x - torch.tensor(how.mean).reshape(-1, 1, 1)) / torch.tensor(how.std).reshape(-1, 1, 1)
