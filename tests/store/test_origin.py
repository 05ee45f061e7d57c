"""A store knows what it was made from: network, settings and every sample; anything else is refused."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scale_jobs import contents, samples, small_store
from sealing import edit_header
from torch import nn

import salgp
from salgp.features import Features
from salgp.io import FormatError, LockedError, locked
from salgp.store import FeatureStore, extract_parts, extract_to_store, write_store
from salgp.store.manifest import Manifest, content_digest
from salgp.store.scoring import score


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def batches(n: int = 8, changed: int | None = None) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    found = [(torch.randn(5, 4, generator=g), torch.arange(5) % 3) for _ in range(n)]
    if changed is not None:
        found[changed][0][-1, -1] += 1e-3
    return found


def part_loader(part: int) -> list[Any]:
    return batches()[4 * part : 4 * part + 4]


def extract(folder: Path, model: nn.Module | None = None, data: Any = None, **options: Any) -> FeatureStore:
    return extract_to_store(model or network(), data or batches(), folder, rows=10, **options)


def test_the_same_call_changes_nothing_and_runs_the_network_on_the_first_batch_only(tmp_path: Path) -> None:
    extract(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model, calls = network(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    extract(tmp_path, model)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(calls) <= 4, "the first batch tells which layers there are"


@pytest.mark.parametrize(
    ("why", "again"),
    [
        ("weights differ", lambda f: extract(f, network(1))),
        (
            "network, weights",
            lambda f: extract(f, nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))),
        ),
        ("made from other data", lambda f: extract(f, data=batches(8, 0))),
        ("made from other data", lambda f: extract(f, data=batches(8, 5))),
        ("made from other data", lambda f: extract(f, data=batches(4))),
        ("made from other data", lambda f: extract(f, data=batches(10))),
        ("made from other data", lambda f: extract(f, data=batches(7))),
        ("seed", lambda f: extract(f, reader=salgp.Reader(seed=3))),
        ("layers", lambda f: extract(f, reader=salgp.Reader(["0"]))),
        ("numbers", lambda f: extract(f, data=[x for x, _ in batches()])),
        ("labels_at", lambda f: extract(f, reader=salgp.Reader(labels_at=1))),
        ("pooling", lambda f: extract(f, reader=salgp.Reader(pooling={"1": "flatten"}))),
        ("pooling_function", lambda f: extract(f, reader=salgp.Reader(pooling=torch.abs))),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, why: str, again: Callable[[Path], Any]) -> None:
    extract(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=why):
        again(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def part(index: int, changed: int | None = None) -> list[Any]:
    return batches(8, changed)[2 * index : 2 * index + 2]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("weights differ", {"make_model": lambda: network(1)}),
        ("layers differ", {"reader": salgp.Reader(["0"])}),
        ("other data", {"make_loader": functools.partial(part, changed=5)}),
        ("other data", {"n_parts": 2}),
        ("other data", {"n_parts": 4}),
    ],
)
def test_anything_else_is_refused_in_parts(tmp_path: Path, why: str, change: dict[str, Any]) -> None:
    job: dict[str, Any] = {"make_model": network, "make_loader": part, "n_parts": 3}
    extract_parts(**job, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=why):
        extract_parts(**{**job, **change}, out=tmp_path)
    if "n_parts" not in change:
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_every_part_has_its_own_network_and_lets_it_go(tmp_path: Path) -> None:
    made: list[weakref.ref[nn.Module]] = []
    seeds = iter((0, 0, 1, 1))

    def make() -> nn.Module:
        model = network(next(seeds))
        made.append(weakref.ref(model))
        return model

    first, second = (extract_parts(make, part, 2, tmp_path / name).to_features()[0] for name in "ab")
    assert len(made) == 4
    assert not torch.equal(first.logits, second.logits)
    gc.collect()
    assert all(found() is None for found in made)


def test_a_store_is_read_as_the_calibrator_was(tmp_path: Path) -> None:
    """With the taps of a classifier: pooling and forward function as at calibration."""
    data = batches(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier = salgp.calibrate(
            network(),
            data,
            reader=salgp.Reader(forward=lambda model, batch: 2 * model(batch[0])),
        )
    store = extract_to_store(classifier.model, data, tmp_path / "a", rows=10, reader=classifier.taps)
    expected, _ = classifier.extract(data)
    found, _ = store.to_features()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.layers["1"], expected.layers["1"])
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    extract_to_store(classifier.model, data, tmp_path / "a", rows=10, reader=classifier.taps)
    assert {path.name: path.read_bytes() for path in store.folder.iterdir()} == before
    whole = extract_parts(lambda: classifier.model, lambda i: data, 1, tmp_path / "b", reader=classifier.taps)
    assert torch.equal(whole.to_features()[0].logits, expected.logits)


@pytest.mark.filterwarnings("ignore")
def test_scores_of_another_network_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    fitted = salgp.calibrators.get("temperature").fit(*salgp.extract(network(), batches(20)))
    saved = fitted.save(tmp_path / "cal")
    features, labels = salgp.extract(network(1), batches())
    assert score(extract(tmp_path / "own").folder, saved, tmp_path / "out").rows == 40
    read = extract(tmp_path / "read", network(1))
    written = write_store([(features, labels)], tmp_path / "written")
    for store in (read, written):
        with pytest.raises(ValueError, match="a network with other weights"):
            score(store.folder, saved, tmp_path / f"out {store.folder.name}")


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    extract(tmp_path)
    with pytest.raises(ValueError, match="other data"):
        extract(tmp_path, data=[(x, (y + 1) % 3) for x, y in batches()])


def test_a_killed_run_continues_with_the_same_data_only(tmp_path: Path) -> None:
    def dying() -> Any:
        yield from itertools.islice(batches(), 5)
        raise KeyboardInterrupt

    whole = extract(tmp_path / "whole")
    for name in ("a", "b"):
        with pytest.raises(KeyboardInterrupt):
            extract(tmp_path / name, data=dying())
        manifest = Manifest.read(tmp_path / name, "salgp-feature-store", unfinished=True)
        assert len(manifest.shards) < 3, "what was made after the list was saved is made again"
    extract(tmp_path / "a")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in whole.folder.iterdir()
    }
    if manifest.shards:
        with pytest.raises(ValueError, match="other data"):
            extract(tmp_path / "b", data=batches(8, 1))


def test_streams_of_features_are_recognised_too(tmp_path: Path) -> None:
    x = Features(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    y = torch.arange(20) % 3
    write_store([(x, y)], tmp_path, rows=8)
    write_store([(x[:9], y[:9]), (x[9:], y[9:])], tmp_path, rows=8)
    for other in [(x[:16], y[:16]), (Features(-x.logits), y), (x, (y + 1) % 3)]:
        with pytest.raises(ValueError, match="other data"):
            write_store([other], tmp_path, rows=8)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    store = extract(tmp_path / "store")
    from salgp.calibrators import get

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = get("temperature").fit(*store.to_features()).save(tmp_path / "cal")
    for folder, write in [
        ("store", lambda: extract(tmp_path / "store")),
        ("out", lambda: score(store.folder, saved, tmp_path / "out")),
        ("new", lambda: write_store([store.to_features()], tmp_path / "new")),
    ]:
        with locked(tmp_path / folder), pytest.raises(LockedError, match="is being written"):
            write()
        write()


BAD: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no field 'file'", lambda m: m["shards"][0].update(file="../outside.parquet")),
    ("expected 1000000000000 rows, got 10", lambda m: m["shards"][0].update(rows=10**12)),
    ("'rows' of Shard", lambda m: m["shards"][0].update(rows="10")),
    ("'rows' of Shard", lambda m: m["shards"][0].update(rows=True)),
    ("less than 0 rows", lambda m: m["shards"][0].update(rows=-1)),
    ("shards are missing", lambda m: m["shards"].pop(0)),
    ("shards are missing", lambda m: m["shards"].clear()),
    ("listed in manifest.json but missing", lambda m: m["shards"].append(m["shards"][0])),
    ("fields of Shard", lambda m: m["shards"].append([])),
    ("other columns", lambda m: m["header"].update(n_classes=7)),
    ("'n_classes' of Layout", lambda m: m["header"].update(n_classes="3")),
    ("'layers' of Layout", lambda m: m["header"].update(layers=[["0", "6"]])),
    ("other columns", lambda m: m["header"].update(numbers=["label", "group"])),
    ("numbers must be some of", lambda m: m["header"].update(numbers=["else"])),
    ("expected 'header'", lambda m: m.update(shards={})),
    ("expected 'header'", lambda m: m.pop("header")),
]


@pytest.mark.parametrize(("says", "change"), BAD, ids=[f"{i}-{says}" for i, (says, _) in enumerate(BAD)])
def test_manifests_are_not_trusted(
    tmp_path: Path, says: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    extract(tmp_path)
    edit_header(tmp_path / "manifest.json", lambda m: (change(m), m)[1])
    with pytest.raises((FormatError, FileNotFoundError), match=says):
        FeatureStore(tmp_path).to_features()


def test_shards_are_no_links(tmp_path: Path) -> None:
    extract(tmp_path / "store")
    part = tmp_path / "store" / "part-000000.parquet"
    part.rename(tmp_path / "moved.parquet")
    part.symlink_to(tmp_path / "moved.parquet")
    with pytest.raises(FormatError, match="symbolic link"):
        FeatureStore(tmp_path / "store").to_features()


JOBS: dict[str, Callable[[Path, Path], Any]] = {
    "store": lambda given, out: write_store([samples(50)], out),
    "extract": lambda given, out: extract(out),
    "parts": lambda given, out: extract_parts(network, part_loader, 2, out),
    "score": lambda given, out: score(given / "store", given / "cal", out, workers=1),
}
MINE = (
    "part-000000.parquet",
    ".tmpnotes",
    ".film.mkv.part",
    "thesis.tex",
    "manifest.jso",
)


@pytest.mark.filterwarnings("ignore:hyperparameter")
@pytest.mark.parametrize("job", JOBS)
def test_a_folder_of_the_user_is_left_alone(tmp_path: Path, job: str) -> None:
    """No file in it is written over, and none that looks like a leftover is removed."""
    features, labels = small_store(tmp_path / "store", n=120, rows=50).to_features()
    salgp.calibrators.get("temperature").fit(features, labels).save(tmp_path / "cal")
    for name in MINE:
        mine = tmp_path / name.strip(".") / name
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(FileExistsError, match=f"holds '{name}', and no job of salgp; it is left alone"):
            JOBS[job](tmp_path, mine.parent)
        assert [(path.name, path.read_text()) for path in mine.parent.iterdir()] == [(name, "mine")]
    left = tmp_path / "killed" / ".manifest.json.0123456789ab.part"
    left.parent.mkdir()
    left.write_text("{")
    JOBS[job](tmp_path, left.parent)
    assert not left.exists(), "what a killed writer of ours left is removed"
    (left.parent / ".film.mkv.part").write_text("mine")
    JOBS[job](tmp_path, left.parent)
    assert (left.parent / ".film.mkv.part").read_text() == "mine"


def test_parts_killed_before_they_were_listed_go_on(tmp_path: Path) -> None:
    whole = extract_parts(network, part_loader, 2, tmp_path / "whole").folder
    assert FeatureStore(whole).manifest.header["source"]["parts"] is True, "it goes on by parts only"

    def dying(part: int) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_parts(network, dying, 2, tmp_path / "cut")
    (tmp_path / "cut" / "part-000000.parquet").write_bytes((whole / "part-000000.parquet").read_bytes())
    assert contents(extract_parts(network, part_loader, 2, tmp_path / "cut").folder) == contents(whole)


def test_batches_of_one_number_have_a_digest() -> None:
    """A number that stands for many has no stride."""
    assert content_digest(torch.ones(()).expand(1)) == content_digest(torch.ones(1))
    assert content_digest(torch.ones(1)) != content_digest(torch.zeros(1))
