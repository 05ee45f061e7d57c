"""Figures of the study from its records and cache: the paper's panels, remade.

Every figure is computed from predictions that were scored, so table and picture cannot disagree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from salgp.io import write_whole
from salgp.plots import new_figure, reliability_diagram
from salgp.prediction import Prediction
from salgp_study.drawings import (
    draw_architectures,
    draw_chips,
    draw_flow,
    draw_flux_distributions,
    draw_lightcurve_grid,
)
from salgp_study.lightcurves import LightCurves, load_plasticc, load_spcc
from salgp_study.mstar import load_mstar
from salgp_study.panel_plots import confusion_matrix, residual_fit
from salgp_study.predictions import is_cached, read_prediction
from salgp_study.published import nearest_test
from salgp_study.sources import data_folder
from salgp_study.store import read_records
from salgp_study.table import Record, grouped

__all__ = ["draw_bbq_prior", "draw_confusion", "draw_panels", "draw_reliability_grid", "make_figures"]

_GRID = (
    "Uncalibrated (Baseline)",
    "Isotonic",
    "BBQ (alpha 1)",
    "Temperature Scaled (init 0.5)",
    "Temperature Scaled (init 2)",
)


def make_figures(
    out: str | os.PathLike[str], data: str | os.PathLike[str] | None = None, dpi: int = 80
) -> list[Path]:
    """Draw all figures the records (and, where at hand, the data) allow into ``figures/``.

    Args:
        out: folder of a study.
        data: folder of the real data; figures of the data are left out where it is absent.
        dpi: resolution.

    Returns:
        The files written.
    """
    records = read_records(out)
    if not records:
        raise FileNotFoundError(f"{out}: no records here; run a study into this folder first")
    figures = {
        "flow": draw_flow(),
        "architectures": draw_architectures(),
        **(_of_data(data_folder(data)) if data is not None or "SALGP_DATA" in os.environ else {}),
        **_of_records(out, records),
    }
    return [_save(figure, Path(out) / "figures" / f"{name}.png", dpi) for name, figure in figures.items()]


def draw_reliability_grid(out: str | os.PathLike[str], records: Sequence[Record]) -> Any:
    """Reliability of the conventional methods (columns) by share of the training data (rows)."""
    fractions = sorted({r["fraction"] for r in records}, reverse=True)
    figure = new_figure(2.6 * len(_GRID), 3 * len(fractions))
    cells = figure.subfigures(len(fractions), len(_GRID), squeeze=False)
    for i, fraction in enumerate(fractions):
        for j, method in enumerate(_GRID):
            record = _one(records, fraction=fraction, method=method, test="pooled")
            if record is not None:
                _reliability(
                    cells[i][j],
                    *read_prediction(out, record)[:2],
                    f"{method.removesuffix(' (Baseline)')}, {fraction:.0%}",
                )
    return figure


def draw_bbq_prior(out: str | os.PathLike[str], records: Sequence[Record]) -> Any:
    """BBQ with the prior alpha = 1 and with .1, on the smallest share of the training data."""
    least = min(r["fraction"] for r in records)
    figure = new_figure(7, 3.4)
    cells = figure.subfigures(1, 2, squeeze=False)[0]
    for cell, alpha in zip(cells, ("1", "0.1"), strict=True):
        record = _one(records, fraction=least, method=f"BBQ (alpha {alpha})", test="pooled")
        if record is not None:
            scores = f"ECE {record['ece']:.4f}, MCE {record['mce']:.3f}"
            title = f"BBQ, alpha {alpha}, {least:.0%} of the data\n{scores}"
            _reliability(cell, *read_prediction(out, record)[:2], title)
    return figure


def draw_panels(out: str | os.PathLike[str], records: Sequence[Record], pooling: str, test: str) -> Any:
    """Residual fit (top, GP methods) and reliability (bottom): uncalibrated, temperature, best single GP, ML,
    HL.
    """
    here = [r for r in records if r["test"] == test and r["pooling"] in (pooling, "none")]
    singles = [r for r in here if r["method"].startswith("Single GP (Layer")]
    names = (
        "Uncalibrated (Baseline)",
        "Temperature Scaled (Baseline)",
        None,
        "SAL-GP (ML) G",
        "SAL-GP (HL) G",
    )
    chosen = [
        min(singles, key=lambda r: r["ece"], default=None) if n is None else _one(here, method=n)
        for n in names
    ]
    figure = new_figure(13, 5.7)
    figure.suptitle(_panels_title(here[0]), fontsize=9)
    cells = figure.subfigures(2, len(chosen), squeeze=False, height_ratios=(2, 3))
    for column, record in enumerate(chosen):
        if record is not None:
            prediction, labels, raw = read_prediction(out, record)
            _reliability(cells[1][column], prediction, labels, f"{record['method']}\nECE {record['ece']:.4f}")
            if prediction.std is not None:
                _residual_fit(cells[0][column].subplots(), prediction, labels, raw)
    return figure


def _panels_title(record: Record) -> str:
    network = f"{record['dataset']}, {record['backbone']}, seed {record['seed']}"
    return (
        f"{network}; test {record['test']}, accuracy {record['accuracy']:.1%}; fitted on {record['fit_on']}"
    )


def draw_confusion(
    prediction: Prediction, labels: Tensor, class_names: Sequence[str], threshold: float = 0.5
) -> Any:
    """Normalised confusion matrix with an ``unknown`` row (true class not in training) and column (confidence
    below ``threshold``).
    """
    side = 2 + 0.5 * len(class_names)
    figure = new_figure(side + 0.6, side)
    said = prediction.label.masked_fill(prediction.confidence < threshold, -1)
    confusion_matrix(labels, said, class_names, figure.subplots())
    return figure


def _of_records(out: str | os.PathLike[str], records: Sequence[Record]) -> dict[str, Any]:
    figures = {}
    for (study, preset), group in grouped(records, ("study", "preset")).items():
        cached = [r for r in group if is_cached(out, r)]
        mine = [r for r in cached if r["seed"] == cached[0]["seed"]]
        if not mine:
            continue
        study = study if preset != "paper" else f"{study}-paper"
        if study.startswith("mstar-fractions"):
            figures["reliability-grid"] = draw_reliability_grid(out, mine)
            figures["bbq-prior"] = draw_bbq_prior(out, mine)
        elif not study.startswith("mstar-adam"):
            test = nearest_test(mine) or mine[0]["test"]
            for fit_on in dict.fromkeys(r["fit_on"] for r in mine):
                part = [r for r in mine if r["fit_on"] == fit_on]
                for pooling in dict.fromkeys(r["pooling"] for r in part if r["method"].startswith("SAL-GP")):
                    figures[f"panels-{study}-{pooling}-{fit_on}"] = draw_panels(out, part, pooling, test)
            figures[f"confusion-{study}"] = _confusion(out, mine, test)
    return figures


def _confusion(out: str | os.PathLike[str], records: Sequence[Record], test: str) -> Any:
    record = _one(records, test=test, method="SAL-GP (ML) G") or records[0]
    prediction, labels, _ = read_prediction(out, record)
    return draw_confusion(prediction, labels, record["class_names"])


def _of_data(folder: Path) -> dict[str, Any]:
    figures = {}
    if (folder / "mstar_chips.npz").is_file():
        figures["mstar-chips"] = draw_chips(load_mstar(folder / "mstar_chips.npz"))
    curves, metadata = (
        folder / "plasticc_lightcurves_100_objects.parquet",
        folder / "plasticc_train_metadata.parquet",
    )
    if curves.is_file() and metadata.is_file():
        loaded = load_plasticc(curves, metadata)
        figures["lightcurves"] = draw_lightcurve_grid(loaded)
        figures |= _fluxes(loaded, "plasticc", "ugrizy")
    if (folder / "spcc_lightcurves.parquet").is_file():
        figures |= _fluxes(load_spcc(folder, max_steps=128), "spcc", "griz")
    return figures


def _fluxes(curves: LightCurves, name: str, bands: str) -> dict[str, Any]:
    """Distributions of the fluxes and of their errors, over all objects."""
    return {
        f"flux-{name}": draw_flux_distributions(curves, "flux", bands),
        f"flux-error-{name}": draw_flux_distributions(curves, "flux error", bands),
    }


def _one(records: Sequence[Record], **wanted: Any) -> Record | None:
    return next((r for r in records if all(r[k] == v for k, v in wanted.items())), None)


def _reliability(cell: Any, prediction: Prediction, labels: Tensor, title: str) -> None:
    for ax in reliability_diagram(prediction.confidence, prediction.label == labels, figure=cell):
        _strip(ax)
        ax.set(xlabel="", ylabel="")
        ax.set_title("")
    cell.suptitle(title, fontsize=8)


def _residual_fit(ax: Any, prediction: Prediction, labels: Tensor, raw: Tensor, most: int = 400) -> None:
    assert prediction.std is not None
    rows = slice(None, None, max(1, len(labels) // most))
    residual = (prediction.label == labels).double() - raw
    residual_fit(residual[rows], (prediction.confidence - raw)[rows], prediction.std[rows], ax)
    ax.set_title("")
    _strip(ax)


def _strip(ax: Any) -> None:
    ax.tick_params(labelsize=6)
    if ax.get_legend() is not None:
        ax.get_legend().remove()


def _save(figure: Any, path: Path, dpi: int) -> Path:
    return write_whole(path, lambda part: figure.savefig(part, format="png", dpi=dpi))
