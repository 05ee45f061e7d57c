"""Scores on disk are the predictions, in order, whatever the engine, the shards or the precision."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scale_jobs import contents, samples, small_calibrator, small_store

from salgp import calibrators
from salgp.calibrators import load_calibrator
from salgp.calibrators.gp.salgp import ResidualGP
from salgp.features import Features
from salgp.io import ChecksumError
from salgp.store import scoring
from salgp.store.columns import read_table
from salgp.store.scoring import read_scores, score, score_shard
from salgp.store.store import FeatureStore, write_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:hyperparameter optimisation did not converge"),
    pytest.mark.filterwarnings("ignore:hyperparameters ended on their bounds"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a few saved calibrators."""
    path = tmp_path_factory.mktemp("scoring")
    features, labels = small_store(path / "store", n=1500, rows=400).to_features()
    small_calibrator().fit(features[:300], labels[:300]).save(path / "sum")
    small_calibrator(covariance="ml").fit(features[:100], labels[:100]).save(path / "ml")
    ResidualGP(n_inducing=20, max_steps=5).fit(features[:300], labels[:300]).save(path / "residual")
    calibrators.get("temperature").fit(features, labels).save(path / "temperature")
    return path


@pytest.mark.parametrize("name", ["sum", "ml", "residual", "temperature"])
def test_scores_are_the_predictions(folder: Path, tmp_path: Path, name: str) -> None:
    done = score(folder / "store", folder / name, tmp_path / "out", layers=True, workers=2)
    assert done.rows == done.new_rows == 1500
    features, _ = FeatureStore(folder / "store").to_features()
    expected, found = load_calibrator(folder / name).predict(features), read_scores(tmp_path / "out")
    np.testing.assert_array_equal(found["label"], expected.label.numpy())
    for column in ("confidence", "std", "lower", "upper"):
        value = getattr(expected, column)
        assert (column in found) == (value is not None)
        if value is not None:
            np.testing.assert_allclose(found[column], value.numpy(), atol=2e-5)
    if expected.layers is not None:
        for i, term in enumerate(expected.layers.names):
            np.testing.assert_allclose(
                found[f"layer_mean.{term}"], expected.layers.mean[:, i].numpy(), atol=1e-4
            )
            np.testing.assert_allclose(
                found[f"layer_std.{term}"], expected.layers.std[:, i].numpy(), atol=1e-4
            )


def test_workers_batches_and_repetition_do_not_change_a_byte(folder: Path, tmp_path: Path) -> None:
    score(folder / "store", folder / "sum", tmp_path / "a", workers=1)
    score(folder / "store", folder / "sum", tmp_path / "b", workers=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    again = score(folder / "store", folder / "sum", tmp_path / "a")
    assert again.new_rows == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_calibrator_fitted_anew_in_its_folder_is_read_anew(tmp_path: Path) -> None:
    """Temperature scaling keeps all it learned in the header, none in the tensors."""
    features, labels = small_store(tmp_path / "store", n=300).to_features()
    often_wrong = torch.where(torch.arange(300) % 4 == 0, (labels + 1) % 4, labels)
    for name, given in (("right", labels), ("wrong", often_wrong)):
        calibrators.get("temperature").fit(features, given).save(tmp_path / "cal")
        score(tmp_path / "store", tmp_path / "cal", tmp_path / name)
        expected = load_calibrator(tmp_path / "cal").predict(features).confidence
        np.testing.assert_allclose(read_scores(tmp_path / name)["confidence"], expected.numpy(), atol=1e-6)


def test_missing_files_are_made_again(folder: Path, tmp_path: Path) -> None:
    score(folder / "store", folder / "sum", tmp_path / "a")
    whole = contents(tmp_path / "a")
    manifest = scoring.Manifest.read(tmp_path / "a", scoring.KIND, unfinished=True)
    manifest.complete = False
    del manifest.shards[2:]
    manifest.save()
    (tmp_path / "a/part-000002.parquet").unlink()
    with pytest.raises(ValueError, match="not finished"):
        read_scores(tmp_path / "a")
    assert score(folder / "store", folder / "sum", tmp_path / "a").new_rows == 700
    assert contents(tmp_path / "a") == whole


def test_another_job_is_refused(folder: Path, tmp_path: Path) -> None:
    score(folder / "store", folder / "sum", tmp_path / "a")
    with pytest.raises(ValueError, match="calibrator differ"):
        score(folder / "store", folder / "ml", tmp_path / "a")
    with pytest.raises(ValueError, match="another job: layers"):
        score(folder / "store", folder / "sum", tmp_path / "a", layers=True)


def test_damage_and_bad_arguments(folder: Path, tmp_path: Path) -> None:
    small_store(tmp_path / "store")
    path = tmp_path / "store/part-000003.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError, match="part-000003"):
        score(tmp_path / "store", folder / "sum", tmp_path / "out")
    with pytest.raises(ValueError, match="engine must be"):
        score(folder / "store", folder / "sum", tmp_path / "x", engine="slurm")
    with pytest.raises(FileNotFoundError):
        score(folder / "store", folder / "nothing", tmp_path / "y")


def test_threads_are_given_back_and_progress_shows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    score(folder / "store", folder / "sum", tmp_path / "a", progress=True)
    assert torch.get_num_threads() == before
    assert "1500/1500" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "layers"), [("sum", True), ("sum", False), ("temperature", True)])
def test_columns_of_a_scored_shard(folder: Path, tmp_path: Path, name: str, layers: bool) -> None:
    """Layers where they are asked for and where there are some, each under its name; nothing else."""
    score(folder / "store", folder / name, tmp_path / "out", layers=layers, workers=1)
    features, _ = FeatureStore(folder / "store").to_features()
    expected, found = load_calibrator(folder / name).predict(features), read_scores(tmp_path / "out")
    columns = {"label": expected.label, "confidence": expected.confidence}
    columns |= {k: v for k in ("std", "lower", "upper", "novelty") if (v := getattr(expected, k)) is not None}
    if layers and expected.layers is not None:
        for i, term in enumerate(expected.layers.names):
            columns |= {f"layer_mean.{term}": expected.layers.mean[:, i]}
            columns |= {f"layer_std.{term}": expected.layers.std[:, i]}
        assert len(columns) > 8
    assert set(found) == set(columns)
    for column, value in columns.items():
        np.testing.assert_allclose(found[column], value.numpy(), atol=1e-6, err_msg=column)


def test_a_scoring_says_how_long_it_took_and_what_was_new(folder: Path, tmp_path: Path) -> None:
    start = time.perf_counter()
    first = score(folder / "store", folder / "temperature", tmp_path / "a", workers=1)
    taken = time.perf_counter() - start
    again = score(folder / "store", folder / "temperature", tmp_path / "a", workers=1)
    assert (first.rows, first.new_rows, again.rows, again.new_rows) == (1500, 1500, 1500, 0)
    assert 0 < first.seconds <= taken
    assert first.folder == tmp_path / "a"


@pytest.mark.parametrize("context", [0, -1, True, "some", 1.5])
def test_contexts_that_are_none(folder: Path, tmp_path: Path, context: object) -> None:
    with pytest.raises(ValueError, match="context must be None, 'all', or the number"):
        score(folder / "store", folder / "sum", tmp_path / "a", context=context)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("context", [1, "all"])
def test_a_context_for_a_method_without_one(folder: Path, tmp_path: Path, context: int | str) -> None:
    with pytest.raises(ValueError, match="predicts each sample by itself: it takes no context"):
        score(folder / "store", folder / "temperature", tmp_path / "a", context=context)  # type: ignore[arg-type]


def test_scores_of_a_single_shard(folder: Path, tmp_path: Path) -> None:
    small_store(tmp_path / "one", n=40, rows=100)
    score(tmp_path / "one", folder / "temperature", tmp_path / "out", workers=1)
    features, _ = FeatureStore(tmp_path / "one").to_features()
    expected = load_calibrator(folder / "temperature").predict(features)
    np.testing.assert_allclose(read_scores(tmp_path / "out")["confidence"], expected.confidence, atol=1e-6)


@pytest.mark.parametrize("window", [7, 400])
def test_a_shard_in_windows_is_the_prediction_in_windows(tmp_path: Path, window: int) -> None:
    """Also where the shard is read in pieces, which end where windows end."""
    features, labels = samples(400)
    g = torch.Generator().manual_seed(0)
    copies = [features]
    for noise in (2.0, 4.0):  # more often wrong than their confidences say
        shaken = {k: x + noise * torch.randn(x.shape, generator=g) for k, x in features.layers.items()}
        wrong = features.logits + noise * torch.randn(features.logits.shape, generator=g)
        copies.append(Features(wrong, shaken))
    families = replace(
        Features.concatenate(copies),
        groups=torch.arange(400).repeat(3),
        families=torch.arange(3).repeat_interleave(400),
    )
    calibrators.get("layer-evidence").fit(families, labels.repeat(3)).save(tmp_path / "cal")
    store = write_store([(copies[1], labels)], tmp_path / "store", rows=400)
    (tmp_path / "out").mkdir()
    given = (
        str(store.folder),
        str(tmp_path / "cal"),
        str(tmp_path / "out"),
        0,
        False,
        window,
    )
    shard = score_shard(*given)
    assert shard.rows == 400
    found = read_table(tmp_path / "out" / "part-000000.parquet", 400).column("confidence").to_numpy()
    plain = load_calibrator(tmp_path / "cal")
    np.testing.assert_allclose(found, plain.predict(copies[1], context=window).confidence, atol=1e-6)
    assert window == 400 or np.abs(found - plain.predict(copies[1]).confidence.numpy()).max() > 1e-3


def test_scores_are_compared_with_their_checksums(folder: Path, tmp_path: Path) -> None:
    score(folder / "store", folder / "temperature", tmp_path / "a", workers=1)
    first, second = (tmp_path / "a" / f"part-{i:06d}.parquet" for i in (0, 1))
    first.write_bytes(second.read_bytes())  # whole, but another shard
    with pytest.raises(ChecksumError, match="part-000000"):
        read_scores(tmp_path / "a")


def test_the_rate_of_a_scoring_is_of_its_new_rows() -> None:
    assert scoring.Scoring(Path("scores"), 900, 300, 1.5).rate == 200.0
