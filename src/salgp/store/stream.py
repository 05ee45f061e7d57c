"""A feature store as a source for out-of-core fits: steps and passes that leave their results in a folder.

Each piece of a pass is a range of shards and one file; each step is one value. Both are whole or absent, so
that a killed fit, continued with the same call, repeats at most the pieces that were under way and ends in
the same bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from salgp.features import Features, load_features
from salgp.progress import progress_bar
from salgp.storage import pack, read_header, read_tensors, reading, unpack, write_header, write_tensors
from salgp.store.engines import run
from salgp.store.manifest import Manifest, claim, sweep
from salgp.store.sampling import subset_of
from salgp.store.store import FeatureStore

__all__ = ["StoreSource", "read_value", "run_piece", "write_value"]

MAX_PIECES = 1024
"""Most pieces of a pass; beyond that a piece has several shards."""


@dataclass(frozen=True)
class StoreSource:
    """The rows of a store, as `salgp.calibrators.source.Source` asks for them.

    Args:
        store: calibration data.
        reference: training data, or None.
        work: folder for what is done already.
        how: options of `salgp.store.engines.run`.
        subset_rows: rows of a subset in memory.
        inducing: where inducing rows come from.
        rounds: most passes of an iterated fit.
        seed: of the subset.
        verify: compare the checksum of every shard in the first pass.
        progress: show rate and time left.
    """

    store: FeatureStore
    reference: FeatureStore | None
    work: Path
    how: Mapping[str, Any]
    subset_rows: int
    inducing: str
    rounds: int
    seed: int
    verify: bool
    progress: bool

    @property
    def rows(self) -> int:
        """Number of calibration rows."""
        return len(self.store)

    @property
    def has_reference(self) -> bool:
        """Is there a store of the training set?"""
        return self.reference is not None

    def claim(self, job: Mapping[str, Any]) -> None:
        """Begin or continue a job in the locked working folder; one that holds another job is refused."""
        claim(self.work)
        header = {
            "store": self.store.identity(),
            **({} if self.reference is None else {"reference": self.reference.identity()}),
            **job,
            "subset": self.subset_rows,
            "inducing": self.inducing,
            "rounds": self.rounds,
            "seed": self.seed,
        }
        Manifest.open(self.work, "salgp-fit", header)

    def subset(self) -> tuple[Features, Tensor]:
        """A stratified sample with whole groups."""
        path = self.work / "subset.safetensors"
        if not path.is_file():
            features, labels = subset_of(self.store, self.subset_rows, self.seed)
            features.save(path, labels)
        found, known = load_features(path)
        assert known is not None
        return found, known

    def kept(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value called ``name``, computed now where it is not there yet."""
        path = self.work / f"{name}.json"
        if not path.is_file():
            write_value(path, compute())
        return read_value(path)

    def over_rows(
        self, name: str, function: Callable[..., Any], state: Any, *, reference: bool = False
    ) -> Any:
        """Add up ``function`` over all shards; finished pieces are taken from their files."""
        store = self.reference if reference else self.store
        if store is None:
            raise ValueError("this source has no reference: give a store of the network's training set")
        folder, checked = self.work / name, self.work / f"{'reference' if reference else 'store'}.checked"
        folder.mkdir(exist_ok=True)
        sweep(folder)
        self.kept(f"{name}-state", lambda: state)
        files = {
            str(folder / f"piece-{first:06d}.json"): (first, last) for first, last in _ranges(store.n_shards)
        }
        verify = self.verify and not checked.is_file()
        given = (str(self.work / f"{name}-state.json"), str(store.folder))
        todo = [(function, *given, *files[f], f, verify) for f in files if not Path(f).is_file()]
        self._run(name, store, files, todo)
        checked.touch()
        return added(read_value(Path(file)) for file in files)

    def _run(
        self,
        name: str,
        store: FeatureStore,
        files: Mapping[str, tuple[int, int]],
        todo: list[tuple[Any, ...]],
    ) -> None:
        size = {file: sum(store.rows[slice(*pieces)]) for file, pieces in files.items()}
        done = len(store) - sum(size[piece[5]] for piece in todo)
        with progress_bar(name, len(store), self.progress, done=done, unit="rows") as advance:
            for file in run(run_piece, todo, **self.how):
                advance(size[file])


def run_piece(
    function: Callable[..., Any], state: str, store: str, first: int, last: int, out: str, verify: bool
) -> str:
    """Add up ``function`` over shards ``first`` to ``last - 1`` and write the sum to ``out``."""
    value, source = read_value(Path(state)), FeatureStore(store)
    parts = (function(value, *source.shard(index, verify=verify), index) for index in range(first, last))
    write_value(Path(out), added(parts))
    return out


def added(parts: Iterable[Any]) -> Any:
    """Sum in the given order, which fixes every bit of the result; two parts are in memory at a time.

    Example:
        >>> added([1, 2, 3])
        6
    """
    return functools.reduce(operator.add, parts)


def write_value(path: Path, value: Any) -> None:
    """Write any storable value as ``path`` (JSON, last) and its tensors beside it."""
    tensors: dict[str, Tensor] = {}
    packed = pack(value, tensors)
    write_tensors(path.with_suffix(".safetensors"), tensors, {"format": "salgp-value"})
    write_header(path, "salgp-value", 1, {"value": packed})


def read_value(path: Path) -> Any:
    """Inverse of `write_value`."""
    tensors, _ = read_tensors(path.with_suffix(".safetensors"))
    value = read_header(path, "salgp-value", 1).get("value")
    with reading(path, "what was written"):
        return unpack(value, tensors)


def _ranges(n_shards: int) -> list[tuple[int, int]]:
    size = max(1, -(-n_shards // MAX_PIECES))
    return [(first, min(first + size, n_shards)) for first in range(0, n_shards, size)]
