"""What clipping into (0, 1) does to the ranking of errors.

    python -m salgp_study.clipping DIR

writes ``study/results/clipping.md``, from the root of the repository: for layer 3 of the stacked models, the
AUROC of ``s + r`` as the Gaussian process gives it, and after it is clipped. Both are read from the cache of
a study.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from salgp.features import load_features
from salgp.io import read_tensors, write_whole
from salgp.metrics import auroc
from salgp_study.claims import NEAR
from salgp_study.predictions import is_cached
from salgp_study.store import read_records
from salgp_study.table import Record, Table

__all__ = ["clipping_table", "unclipped"]

PAGE = Path("study/results/clipping.md")
LAYER = 3
METHODS = (f"SAL-GP (ML) L{LAYER}", f"SAL-GP (HL) L{LAYER}")


def clipping_table(out: str | os.PathLike[str], records: Sequence[Record]) -> Table:
    """AUROC before and after clipping, of every record whose predictions are in the cache."""
    mine = [r for r in records if r["method"] in METHODS and r["test"] in NEAR and is_cached(out, r)]
    heads = ("Network", "Preset", "Pooling", "Method", "Clipped", "AUROC unclipped", "AUROC clipped")
    note = "AUROC of ranking right above wrong predictions. A pair of clipped confidences is a tie: one half."
    rows = tuple(sorted(_row(out, r) for r in mine))
    return Table("clipping", "What clipping does to the ranking of errors", (note,), heads, rows)


def unclipped(out: str | os.PathLike[str], record: Record) -> tuple[Tensor, Tensor]:
    """Confidence ``s + r`` of layer `LAYER` before it is clipped, and which predictions are right."""
    cache, keys, test = Path(out) / "cache", record["cache"], record["test"]
    tensors, _ = read_tensors(cache / f"predictions-{keys['predictions']}.safetensors")
    folder = cache / f"features-{keys['train']}"
    features, labels = load_features(folder / f"{keys['view']}-{test}.safetensors")
    assert labels is not None
    correction = tensors[f"{test}/layers.mean"][:, LAYER - 1]
    return features.confidence.double() + correction, features.correct(labels)


def _row(out: str | os.PathLike[str], record: Record) -> tuple[str, ...]:
    before = float(auroc(*unclipped(out, record)))
    network = f"{record['study']}, seed {record['seed']}"
    place = (network, record["preset"], record["pooling"], record["method"])
    clipped = f"{100 * record['n_clipped'] / record['n']:.0f} %"
    return (*place, clipped, f"{before:.4f}", f"{record['auroc']:.4f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table of a study folder into the repository in the current directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a study, with its cache")
    folder = parser.parse_args(arguments).folder
    text = clipping_table(folder, read_records(folder)).markdown()
    write_whole(PAGE, lambda part: part.write_text(text, encoding="utf-8") and None)


if __name__ == "__main__":
    main()
