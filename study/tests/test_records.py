"""The committed records: every Gaussian process says how it was fitted, and the page says what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from salgp_study.claims import NEAR, of_networks
from salgp_study.methods import APPROXIMATE, methods_of
from salgp_study.presets import PRESETS
from salgp_study.reproduction import PAGE, RECORDS, ROW, TABLES, add_records, all_tables, page
from salgp_study.store import read_archive

ROOT = Path(__file__).parents[2]
LIMIT = 3000
"""Rows up to which the paper's models are declared exact."""
GAUSSIAN = ("sal-gp", "refined-sal-gp", "residual-gp")
NETWORKS = (
    *(("mstar-soc", seed) for seed in (0, 1, 2)),
    *(("mstar-soc-aconvnet", seed) for seed in (0, 1)),
    ("mstar-soc-resnet18", 0),
    ("mstar-convnet", 0),
    *(("spcc-rnn", seed) for seed in (0, 1, 2)),
)
"""Study and seed of the networks of the set exact."""


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return read_archive(ROOT / RECORDS)


def test_every_gaussian_process_says_its_inference(records: list[dict[str, Any]]) -> None:
    mine = [r for r in records if r["config"]["calibrator"] in GAUSSIAN]
    assert len(mine) > 1000
    for r in mine:
        assert r["inference"] in ("exact", "inducing")
        assert isinstance(r["at_bounds"], list)
        assert r["n_rows"] > 0


def test_rows_that_fit_are_exact_unless_their_name_says_otherwise(records: list[dict[str, Any]]) -> None:
    for r in records:
        if "inference" in r and r["n_rows"] <= LIMIT and "inducing" not in r["method"]:
            assert r["inference"] == "exact", r["method"]


@pytest.mark.parametrize("preset", ["exact", "exact-all"])
def test_the_exact_sets_are_exact(records: list[dict[str, Any]], preset: str) -> None:
    """Verdicts follow from them: no row of their claims may be an approximation that its name hides."""
    mine = [r for r in records if r["preset"] == preset and r["config"]["calibrator"] in GAUSSIAN]
    assert mine
    for r in mine:
        assert r["n_rows"] <= LIMIT
        assert r["inference"] == ("inducing" if r["method"].endswith(APPROXIMATE) else "exact"), r["method"]


def test_exact_and_approximate_rows_stand_beside_each_other(records: list[dict[str, Any]]) -> None:
    mine = [r for r in of_networks(records) if r["preset"] == "exact"]
    found = {(r["study"], r["seed"], r["method"]) for r in mine}
    assert {(study, seed) for study, seed, _ in found} == set(NETWORKS)
    for network in NETWORKS:
        for name in ("SAL-GP (ML) G", "SAL-GP (HL) G"):
            assert (*network, name) in found
            assert (*network, name + APPROXIMATE) in found


def test_the_set_exact_all_is_of_all_validation_samples(records: list[dict[str, Any]]) -> None:
    """ML and HL of every network: as many stacked rows as in the paper's protocol, 1,285 to 2,755."""
    mine = [r for r in records if r["preset"] == "exact-all" and r["config"]["calibrator"] in GAUSSIAN]
    stacked = [r for r in mine if r["method"] in ("SAL-GP (ML) G", "SAL-GP (HL) G")]
    networks = {(r["study"], r["seed"]) for r in mine}
    assert {(r["study"], r["seed"], r["method"][8:10]) for r in stacked} == {
        (*network, model) for network in networks for model in ("ML", "HL")
    }
    for r in stacked:
        assert r["n_rows"] == 5 * r["sizes"]["validation"]
        assert 1285 <= r["n_rows"] <= 2755


def test_rows_of_a_network_come_from_one_training(records: list[dict[str, Any]]) -> None:
    trained: dict[tuple[str, str, int], set[tuple[str, float]]] = {}
    for r in records:
        if r["preset"] in ("exact", "exact-all") and r["test"] in NEAR:
            network = trained.setdefault((r["preset"], r["study"], r["seed"]), set())
            network.add((r["cache"]["train"], r["accuracy"]))
    assert all(len(found) == 1 for found in trained.values())


@pytest.mark.parametrize("preset", ["cpu", "paper", "exact", "exact-all"])
def test_no_preset_approximates_what_can_be_exact(preset: str) -> None:
    gp = PRESETS[preset].gp.get("mstar", {})
    for group in ("ml", "hl", "coregionalised", "additive", "architectures", "single"):
        for method in methods_of(group, 5, gp):
            assert method.arguments["inference"] == "auto"
            assert method.arguments["exact_limit"] == LIMIT


def test_the_page_is_made_from_the_records(records: list[dict[str, Any]]) -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(records)


def test_the_tables_are_made_from_the_records(records: list[dict[str, Any]]) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / TABLES).glob("*.md")}
    assert kept == all_tables(records)


def test_tables_that_documents_name_are_there() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"study/results/[\w./-]+\.md", text))
    assert len(named) > 5
    assert all((ROOT / name).is_file() for name in named)


def test_new_records_take_the_place_of_older_ones_of_their_row(tmp_path: Path) -> None:
    archive, place = tmp_path / "records.jsonl.gz", dict.fromkeys(ROW, 0)
    a, b = ({"key": key, **place, "method": key} for key in "ab")
    assert add_records([a, b], archive) == 2
    assert add_records([b, {**a, "key": "c"}], archive) == 1
    assert [r["key"] for r in read_archive(archive)] == ["b", "c"]
