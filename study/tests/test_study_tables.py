"""Tables and figures: the paper's number beside ours, right means, valid files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from salgp.features import Features
from salgp.prediction import LayerTerms, Prediction
from salgp_study import run
from salgp_study.claims import CLAIMS, compare
from salgp_study.clipping import clipping_table
from salgp_study.figures import draw_confusion, make_figures
from salgp_study.methods import methods_of, rows_of_prediction
from salgp_study.presets import Experiment
from salgp_study.published import paper_figures
from salgp_study.reproduction import _agreement
from salgp_study.run import run_study
from salgp_study.store import read_records
from salgp_study.table import Table
from salgp_study.tables import build_tables, make_tables

ROWS = {
    "ece": 0.02,
    "mce": 0.1,
    "nll": 0.3,
    "brier": 0.2,
    "mean_variance": None,
    "nll_correct": 0.25,
    "auroc": 0.9,
}
MORE = {
    "accuracy": 0.9,
    "n_unknown": 0,
    "variance_known": None,
    "variance_unknown": None,
    "ood_auroc_confidence": None,
    "ood_auroc_variance": None,
}


def record(**changes: Any) -> dict[str, Any]:
    base = {
        "study": "mstar-convnet",
        "dataset": "mstar",
        "backbone": "convnet",
        "protocol": "paper",
        "fraction": 1.0,
        "preset": "cpu",
    }
    base |= {
        "pooling": "none",
        "fit_on": "validation",
        "test": "pooled",
        "seed": 0,
        "method": "Uncalibrated (Baseline)",
        "seconds": 1.0,
    }
    return {
        **base,
        **ROWS,
        **MORE,
        "coverage": None,
        "n_clipped": 0,
        "sizes": {"train": 10, "17": 5},
        **changes,
    }


def test_the_papers_130_rows_are_there() -> None:
    figures = paper_figures()
    assert len(figures) == 130
    assert figures["plasticc", "rnn", "none", "SAL-GP (HL) G"]["ece"] == "0.24537"
    assert figures["plasticc", "rnn", "none", "SAL-GP (ML) G(1-3)"]["ece"] == "0.15402"


def test_every_row_of_the_paper_is_a_row_of_ours() -> None:
    groups = ("conventional", "single", "ml", "hl", "subsets")
    ours = {row for group in groups for m in methods_of(group, 5, {}) for row in m.rows(5)}
    assert {method for *_, method in paper_figures()} <= ours


def test_mean_and_std_over_seeds_beside_the_paper() -> None:
    records = [record(seed=s, ece=e) for s, e in ((0, 0.01), (1, 0.03))]
    table = build_tables(records)[0]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["ECE paper"] == "0.01054"
    assert row["ECE ours"] == "0.0200 ± 0.0141"
    assert row["Var. ours"] == "-"
    assert "seeds 0, 1" in table.notes[0]


def test_spcc_stands_beside_plasticc_and_layer_five_beside_no_pooling() -> None:
    spcc = record(
        study="spcc-rnn", dataset="spcc", backbone="rnn", test="photometric", method="SAL-GP (ML) G"
    )
    assert "0.16533" in build_tables([spcc])[0].rows[0]
    fifth = record(pooling="avg", method="Single GP (Layer 5)")
    assert "0.01005" in build_tables([fifth])[0].rows[0]


def test_networks_stand_side_by_side_with_the_paper_last() -> None:
    both = [
        record(preset="paper", study=study, backbone=backbone, seed=seed, ece=ece)
        for study, backbone, seed, ece in (
            ("mstar-soc", "convnet", 0, 0.03),
            ("mstar-soc", "convnet", 1, 0.04),
            ("mstar-soc-aconvnet", "aconvnet", 0, 0.05),
        )
    ]
    tables = {t.name: t for t in build_tables([*both, record(preset="cpu", ece=0.9)])}
    name = f"networks-paper-all-{both[0]['fit_on']}"
    heads = [*(f"mstar-soc, seed {i}" for i in (0, 1)), "mstar-soc-aconvnet, seed 0"]
    assert tables[name].columns == ("Score", "Method", *heads, "paper: convnet", "paper: aconvnet")
    printed = [paper_figures()["mstar", b, "none", both[0]["method"]]["ece"] for b in ("convnet", "aconvnet")]
    assert tables[name].rows[0] == ("ECE", both[0]["method"], "0.0300", "0.0400", "0.0500", *printed)


def test_latex_is_escaped() -> None:
    text = Table("t", "50 % & more", (), ("a_b",), (("1 ± 2",),)).latex()
    assert r"50 \% \& more" in text
    assert r"a\_b" in text
    assert r"$\pm$" in text


def test_layer_rows_are_confidence_plus_that_layers_correction() -> None:
    features = Features(
        torch.tensor([[1.0, 0.0], [0.0, 2.0]]), {f"l{k}": torch.zeros(2, 1) for k in range(2)}
    )
    terms = LayerTerms(
        ("l0", "l1"), torch.tensor([[0.1, -0.2], [0.05, -0.9]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    )
    whole = Prediction.from_confidence(features, features.confidence, layers=terms)
    rows = rows_of_prediction(methods_of("ml", 2, {})[0], whole, features)
    assert list(rows) == ["SAL-GP (ML) G", "SAL-GP (ML) L1", "SAL-GP (ML) L2"]
    torch.testing.assert_close(rows["SAL-GP (ML) L1"].confidence, features.confidence + terms.mean[:, 0])
    assert rows["SAL-GP (ML) L2"].n_clipped == 1
    torch.testing.assert_close(rows["SAL-GP (ML) L2"].std, terms.std[:, 1])


def test_confusion_counts_unknown_rows_and_columns() -> None:
    features = Features(torch.tensor([[3.0, 0.0], [0.1, 0.0], [0.0, 3.0]]))
    figure = draw_confusion(
        Prediction.from_probs(features, features.probs), torch.tensor([0, -1, -1]), ["A", "B"], threshold=0.6
    )
    shown = [t.get_text() or "0.00" for t in figure.axes[0].texts]  # empty cells may be left blank
    assert [text or "0.00" for text in shown] == [
        "1.00",
        "0.00",
        "0.00",
        "0.00",
        "0.00",
        "0.00",
        "0.00",
        "0.50",
        "0.50",
    ]


def test_tables_and_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convnet = Experiment(
        "mstar",
        "convnet",
        poolings=("avg", "max"),
        groups=("conventional", "single", "ml", "hl"),
        fit_on=("validation",),
    )
    few = tuple(
        Experiment("mstar", "aconvnet", "paper", f, ("avg",), ("conventional",), ("validation",))
        for f in (1.0, 0.5)
    )
    monkeypatch.setattr(run, "STUDIES", {"mstar-convnet": ("", (convnet,)), "mstar-fractions": ("", few)})
    for name in ("mstar-convnet", "mstar-fractions"):
        run_study(name, "smoke", (0,), tmp_path)
    tables = make_tables(tmp_path)
    assert all(p.read_text().startswith("### ") and p.with_suffix(".tex").is_file() for p in tables)
    figures = make_figures(tmp_path, data=tmp_path, dpi=40)
    assert {
        "flow.png",
        "architectures.png",
        "reliability-grid.png",
        "panels-mstar-convnet-avg-validation.png",
    } <= {p.name for p in figures}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in figures)
    table = clipping_table(tmp_path, read_records(tmp_path))
    scored = {r["method"]: r for r in read_records(tmp_path) if r["test"] == "17" and r["pooling"] == "avg"}
    shown = {row[3]: row for row in table.rows if row[2] == "avg"}
    assert set(shown) == {"SAL-GP (ML) L3", "SAL-GP (HL) L3"}
    for name, row in shown.items():
        assert row[-1] == f"{scored[name]['auroc']:.4f}"
        assert row[-2] == row[-1] or scored[name]["n_clipped"] > 0


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    for make in (make_tables, make_figures):
        with pytest.raises(FileNotFoundError, match="run a study"):
            make(tmp_path)


def test_claims_are_paired_over_networks() -> None:
    """Four networks, the claimed method better on each: 2 of 16 patterns of signs are as far from zero."""
    pairs = [
        record(seed=seed, method=method, ece=ece)
        for seed in range(4)
        for method, ece in (("SAL-GP (ML) G", 0.1), ("Uncalibrated (Baseline)", 0.11 + 0.01 * seed))
    ]
    claim = next(c for c in CLAIMS if c.better == "SAL-GP (ML) G" and c.other.startswith("Uncal"))
    found = compare(claim, pairs, "validation")
    assert found is not None
    assert (found.n, found.wins, found.p) == (4, 4, 2 / 16)
    assert found.mean == pytest.approx(-0.025)
    assert found.relative == pytest.approx(-0.025 / 0.125)
    assert found.verdict(found.p) == "cannot tell"
    assert found.verdict(0.01) == "reproduces"
    assert replace(found, p=0.03).verdict(0.3) == "points for"
    assert replace(found, p=0.03, mean=0.1).verdict(0.3) == "points against"
    assert compare(claim, pairs, "train") is None
    table = next(t for t in build_tables(pairs) if t.name == "claims-cpu-all-validation")
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert (cells["p"], cells["Verdict"], table.rows[0][-1]) == ("0.125", "cannot tell", "-")


def test_claims_of_good_and_of_small_networks_are_not_mixed() -> None:
    pairs = [
        record(preset=preset, seed=seed, method=method, ece=ece)
        for preset, ours in (("cpu", 0.2), ("paper", 0.05))
        for seed in range(2)
        for method, ece in (("SAL-GP (ML) G", ours), ("Uncalibrated (Baseline)", 0.1))
    ]
    tables = {t.name: t for t in build_tables(pairs)}
    for name, mean, wins in (("cpu", "+100.0 %", "0 of 2"), ("paper", "-50.0 %", "2 of 2")):
        table = tables[f"claims-{name}-all-validation"]
        cells = dict(zip(table.columns, table.rows[0], strict=True))
        assert (cells["Change"], cells["Networks"]) == (mean, wins)


def test_every_row_has_a_cell_for_every_column() -> None:
    rows = [
        record(method=method, test=test, pooling=pooling)
        for pooling in ("avg", "max")
        for test in ("17", "30", "pooled")
        for method in ("SAL-GP (ML) G", "SAL-GP (ML) L1", "SAL-GP (ML) L2", "SAL-GP (ML), offset dropped")
    ]
    for table in build_tables(rows):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.name
    with pytest.raises(ValueError, match="2 columns"):
        Table("t", "T", (), ("a", "b"), (("1", "2", "3"),))


def test_presets_have_tables_of_their_own_and_the_nearest_test_is_named() -> None:
    rows = [
        record(preset=preset, test=test, accuracy=accuracy)
        for preset in ("cpu", "paper")
        for test, accuracy in (("17", 0.96), ("30", 0.5), ("pooled", 0.8))
    ]
    tables = {t.name: t for t in build_tables(rows)}
    near = tables["mstar-convnet-paper-17-validation"]
    assert any("nearest to the paper's" in note for note in near.notes)
    assert "ECE paper" in near.columns
    assert "ECE paper" not in tables["mstar-convnet-30-validation"].columns


def test_the_best_single_gp_is_chosen_with_test_labels_and_variants_do_not_count() -> None:
    singles = [
        record(seed=seed, method=f"Single GP (Layer {k})", pooling="avg", ece=0.1 + 0.01 * abs(k - 3))
        for k in range(1, 6)
        for seed in (0, 1)
    ]
    raw = [record(seed=seed, ece=0.11) for seed in (0, 1)]
    variants = [{**r, "study": "mstar-soc-smoothed", "ece": 9.0} for r in [*singles, *raw]]
    claim = next(c for c in CLAIMS if c.better == "Single GP, best layer")
    found = compare(claim, [*singles, *raw, *variants], "validation")
    assert found is not None
    assert (found.n, found.wins) == (2, 2)
    assert found.mean == pytest.approx(-0.01)


def test_networks_are_listed_with_what_they_know_beside_the_papers() -> None:
    known = {"accuracies": {"train": 1.0, "validation": 0.95, "17": 0.9}}
    rows = [
        record(test="17", **known),
        record(test="17", method="Temperature Scaled (Baseline)", temperature=1.5, **known),
    ]
    table = next(t for t in build_tables(rows) if t.name == "networks")
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["Accuracy"] == "train 1.0000, validation 0.9500, 17 0.9000"
    assert (cells["T (train)"], cells["T (validation)"]) == ("-", "1.5000")
    assert "T 0.0308" in cells["Paper"]
    assert "train 1.0000" in next(t for t in build_tables(rows) if "17" in t.name).notes[0]


def test_two_sets_agree_where_the_claims_one_contradicts_have_a_change_against_them_in_the_other() -> None:
    heads = ("Claim", "Score", "Change", "Verdict")
    ours = Table(
        "a",
        "",
        (),
        heads,
        (
            ("one", "ece", "+1.0 %", "contradicted"),
            ("two", "ece", "+2.0 %", "contradicted"),
            ("three", "ece", "-1.0 %", "reproduces"),
        ),
    )
    rows = (("one", "ece", "+3.0 %", "-"), ("two", "ece", "-0.5 %", "-"), ("three", "ece", "+1.0 %", "-"))
    said = _agreement(ours, Table("b", "", (), heads, rows))
    assert said == "Of the 2 claims contradicted above, 1 have a change against them here too."
