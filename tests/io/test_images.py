"""Pictures for a report are read one by one, when they are shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from salgp.io import loader
from salgp.io.images import ImageOptions, Pictures
from salgp.io.loader import open_data

image = pytest.importorskip("PIL.Image")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were decoded."""
    names: list[str] = []
    decode = loader.read_image

    def counted(path: Path, how: ImageOptions) -> torch.Tensor:
        names.append(path.name)
        return decode(path, how)

    monkeypatch.setattr(loader, "read_image", counted)
    return names


def folder(path: Path, n: int = 30) -> Path:
    for i in range(n):
        image.fromarray(np.full((8 + i % 2, 8), i, np.uint8)).save(path / f"{i:02d}.png")
    return path


def test_only_what_is_asked_for_is_decoded(tmp_path: Path, read: list[str]) -> None:
    found = open_data(folder(tmp_path)).pictures
    assert isinstance(found, Pictures)
    assert len(found) == 30
    read.clear()
    assert found[17].shape == (3, 9, 8)
    assert found[17].max() == np.float32(17 / 255)
    assert read == ["17.png", "17.png"]


def test_arrays_are_pictures_where_they_look_like_some(tmp_path: Path) -> None:
    for shape, expected in (((5, 1, 4, 4), 5), ((5, 2, 4, 4), None), ((5, 4), None)):
        np.savez(tmp_path / "x.npz", x=np.zeros(shape, np.float32))
        found = open_data(tmp_path / "x.npz").pictures
        assert (None if found is None else len(found)) == expected
