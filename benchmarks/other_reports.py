"""The reports of evidently and deepchecks for one small job, to look at beside ours.

Neither installs beside this project's pins, so they need an environment of their own:

    python -m venv other
    other/bin/pip install evidently deepchecks
    other/bin/pip install "pandas<2.3" "numpy<2" "scikit-learn<1.5" "category-encoders<2.7"
    other/bin/python benchmarks/other_reports.py out/other
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

NOISE = 0.4


def main(out: Path) -> None:
    """Write both pages: a classifier of digits, held-out digits as they are, and others with noise."""
    import pandas as pd

    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    train, known, new = np.split(generator.permutation(len(x)), [600, 1200])
    x = x / 16
    model = LogisticRegression(max_iter=500).fit(x[train], y[train])
    noisy = x[new] + NOISE * generator.normal(size=x[new].shape)
    out.mkdir(parents=True, exist_ok=True)
    frames = [_frame(pd, model, *pair) for pair in ((noisy, y[new]), (x[known], y[known]))]
    write_evidently(*frames, out / "evidently.html")
    tables = [pd.DataFrame(a).assign(label=b) for a, b in ((x[known], y[known]), (noisy, y[new]))]
    write_deepchecks(model, *tables, out / "deepchecks.html")


def _frame(pd: Any, model: Any, x: np.ndarray, y: np.ndarray) -> Any:
    p = model.predict_proba(x)
    columns = {f"f{k}": x[:, 20 + k] for k in range(6)}
    answers = {"target": y.astype(str), "prediction": p.argmax(1).astype(str), "confidence": p.max(1)}
    return pd.DataFrame({**columns, **answers})


def write_evidently(current: Any, reference: Any, path: Path) -> None:
    """Quality of the classes, and drift of the columns."""
    from evidently import DataDefinition, Dataset, MulticlassClassification, Report
    from evidently.presets import ClassificationPreset, DataDriftPreset

    what = DataDefinition(
        classification=[MulticlassClassification(target="target", prediction_labels="prediction")],
        numerical_columns=[*(f"f{k}" for k in range(6)), "confidence"],
        categorical_columns=["target", "prediction"],
    )
    data = [Dataset.from_pandas(frame, data_definition=what) for frame in (current, reference)]
    Report([ClassificationPreset(), DataDriftPreset()]).run(*data).save_html(str(path))


def write_deepchecks(model: Any, known: Any, new: Any, path: Path) -> None:
    """All checks of a model."""
    from deepchecks.tabular import Dataset
    from deepchecks.tabular.suites import model_evaluation

    data = [Dataset(frame, label="label", cat_features=[]) for frame in (known, new)]
    model_evaluation().run(*data, model).save_as_html(str(path))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/other"))
