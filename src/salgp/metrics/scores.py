"""All scores of a prediction in one value that prints, compares and travels as JSON, and bootstrap intervals.

A resample is a vector of counts, how often each sample was drawn: multinomial, ``n`` draws over ``n``
samples. Metrics that are a `Statistic` take many count vectors at once; any other function of arrays is
called once per resample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from salgp.metrics.binned import debiased_ece, ece, mce
from salgp.metrics.interval import interval_coverage, interval_width
from salgp.metrics.metric import ArrayLike, FloatArray, IntArray, Metric, Statistic, as_distribution
from salgp.metrics.proper import accuracy, brier, mean_confidence, mean_variance, nll, nll_correct
from salgp.metrics.ranking import aurc, auroc
from salgp.metrics.smooth import smooth_ece
from salgp.prediction import checked

if TYPE_CHECKING:
    from salgp.prediction import Prediction

__all__ = ["read_by", "register"]

_CHUNK = 2**18
"""Counts made at a time: few enough to stay in cache."""

METRICS: dict[str, Metric[...]] = {
    metric.name: metric
    for metric in (
        accuracy,
        mean_confidence,
        ece,
        debiased_ece,
        mce,
        smooth_ece,
        nll,
        nll_correct,
        brier,
        auroc,
        aurc,
        mean_variance,
        interval_coverage,
        interval_width,
    )
}
"""What `evaluate` computes, by name, in the order of the tables."""


def register(metric: Metric[...]) -> Metric[...]:
    """Add a metric to those that `evaluate`, the tables, the report and the command line show.

    Args:
        metric: made by `salgp.metrics.metric`; it may read ``confidence``, ``correct``, ``probs``,
            ``labels``, ``std``, ``lower``, ``upper`` and ``novelty`` of a prediction.

    Returns:
        The metric itself, so that this is a decorator.

    Example:
        >>> from salgp.metrics import metric
        >>> register(METRICS["ece"]).name  # the same again changes nothing
        'ece'
    """
    if not isinstance(metric, Metric):
        raise TypeError(f"expected a Metric made by salgp.metrics.metric, got {type(metric).__name__}")
    known = ", ".join(_READABLE)
    for name in metric.reads:
        if name not in _READABLE:
            raise ValueError(f"{metric.name} reads {name!r}; a metric of predictions may read {known}")
    if METRICS.setdefault(metric.name, metric) is not metric:
        raise ValueError(f"there is a metric called {metric.name!r} already; choose another name")
    return metric


class Scores:
    """Scores of one prediction, each an attribute; None where a score does not exist (no variance, only
    correct samples, ...).

    Args:
        n: samples.
        n_unknown: samples of a class the network does not know (-1): wrong, and left out of multi-class
            metrics.
        values: name of each metric in `METRICS` to its value.

    Example:
        >>> scores = Scores(n=10, n_unknown=0, ece=0.02, auroc=None)
        >>> scores.ece, scores["n"], scores.auroc
        (0.02, 10, None)
    """

    def __init__(self, n: int, n_unknown: int, **values: float | None) -> None:
        self._values: dict[str, Any] = {"n": n, "n_unknown": n_unknown, **values}

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"no score called {name!r}; known: {', '.join(values)}")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def as_dict(self) -> dict[str, Any]:
        """Names to values."""
        return dict(self._values)

    def to_json(self) -> str:
        """One JSON object; absent scores are null."""
        return json.dumps(self._values)

    def __repr__(self) -> str:
        return f"Scores({', '.join(f'{name}={x!r}' for name, x in self._values.items())})"

    def __str__(self) -> str:
        return _aligned([(name, [_text(x)]) for name, x in self._values.items()])

    def _repr_html_(self) -> str:
        return Comparison({"": self})._repr_html_()


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of several methods on the same samples; prints as a table with one row per method.

    Args:
        rows: method name to scores, in the order given.
    """

    rows: Mapping[str, Scores]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Method name to its scores."""
        return {name: scores.as_dict() for name, scores in self.rows.items()}

    def to_json(self) -> str:
        """One JSON object, keyed by method."""
        return json.dumps(self.as_dict())

    def best(self, score: str = "nll_correct") -> str:
        """The method with the best ``score``: the smallest or the largest, as the metric says."""
        best = next(iter(self.best_first(score).rows))
        if self.rows[best].as_dict().get(score) is None:
            raise ValueError(f"no method has the score {score!r}")
        return best

    def best_first(self, score: str = "nll_correct") -> Comparison:
        """The same rows, best first; those without this score last."""
        metric = METRICS.get(score)
        sign = -1 if metric is not None and metric.larger_is_better else 1

        def place(row: tuple[str, Scores]) -> tuple[bool, float]:
            value = row[1].as_dict().get(score)
            return value is None, sign * (value or 0.0)

        return Comparison(dict(sorted(self.rows.items(), key=place)))

    def _table(self) -> list[tuple[str, list[str]]]:
        """Head and rows as text: the scores that any method has."""
        values = self.as_dict()
        known = {key: None for row in values.values() for key in row}
        shown = [key for key in known if any(row.get(key) is not None for row in values.values())]
        rows = [(name, [_text(row.get(key)) for key in shown]) for name, row in values.items()]
        return [("method", shown), *rows]

    def __str__(self) -> str:
        return _aligned(self._table())

    def _repr_html_(self) -> str:
        (_, shown), *rows = self._table()
        head = "".join(_html_head(key) for key in ("", *shown))
        body = "".join(_html_row(name, cells) for name, cells in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def evaluate(prediction: Prediction, labels: ArrayLike, n_bins: int = 15) -> Scores:
    """Score a prediction against the true labels.

    Args:
        prediction: of any calibrator.
        labels: ``(n,)`` true classes; -1 for a class the network does not know.
        n_bins: bins of the binned errors.

    Returns:
        All scores.

    Example:
        >>> import torch
        >>> from salgp import Features, Prediction
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> scores = evaluate(Prediction.from_probs(f, f.probs), [0, 1, -1])
        >>> scores.n, scores.n_unknown, round(scores.accuracy, 3), round(scores.nll, 3)
        (3, 1, 0.667, 0.22)
    """
    arrays = arrays_of(prediction, labels)
    y = arrays["labels"]
    values = {name: _value(metric, arrays, n_bins) for name, metric in METRICS.items()}
    return Scores(n=len(y), n_unknown=int((y < 0).sum()), **values)


def arrays_of(prediction: Prediction, labels: ArrayLike) -> dict[str, Any]:
    """Arrays of a prediction and the truth that a metric may read, by name; None where it does not exist.

    Example:
        >>> import torch
        >>> from salgp import Features, Prediction
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> arrays_of(Prediction.from_probs(f, f.probs), [0, 0])["correct"]
        array([ True, False])
    """
    probs, y = as_distribution(checked(prediction).probs, labels)
    return {
        "confidence": prediction.confidence,
        "correct": prediction.label.cpu().numpy() == y,
        "probs": probs,
        "labels": y,
        "std": prediction.std,
        "lower": prediction.lower,
        "upper": prediction.upper,
        "novelty": prediction.novelty,
    }


_READABLE = ("confidence", "correct", "probs", "labels", "std", "lower", "upper", "novelty")
"""Arrays of a prediction that a metric may ask for, see `arrays_of`."""


def compare(predictions: Mapping[str, Prediction], labels: ArrayLike, n_bins: int = 15) -> Comparison:
    """Score several methods on the same samples.

    Args:
        predictions: method name to its prediction.
        labels: ``(n,)`` true classes.
        n_bins: bins of the binned errors.

    Returns:
        A table that prints, with the scores of each method.

    Example:
        >>> import torch
        >>> from salgp import Features, Prediction
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> raw = Prediction.from_probs(f, f.probs)
        >>> even = Prediction.from_confidence(f, torch.full((3,), 0.6))
        >>> compare({"raw": raw, "even": even}, [0, 1, 1]).best("ece")
        'even'
    """
    if not predictions:
        raise ValueError("nothing to compare: the mapping of predictions is empty")
    return Comparison({name: evaluate(each, labels, n_bins) for name, each in predictions.items()})


def read_by(metric: Metric[...], arrays: Mapping[str, Any]) -> list[Any] | None:
    """What the metric reads, of `arrays_of`; None where an array is missing or no class is known."""
    read = [arrays[name] for name in metric.reads]
    unknown = "labels" in metric.reads and (arrays["labels"] < 0).all()
    return None if unknown or any(x is None for x in read) else read


def _value(metric: Metric[...], arrays: Mapping[str, Any], n_bins: int) -> float | None:
    """The metric of these arrays; None where it cannot read them, or is not a number."""
    read = read_by(metric, arrays)
    if read is None:
        return None
    options = {"n_bins": n_bins} if "n_bins" in metric.options else {}
    value = metric(*read, **options)
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _aligned(rows: list[tuple[str, list[str]]]) -> str:
    """Names flush left, values flush right, column by column."""
    names = _padded([name for name, _ in rows], str.ljust)
    columns = zip(*(values for _, values in rows), strict=True)
    cells = [_padded(column, str.rjust) for column in columns]
    return "\n".join("  ".join(line) for line in zip(names, *cells, strict=True))


def _padded(texts: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, texts))
    return [pad(text, width) for text in texts]


def _html_head(name: str) -> str:
    meaning = METRICS[name].sentence if name in METRICS else ""
    return f"<th title='{escape(meaning)}'>{escape(name)}</th>"


def _html_row(name: str, cells: list[str]) -> str:
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{escape(name)}</th>{values}</tr>"


@dataclass(frozen=True, eq=False)
class Interval:
    """A value with its bootstrap interval.

    Args:
        value: the metric of the data themselves.
        lower: lower end of the percentile interval.
        upper: upper end.
        level: probability mass of the interval.
        replicates: ``(n_resamples,)`` the metric of each resample.
    """

    value: float
    lower: float
    upper: float
    level: float
    replicates: FloatArray = field(repr=False)

    @property
    def std_error(self) -> float:
        """Standard deviation of the replicates."""
        return float(np.nanstd(self.replicates, ddof=1))

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.lower:.4f}, {self.upper:.4f}]"


def bootstrap(
    metric: Callable[..., float],
    *arrays: Any,
    n_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.9,
    **options: Any,
) -> Interval:
    """Percentile bootstrap interval of ``metric(*arrays, **options)``: samples are redrawn with replacement,
    all arrays alike.

    Metrics over bins keep the bins of the whole sample in every resample. Calibration errors are biased
    upwards, and resamples doubly so: the interval may lie above the value. Resamples where the metric is NaN
    are left out. The metrics of this package are computed from the counts of many resamples at once; other
    functions are called on each resample.

    Args:
        metric: one of this package, or any function from arrays to a number.
        arrays: its array arguments, with one row per sample.
        n_resamples: number of resamples.
        seed: of the generator; the same seed redraws the same samples, so that replicates of two metrics or
            methods are paired.
        level: probability mass of the interval.
        options: keyword arguments of the metric.

    Returns:
        The value with its interval and all replicates.

    Example:
        >>> from salgp.metrics import accuracy
        >>> result = bootstrap(accuracy, [1] * 80 + [0] * 20)
        >>> result.value, round(result.lower, 1), round(result.upper, 1)
        (0.8, 0.7, 0.9)
    """
    n = _common_length(arrays)
    if n_resamples < 1 or not 0 < level < 1:
        raise ValueError(f"expected n_resamples >= 1 and 0 < level < 1, got {n_resamples} and {level}")
    columns = [x.detach().cpu() if isinstance(x, Tensor) else np.asarray(x) for x in arrays]
    draws = resample_counts(n, n_resamples, seed)
    order = _order(columns[0])
    formula = metric.formula if isinstance(metric, Metric) else metric

    def of_rows(rows: IntArray) -> Any:
        return formula(*(x[rows] for x in columns), **options)

    found = of_rows(order)
    if isinstance(found, Statistic):
        value = found.value()
        replicates = np.concatenate([found.of_weights(counts[:, order].astype(float)) for counts in draws])
    else:
        value = float(found)
        replicates = np.array([float(of_rows(rows)) for counts in draws for rows in _drawn(counts)])
    lower, upper = _quantiles(replicates, level)
    return Interval(value, lower, upper, level, replicates)


def resample_counts(n: int, n_resamples: int, seed: int) -> Iterator[IntArray]:
    """How often each of ``n`` samples is drawn in ``n`` draws with replacement, ``(rows, n)``, a chunk of
    resamples at a time; the draws do not depend on the size of the chunks.

    Example:
        >>> [chunk.sum(axis=1) for chunk in resample_counts(5, 3, seed=0)]
        [array([5, 5, 5])]
    """
    generator = np.random.default_rng(seed)
    step = max(_CHUNK // n, 1)
    for start in range(0, n_resamples, step):
        rows = min(step, n_resamples - start)
        first = n * np.arange(rows)[:, None]
        place = first + generator.integers(n, size=(rows, n))
        counts = np.bincount(place.ravel(), minlength=rows * n)
        yield counts.reshape(rows, n)


def _drawn(counts: IntArray) -> Iterator[IntArray]:
    """Samples of each resample, as often as they were drawn."""
    for row in counts:
        yield np.repeat(np.arange(len(row)), row)


def _order(first: Any) -> IntArray:
    """Samples in order of the first array, so that bins and ranks are contiguous; a metric does not care for
    the order.
    """
    if first.ndim > 1:
        return np.arange(len(first))
    return np.argsort(np.asarray(first), kind="stable")


def _quantiles(replicates: FloatArray, level: float) -> tuple[float, float]:
    if np.isnan(replicates).all():
        return math.nan, math.nan
    tail = (1 - level) / 2
    lower, upper = np.nanquantile(replicates, [tail, (1 + level) / 2]).tolist()
    return lower, upper


def _common_length(arrays: tuple[Any, ...]) -> int:
    lengths = list(map(len, arrays))
    if len(set(lengths)) != 1:
        raise ValueError(f"bootstrap needs arrays of one common length, got {lengths}")
    if 0 in lengths:
        raise ValueError("the arrays are empty: a metric needs at least one sample")
    return lengths[0]
