"""Files that run code where a careless reader opens them: every reader refuses, and nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import salgp
from salgp.cli import main
from salgp.decide import Rule
from salgp.io import read_json, read_tensors, read_value
from salgp.io.arrays import read_arrays
from salgp.io.class_scores import read_scores
from salgp.io.weights import load_weights
from salgp.sets import PredictionSets


class Canary:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.place,)


def written(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def archive(name: str, content: bytes) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as made:
            made.writestr(name, content)

    return written(write)


PAYLOADS: dict[str, Callable[[Canary], bytes]] = {
    "pickle": lambda canary: pickle.dumps(canary),
    "checkpoint": lambda canary: written(lambda file: torch.save({"weight": canary}, file)),
    "old checkpoint": lambda canary: written(
        lambda file: torch.save({"weight": canary}, file, _use_new_zipfile_serialization=False)
    ),
    "array of objects": lambda canary: written(lambda file: np.save(file, np.array([canary]))),
    "archive of objects": lambda canary: written(lambda file: np.savez(file, logits=np.array([canary]))),
    "archive of a pickle": lambda canary: archive("archive/data.pkl", pickle.dumps(canary)),
}


def shell(path: Path, *words: str) -> None:
    if main([word.replace("FILE", str(path)) for word in words]):
        raise ValueError("the command was refused")


READERS: dict[str, Callable[[Path], Any]] = {
    ".pt": lambda path: load_weights(nn.Linear(2, 2), path),
    ".npz": read_scores,
    ".npy": read_arrays,
    ".csv": read_arrays,
    ".parquet": read_arrays,
    ".safetensors": read_tensors,
    ".features.safetensors": salgp.Features.load,
    ".sets.safetensors": PredictionSets.load,
    ".value.safetensors": lambda path: read_value(path, "salgp-calibrator", 1),
    ".json": read_json,
    ".rule.json": Rule.load,
    ".info.npz": lambda path: shell(path, "info", "FILE"),
    ".fit.npz": lambda path: shell(path, "fit", "FILE", "-o", "FILE-out"),
    ".onnx": lambda path: shell(path, "extract", "FILE", "FILE", "-o", "FILE.safetensors"),
}


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_reader_runs_what_a_file_holds(payload: str, suffix: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / f"file{suffix}"
    path.write_bytes(PAYLOADS[payload](Canary(canary)))
    with pytest.raises((ValueError, TypeError, OSError, KeyError)):
        READERS[suffix](path)
    assert not canary.exists()


@pytest.mark.parametrize("payload", ["pickle"])
def test_the_canary_sings(payload: str, tmp_path: Path) -> None:
    """Where a careless reader opens the file, the code runs: the test above can fail."""
    pickle.loads(PAYLOADS[payload](Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()
