"""The user's data from a file or folder, as batches for `salgp.calibrate` and `salgp.extract`.

Arrays come from ``.npz``, ``.safetensors``, Parquet or ``.csv``: ``labels`` (or ``label``, ``target``, ``y``)
are the labels, the rest are inputs. One input is passed to the network as it is; of several the caller says
which, or they are passed by name. Columns of a table are stacked by a pattern such as ``f*``. An image folder
has one sub-folder per class, or images only where there are no labels.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.io.arrays import NUMBERS, Array, Arrays, matching, read_arrays, stacked
from salgp.io.files import AnyPath
from salgp.io.images import SUFFIXES, ImageOptions, Pictures, image_files, read_image
from salgp.labels import as_labels, look_up, pop_labels

__all__ = ["FileLoader", "open_data"]

Prepare = Callable[[Arrays], Any]
Names = Sequence[str] | None


@dataclass(frozen=True, eq=False)
class FileLoader:
    """Batches of inputs with labels; iterate as a loader.

    Args:
        n: samples.
        batch_size: samples per batch.
        take: rows ``start..stop`` as one positional input, a tuple of them, or a mapping by name.
        labels: ``(n,)`` or None.
        classes: class names or None.
        tokenizer: that made the inputs from a ``text`` column, or None.
        columns: of the table that were stacked by a pattern, in their order.
    """

    n: int
    batch_size: int
    take: Callable[[slice], Any]
    labels: Tensor | None = None
    classes: list[str] | None = None
    tokenizer: Any = None
    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.n, self.batch_size):
            yield self._batch(slice(start, start + self.batch_size))

    def _batch(self, rows: slice) -> Any:
        inputs = self.take(rows)
        named = isinstance(inputs, Mapping)
        if self.labels is None:
            return inputs if named or len(inputs) > 1 else inputs[0]
        y = self.labels[rows]
        return {**inputs, "labels": y} if named else (*inputs, y)

    @property
    def pictures(self) -> Pictures | None:
        """The samples as pictures, where there is one input of shape ``(n, 1 or 3, height, width)``."""
        first = self.take(slice(0, 1))
        if not isinstance(first, tuple) or len(first) > 1:
            return None
        shape = first[0].shape
        return Pictures(self.n, self.take) if len(shape) == 4 and shape[1] in (1, 3) else None


def open_data(
    path: AnyPath,
    *,
    batch_size: int = 64,
    inputs: Names = None,
    classes: Names = None,
    images: ImageOptions | None = None,
    scale: float | None = None,
    by_name: bool = False,
    tokenizer: Any = None,
    labels: bool = True,
    prepare: Prepare | None = None,
) -> FileLoader:
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
        tokenizer: of transformers, for a ``text`` column.
        labels: read the labels, where there are some.
        prepare: the user's own preprocessing: the named arrays without labels -> one array, or named arrays.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(folder + "/x.npz", x=np.zeros((3, 2), np.float32), y=[0, 1, 1])
        ...     [(x.shape, y) for x, y in open_data(folder + "/x.npz", batch_size=2)]
        [(torch.Size([2, 2]), tensor([0, 1])), (torch.Size([1, 2]), tensor([1]))]
    """
    path = Path(path)
    if path.is_dir() and not any(path.glob("*.parquet")):
        return _image_folder(path, batch_size, classes, images or ImageOptions())
    arrays = read_arrays(path)
    stored = pop_labels(arrays)
    y, names = _labels(stored if labels else None, classes, path)
    if prepare is not None:
        arrays = _prepared(arrays, prepare)
    if "text" not in arrays:
        tokenizer = None
    if tokenizer is not None:
        texts = arrays["text"].tolist()
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
        arrays = dict(tokens)
    tensors, columns = _inputs(arrays, path, inputs, by_name, scale)
    n = _same_length(tensors if y is None else {**tensors, "labels": y}, path)

    def take(rows: slice) -> Any:
        taken = {name: x[rows] for name, x in tensors.items()}
        return taken if by_name else tuple(taken.values())

    return FileLoader(n, batch_size, take, y, names, tokenizer, columns)


def _inputs(
    arrays: Arrays, path: Path, inputs: Names, by_name: bool, scale: float | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The network's inputs by name, and the columns that were stacked for them."""
    if not arrays:
        raise ValueError(f"{path}: no inputs here, only labels")
    patterns = [name for name in inputs or () if "*" in name or "?" in name]
    columns = tuple(column for pattern in patterns for column in matching(arrays, pattern))
    arrays = arrays | {name: stacked(arrays, name) for name in patterns}
    if inputs is None and not by_name:
        _check_single(arrays, path)
    names = inputs or list(arrays)
    for name in names:
        if name not in arrays:
            raise KeyError(f"{path}: no array named {name!r}; it has {', '.join(arrays)}")
    return {name: _numbers(arrays[name], name, path, scale) for name in names}, columns


def _check_single(arrays: Arrays, path: Path) -> None:
    if len(arrays) > 1:
        names = ", ".join(list(arrays)[:20])
        order = "Name arrays with --inputs, in the order of the network's arguments"
        pattern = "stack the columns of a table by a pattern, --inputs '*'"
        text = "turn text into numbers with a function of yours: --prepare FILE.py:NAME"
        raise ValueError(f"{path}: which of {names} are the input? {order}, {pattern}, or {text}")


def _same_length(tensors: Mapping[str, Tensor], path: Path) -> int:
    first, n = next((name, len(x)) for name, x in tensors.items())
    for name, x in tensors.items():
        if len(x) != n:
            sizes = f"{name!r} has {len(x)} rows, {first!r} has {n}"
            raise ValueError(f"{path}: {sizes}; they must describe the same samples")
    return n


def _prepared(arrays: Arrays, prepare: Prepare) -> Arrays:
    try:
        inspect.signature(prepare).bind(arrays)
    except TypeError as error:
        takes = ", ".join(inspect.signature(prepare).parameters) or "nothing"
        expected = "it must take one argument, the dictionary of columns by name"
        example = "def prepare(columns): return columns['age'] / 100"
        raise TypeError(f"--prepare: the function takes {takes}; {expected}, e.g. {example}") from error
    found = prepare(arrays)
    if isinstance(found, Mapping):
        return {str(name): np.asarray(x) for name, x in found.items()}
    return {"prepared": np.asarray(found)}


def _numbers(x: Array, name: str, path: Path, scale: float | None) -> Tensor:
    if x.dtype.kind not in NUMBERS:
        raise TypeError(f"{path}: {name!r} holds {x.dtype}, not numbers")
    tensor = torch.as_tensor(x)
    if tensor.dtype == torch.uint8 and scale is None:
        advice = "say what they mean with --scale, e.g. --scale 0.00392157 for 0..255 -> 0..1"
        raise TypeError(f"{path}: {name!r} holds bytes; {advice}")
    return tensor if scale is None else tensor.float() * scale


def _labels(x: Array | None, classes: Names, path: Path) -> tuple[Tensor | None, list[str] | None]:
    """Class numbers and names, where there are labels."""
    if x is None:
        return None, None
    y: Any = _class_numbers(list(map(str, x.tolist())), classes, path) if x.dtype.kind in "OSU" else x
    if classes is None:
        return as_labels(y, len(y)), None
    return as_labels(y, len(y), len(classes)), list(classes)


def _class_numbers(labels: list[str], classes: Names, path: Path) -> list[int]:
    if classes is None:
        some = ", ".join(sorted(set(labels))[:3])
        advice = "give the order of the classes with --classes A,B,..."
        raise TypeError(f"{path}: the labels are names ({some}, ...), not class numbers; {advice}")
    return look_up(labels, {name: k for k, name in enumerate(classes)}, f"{path}: ")


def _check_class(name: str, names: list[str], folder: Path) -> None:
    if name not in names:
        wrong = f"the sub-folder {name!r} is none of the classes {', '.join(names)}"
        advice = "name all classes in the order of the network's outputs: --classes A,B,..."
        raise ValueError(f"{folder}: {wrong}; {advice}")


def _image_folder(folder: Path, batch_size: int, classes: Names, options: ImageOptions) -> FileLoader:
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    names = list(classes) if classes is not None else folders
    for name in folders:
        _check_class(name, names, folder)
    images = [image_files(folder / name) for name in folders] or [image_files(folder)]
    paths = [path for part in images for path in part]
    if not paths:
        expected = f"one sub-folder per class, or image files ({', '.join(SUFFIXES)})"
        raise ValueError(f"{folder}: no images here; expected {expected}")

    def take(rows: slice) -> tuple[Tensor]:
        return (torch.stack([read_image(path, options) for path in paths[rows]]),)

    labels = None
    if folders:
        numbers = torch.tensor([names.index(name) for name in folders])
        sizes = torch.tensor([len(part) for part in images])
        labels = numbers.repeat_interleave(sizes)
    return FileLoader(len(paths), batch_size, take, labels, names or None)
