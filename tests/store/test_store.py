"""`FeatureStore`: what is written is read back, in a stream, whatever the batches; a damaged byte
is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from scale_jobs import contents, loader, network, part_loader, samples, small_store
from sealing import edit_header

import salgp
from salgp.features import Features
from salgp.io import ChecksumError, FormatError, digest, files
from salgp.network.extract import extract
from salgp.store import columns, engines
from salgp.store.extraction import extract_parts, extract_to_store
from salgp.store.fit import stratified, subset_of
from salgp.store.manifest import Manifest
from salgp.store.store import FeatureStore, write_store


def same(a: Features, b: Features) -> bool:
    return (
        a.widths == b.widths
        and torch.equal(a.logits, b.logits)
        and all(torch.equal(a.layers[k], b.layers[k]) for k in a.layers)
    )


@pytest.mark.parametrize("batch", [1000, 333, 64])
def test_round_trip_does_not_depend_on_batches(tmp_path: Path, batch: int) -> None:
    features, labels = samples(1000)
    parts = ((features[i : i + batch], labels[i : i + batch]) for i in range(0, 1000, batch))
    store = write_store(parts, tmp_path / "a", rows=150)
    found, known = store.to_features()
    assert same(found, features)
    assert torch.equal(known, labels)
    assert store.rows == [150] * 6 + [100]
    assert len(store) == 1000
    assert contents(tmp_path / "a") == contents(small_store(tmp_path / "b", 1000, 150).folder)


def test_batches_are_bounded_and_in_order(tmp_path: Path) -> None:
    features, labels = samples(500)
    store = write_store([(features, labels)], tmp_path, rows=200)
    parts = list(store.batches(128))
    assert [len(f) for f, _ in parts] == [128, 72, 128, 72, 100]
    assert same(Features.concatenate([f for f, _ in parts]), features)


def test_batches_have_8192_samples_unless_told_otherwise(tmp_path: Path) -> None:
    features = Features(torch.arange(2 * 8193.0).reshape(-1, 2))
    store = write_store([(features, None)], tmp_path, rows=10_000)
    assert [(len(f), y) for f, y in store.batches()] == [(8192, None), (1, None)]


def test_a_shard_is_plain_parquet_in_one_row_group(tmp_path: Path) -> None:
    """Without dictionaries and statistics, which take room and say nothing about features."""
    store = small_store(tmp_path, n=50, rows=50)
    metadata = pq.ParquetFile(store.folder / "part-000000.parquet").metadata
    assert metadata.num_row_groups == 1
    group = metadata.row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        assert column.compression == "ZSTD"
        assert not column.is_stats_set
        assert not column.has_dictionary_page


@pytest.mark.parametrize(("workers", "cores", "expected"), [(3, 8, 3), (None, 8, 8), (None, None, 1)])
def test_pieces_at_once(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, cores: int | None, expected: int
) -> None:
    counts, real = [], engines.ThreadPoolExecutor

    def listening(count: int, **how: Any) -> Any:
        counts.append(count)
        return real(count, **how)

    monkeypatch.setattr(engines, "ThreadPoolExecutor", listening)
    monkeypatch.setattr(engines.os, "cpu_count", lambda: cores)
    threads = torch.get_num_threads()
    assert sorted(engines.run(pow, [(i, 2) for i in range(20)], workers=workers)) == [
        i * i for i in range(20)
    ]
    assert counts == [expected]
    assert torch.get_num_threads() == threads


def test_half_precision_keeps_logits_and_refuses_overflow(tmp_path: Path) -> None:
    features, labels = samples(100)
    found, _ = write_store([(features, labels)], tmp_path / "a", dtype="float16").to_features()
    assert torch.equal(found.logits, features.logits)
    assert torch.equal(found.layers["layer0"], features.layers["layer0"].half().float())
    huge = Features(features.logits, {"layer0": features.layers["layer0"] * 1e6})
    with pytest.raises(ValueError, match="too large for float16"):
        write_store([(huge, labels)], tmp_path / "b", dtype="float16")


def test_groups_unlabelled_and_dotted_names(tmp_path: Path) -> None:
    features = Features(
        torch.zeros(6, 2),
        {"a": torch.ones(6, 2), "a.b": 2 * torch.ones(6, 3), "b": torch.zeros(6, 1)},
        torch.arange(6) // 2,
    )
    store = write_store([(features, None)], tmp_path, rows=4)
    found, labels = store.to_features(layers=("a.b", "a"))
    assert labels is None
    assert found.layer_names == ("a.b", "a")
    assert torch.equal(found.layers["a.b"], features.layers["a.b"])
    assert torch.equal(found.groups, features.groups)
    with pytest.raises(KeyError, match="no layer named 'c'"):
        store.shard(0, ("c",))
    with pytest.raises(ValueError, match="has no labels"):
        subset_of(store, 3)


@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_flipped_byte_is_found_and_the_shard_named(tmp_path: Path, where: float) -> None:
    store = small_store(tmp_path)
    path = tmp_path / "part-000002.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[int(where * len(damaged))] ^= 0x10
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError, match=r"part-000002\.parquet is damaged"):
        store.verify()
    with pytest.raises(ChecksumError, match=r"part-000002\.parquet"):
        list(store.batches())
    store.shard(1)


def test_a_missing_shard_and_other_folders_are_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "a")
    (tmp_path / "a/part-000001.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="part-000001"):
        store.verify()
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        FeatureStore(tmp_path)
    (tmp_path / "b").mkdir()
    Manifest(tmp_path / "b", "other", {}).save()
    with pytest.raises(FormatError, match="other"):
        FeatureStore(tmp_path / "b")


def test_an_unfinished_store_is_continued_and_another_job_refused(tmp_path: Path) -> None:
    whole = contents(small_store(tmp_path / "whole").folder)
    store = small_store(tmp_path / "cut")
    store.manifest.complete = False
    del store.manifest.shards[3:]
    store.manifest.save()
    (tmp_path / "cut/part-000003.parquet").unlink()
    (tmp_path / "cut/.part-000003.parquet.0123456789ab.part").write_bytes(b"torn")
    with pytest.raises(ValueError, match="not finished"):
        FeatureStore(tmp_path / "cut")
    assert contents(small_store(tmp_path / "cut").folder) == whole
    features, labels = samples(100)
    with pytest.raises(ValueError, match="another job: layers differ"):
        write_store([(features.select(["layer1"]), labels)], tmp_path / "cut")
    with pytest.raises(ValueError, match="empty"):
        write_store([], tmp_path / "new")


def test_shards_are_of_bounded_size() -> None:
    wide = Features(torch.zeros(1, 10), {"a": torch.zeros(1, 100_000)})
    narrow = Features(torch.zeros(1, 2))
    assert columns.Layout.of(wide, None, "float32").shard_rows == 128
    assert columns.Layout.of(narrow, None, "float32").shard_rows == 2**23
    assert columns.Layout.of(wide, None, "float16").shard_rows == 256


@pytest.mark.parametrize(("n", "size", "offset"), [(50, 7, 0.0), (50, 7, 0.37), (50, 7, 0.99), (9, 20, 0.3)])
def test_stratified_is_every_so_manieth_row_of_the_sorted_ones(n: int, size: int, offset: float) -> None:
    """Position p is the first at or after (j + offset) steps, for some whole number j."""
    strata = torch.randint(4, (n,), generator=torch.Generator().manual_seed(n))
    step = max(n / size, 1.0)
    places = {math.ceil((j + offset) * step) for j in range(-1, n + 1)}
    ordered = sorted(range(n), key=lambda i: (int(strata[i]), i))
    expected = sorted(ordered[p] for p in places if 0 <= p < n)
    assert stratified(strata, size, offset).tolist() == expected
    assert len(expected) in (min(n, size), min(n, size) + 1)


def test_subset_of_a_store(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    features, labels = subset_of(store, 200, seed=1)
    every, known = store.to_features()
    assert len(features) == 200
    assert abs(float(features.correct(labels).double().mean() - every.correct(known).double().mean())) < 0.02
    assert len(subset_of(store, 10**6)[0]) == len(store)
    first, zero, one = (subset_of(store, 200, **seed)[0] for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert same(first, zero)
    assert not same(zero, one)


def test_extracted_store_equals_extract(tmp_path: Path) -> None:
    model, state = network(), torch.get_rng_state()
    store = extract_to_store(model, loader(), tmp_path, rows=50)
    assert torch.equal(torch.get_rng_state(), state)
    features, labels = extract(model, loader())
    found, known = store.to_features()
    assert same(found, features)
    assert torch.equal(known, labels)
    assert store.n_shards == 8


def test_continuing_with_other_data_or_weights_is_refused(tmp_path: Path) -> None:
    extract_to_store(network(), loader(), tmp_path, rows=50)
    with pytest.raises(ValueError, match="other data"):
        extract_to_store(network(), loader(part=1), tmp_path, rows=50)
    other = network()
    other[0].weight.data += 1
    with pytest.raises(ValueError, match="another job: weights differ"):
        extract_to_store(other, loader(), tmp_path, rows=50)
    with pytest.raises(ValueError, match="no batch"):
        extract_to_store(network(), [], tmp_path / "new")


def test_a_refused_extraction_leaves_its_folder_free(tmp_path: Path) -> None:
    """Undeclared probabilities, of which the first batch is too small to tell."""
    model = torch.nn.Sequential(network(), torch.nn.Softmax(-1))
    parts = [(x[i : i + 1], y[i : i + 1]) for x, y in loader() for i in range(len(x))]
    with pytest.raises(ValueError, match="look like probabilities"):
        extract_to_store(model, parts, tmp_path)
    declared = salgp.Reader(output="probabilities")
    features, _ = extract(model, loader(), reader=declared)
    found, _ = extract_to_store(model, parts, tmp_path, reader=declared).to_features()
    torch.testing.assert_close(found.logits, features.logits)
    with pytest.raises(ValueError, match="another job: output differ"):
        extract_to_store(model, parts, tmp_path)


def test_extraction_in_parts(tmp_path: Path) -> None:
    store = extract_parts(network, part_loader, 3, tmp_path / "a")
    features, labels = extract(network(), [batch for i in range(3) for batch in part_loader(i)])
    found, known = store.to_features()
    assert torch.equal(known, labels)
    torch.testing.assert_close(found.layers["1"], features.layers["1"])
    before = contents(store.folder)
    assert contents(extract_parts(network, part_loader, 3, tmp_path / "a").folder) == before


def test_perturbed_copies_keep_group_and_family_in_a_store(tmp_path: Path) -> None:
    features, labels = salgp.extract(network(), loader(4), perturb="auto")
    stored, _ = write_store([(features, labels)], tmp_path / "copies").to_features()
    assert torch.equal(stored.groups, features.groups)
    assert torch.equal(stored.families, features.families)
    assert int(features.families.max()) > 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_a_table_becomes_in_memory_is_known_before(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 rows of 3 logits, 50 zeros and a label: 4 bytes each, zeros 2 in half precision."""
    features = Features(torch.zeros(1000, 3), {"a": torch.zeros(1000, 50)})
    store = write_store([(features, torch.zeros(1000).long())], tmp_path / "s", dtype=dtype)
    path = store.folder / "part-000000.parquet"
    needed = 1000 * (3 * 4 + 50 * (4 if dtype == "float32" else 2) + 4)
    monkeypatch.setattr(files, "RATIO", 0)
    monkeypatch.setattr(files, "LARGE", needed)
    assert columns.read_table(path, 1000, store.layout.schema).num_rows == 1000
    monkeypatch.setattr(files, "LARGE", needed - 1)
    with pytest.raises(FormatError, match=f"that say they become {needed:,}"):
        columns.read_table(path, 1000, store.layout.schema)


def test_a_subset_where_shards_lack_classes_is_that_of_one_shard(tmp_path: Path) -> None:
    """Sorted by predicted class: the first shards have never seen the last classes."""
    features, labels = samples(600)
    order = torch.argsort(features.label, stable=True)
    features, labels = features[order], labels[order]
    many = write_store([(features, labels)], tmp_path / "many", rows=40)
    one = write_store([(features, labels)], tmp_path / "one", rows=600)
    (a, y), (b, z) = subset_of(many, 90, seed=3), subset_of(one, 90, seed=3)
    assert len(a) == 90
    assert same(a, b)
    assert torch.equal(y, z)
    strata = 2 * features.label + (features.label == labels)
    kept = 2 * a.label + (a.label == y)
    for stratum in strata.unique():
        share = 90 * float((strata == stratum).double().mean())
        assert abs(int((kept == stratum).sum()) - share) <= 1


def test_the_smallest_subset_is_one_sample_with_its_copies(tmp_path: Path) -> None:
    clean, labels = samples(30)
    parts = [
        (Features(clean.logits, clean.layers, torch.arange(30), torch.full((30,), family)), labels)
        for family in (0, 1, 2)
    ]
    features, _ = subset_of(write_store(parts, tmp_path, rows=50), 1)
    assert features.groups is not None
    assert features.groups.tolist() == [int(features.groups[0])] * 3


def test_a_column_in_pieces_is_one_matrix() -> None:
    pa = pytest.importorskip("pyarrow")
    kind = pa.list_(pa.float32(), 2)
    for pieces in ([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], [[[1.0, 2.0]]], []):
        column = pa.chunked_array([pa.array(piece, kind) for piece in pieces], kind)
        expected = torch.tensor([row for piece in pieces for row in piece]).reshape(-1, 2)
        assert torch.equal(columns._matrix(column), expected)


@pytest.mark.parametrize("offset", [0.0, 0.25, 0.9])
def test_a_sample_takes_every_step_th_row_from_its_start(offset: float) -> None:
    strata = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0, 1, 0])
    order = [i for stratum in (0, 1) for i in range(10) if strata[i] == stratum]
    step = 10 / 4
    starts = [math.ceil((k + offset) * step) for k in range(-1, 4)]  # the first row at or after each step
    expected = sorted(order[i] for i in starts if 0 <= i < 10)
    found = stratified(strata, 4, offset)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.append_column("extra", table.column("label")),
        lambda table: table.drop_columns(["label"]),
        lambda table: table.set_column(1, "label", table.column("label").cast("float64")),
        lambda table: table.rename_columns(["logits", "label", "a", "b", "c"]),
    ],
)
def test_a_shard_with_changed_columns_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Also where its checksum is that of the manifest."""
    small_store(tmp_path)
    path = tmp_path / "part-000001.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    edit_header(tmp_path / "manifest.json", lambda m: (m["shards"][1].update(sha256=digest(path)), m)[1])
    with pytest.raises(FormatError, match="other columns"):
        FeatureStore(tmp_path).shard(1)


@pytest.mark.parametrize("value", [3, None, [], {"a": 1}, True])
def test_a_checksum_of_the_wrong_type_is_a_format_error(tmp_path: Path, value: Any) -> None:
    small_store(tmp_path)
    edit_header(tmp_path / "manifest.json", lambda m: (m["shards"][0].update(sha256=value), m)[1])
    with pytest.raises(FormatError, match="sha256"):
        FeatureStore(tmp_path)


def test_a_stream_whose_columns_change_is_refused(tmp_path: Path) -> None:
    features, labels = samples(40)
    narrow = Features(features.logits, {"layer0": features.layers["layer0"]})
    with pytest.raises(ValueError, match="differ"):
        write_store([(features, labels), (narrow, labels)], tmp_path / "a", rows=40)


@pytest.mark.parametrize("width", [-1, 0, 2**31, 2**70])
def test_widths_that_no_column_has_are_refused(width: int) -> None:
    for layout in ((width, ()), (3, (("conv", width),))):
        with pytest.raises(ValueError, match="widths must be"):
            columns.Layout(*layout, ("label",), "float32")
