"""The smaller parts of layer evidence by value: rows added and taken back, windows, samples drawn from a
stream, spaces from sums, places, strangeness, permutations. Loops and NumPy throughout.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.calibrators.evidence import condense, reference, streaming
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.condense import class_rows, few_points, packed_points, unpacked
from salgp.calibrators.evidence.model import LogOdds
from salgp.calibrators.evidence.reference import (
    Evidence,
    layer_evidence,
    make_reference,
    points_per_class,
)
from salgp.calibrators.evidence.rows import FittedRows, View, rows_of
from salgp.calibrators.evidence.shift import ShiftReport, _permutation_p
from salgp.calibrators.evidence.strangeness import energy, fit_strangeness
from salgp.calibrators.evidence.streaming import DrawSettings, Moments, SampleRows, first_of_class
from salgp.calibrators.evidence.windows import window_numbers
from salgp.features import Features


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(n: int, seed: int = 0, first: int = 0) -> FittedRows:
    own, agreement, novelty = (drawn(n, 2, seed=seed + i) for i in range(3))
    view = View(own, agreement, novelty, torch.arange(n) % 3)
    group = first + torch.arange(n) // 2
    family = torch.arange(n) % 2
    return FittedRows(view, (drawn(n, seed=seed + 3) > 0).double(), group, family, 0.5 * family)


def test_rows_joined_and_taken_back_are_the_rows_before() -> None:
    a, b = seen(8), seen(6, 10)
    both = a.joined(b)
    assert both.group.tolist() == [*a.group.tolist(), *(4 + b.group).tolist()]
    assert both.families == [1]
    assert both.is_copy.tolist() == [False, True] * 7
    again = both.without(b)
    for name in ("own", "agreement", "novelty", "label"):
        torch.testing.assert_close(getattr(again.view, name), getattr(a.view, name))
    for name in ("correct", "group", "family", "strength"):
        torch.testing.assert_close(getattr(again, name), getattr(a, name))
    empty = a[torch.zeros(0, dtype=torch.long)]
    assert empty.joined(b).group.tolist() == b.group.tolist()


def test_a_row_is_taken_back_once_and_only_if_it_is_there() -> None:
    a = seen(8)
    twice = a.joined(a)
    assert len(twice.without(a)) == 8
    with pytest.raises(ValueError, match="a sample to forget is not among those"):
        twice.without(a).without(a[torch.tensor([0])]).without(a[torch.tensor([0])])
    other = FittedRows(a.view, 1 - a.correct, a.group, a.family, a.strength)
    with pytest.raises(ValueError, match="or its label was another"):
        a.without(other[torch.tensor([1])])
    with pytest.raises(ValueError, match="cannot forget every sample"):
        a.without(a[torch.arange(0, 8, 2)])  # copies alone are no samples


def test_copies_of_unknown_family_and_strength() -> None:
    n = 6
    features = Features(drawn(n, 3), groups=torch.tensor([0, 1, 0, 1, 0, 1]))
    view = seen(n).view
    rows = rows_of(features, view, torch.ones(n))
    assert rows.family.tolist() == [0, 0, 1, 1, 1, 1]
    assert rows.strength.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert rows.group.tolist() == [0, 1, 0, 1, 0, 1]
    families, strengths = torch.tensor([0, 0, 2, 2, 3, 3]), torch.tensor([0.0, 0.0, 0.3, 0.3, 0.7, 0.7])
    known = Features(features.logits, groups=features.groups, families=families, strengths=strengths)
    rows = rows_of(known, view, torch.ones(n))
    assert rows.families == [2, 3]
    torch.testing.assert_close(rows.strength, strengths.double())


def test_windows() -> None:
    t = drawn(7)
    assert window_numbers("all", t).tolist() == [0] * 7
    assert window_numbers(3, t).tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert window_numbers(1, t).tolist() == list(range(7))
    assert window_numbers(np.int64(3), t).tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert window_numbers([4, 4, 1, 1, 1, 9, 9], t).tolist() == [4, 4, 1, 1, 1, 9, 9]
    for wrong in (0, -1, True, 1.5, np.int64(0), np.float32(2), np.bool_(True), "some", [1, 2], [0.5] * 7):
        with pytest.raises((ValueError, TypeError)):
            window_numbers(wrong, t)
    with pytest.raises(ValueError, match="one whole number or name per sample"):
        window_numbers(torch.zeros(7, 1), t)


def test_environments_from_a_table() -> None:
    """A column of names or of whole numbers, whatever its type; one with gaps is refused."""
    pandas = pytest.importorskip("pandas")
    t, names = drawn(4), ["north", "south", "north", "east"]
    index = [7, 3, 9, 1]
    columns = [
        np.array(names, dtype=object),
        pandas.Series(names, index=index),
        pandas.Series(names, dtype="object"),
        pandas.Series(names, dtype="category"),
        pandas.Series(names, dtype="string"),
    ]
    for column in columns:
        assert window_numbers(column, t).tolist() == [1, 2, 1, 0]
    for numbers in (pandas.Series([5, 2, 5, 2]), pandas.Series([5, 2, 5, 2], dtype="object")):
        assert window_numbers(numbers, t).tolist() == [5, 2, 5, 2]
    for gap in (pandas.Series(["a", None, "b", "a"]), pandas.Series([1, None, 2, 1]), np.array([None] * 4)):
        with pytest.raises(ValueError, match="one whole number or name per sample"):
            window_numbers(gap, t)


@pytest.mark.parametrize(
    ("n", "correlation", "refused"), [(50, 0.97, True), (49, 0.97, False), (400, 0.8, False)]
)
def test_rows_sorted_by_confidence_are_no_windows(n: int, correlation: float, refused: bool) -> None:
    """Told by the correlation of each row with the row before, from 50 rows on."""
    steps, t = drawn(n).numpy(), np.zeros(n)
    for i in range(1, n):
        t[i] = correlation * t[i - 1] + math.sqrt(1 - correlation**2) * steps[i]
    t = np.sort(t) if correlation > 0.9 else t
    x = t - t.mean()
    assert ((x[1:] * x[:-1]).sum() / (x * x).sum() > 0.9) == (correlation > 0.9)
    if refused:
        with pytest.raises(ValueError, match="sorted by confidence"):
            window_numbers(10, torch.from_numpy(t))
    else:
        assert len(window_numbers(10, torch.from_numpy(t))) == n
    assert len(window_numbers(10, torch.ones(80))) == 80, "constant rows are in no order"


@pytest.mark.parametrize("per_class", [1, 2, 5])
def test_samples_drawn_from_a_stream_by_a_loop(per_class: int) -> None:
    """However the rows are cut, the smallest numbers of each class stay, in the order of the rows."""
    g = torch.Generator().manual_seed(0)
    label, key = torch.randint(0, 4, (40,), generator=g), torch.rand(40, generator=g)
    expected = []
    for c in range(4):
        of_class = [i for i in range(40) if int(label[i]) == c]
        expected += sorted(of_class, key=lambda i: float(key[i]))[:per_class]
    rows = SampleRows({"label": label, "key": key, "row": torch.arange(40)})
    assert first_of_class(rows, per_class).values["row"].tolist() == sorted(expected)
    parts = [first_of_class(rows.take(torch.arange(a, a + 10)), per_class) for a in range(0, 40, 10)]
    total = streaming.ReferenceSums(0, {}, parts[0], per_class)
    for part in parts[1:]:
        total = total + streaming.ReferenceSums(10, {}, part, per_class)
    assert total.drawn.values["row"].tolist() == sorted(expected)
    assert total.n == 30


def test_how_many_samples_are_drawn() -> None:
    assert DrawSettings("full", None, 0).per_class(3) >= 10**15
    assert DrawSettings("prototypes", 7, 0).per_class(3) == 50 * 7
    assert DrawSettings("prototypes", 7, 0).per_class(1000) == 60  # 60,000 in all
    assert DrawSettings("prototypes", 100, 0).per_class(1000) == 100  # and never fewer than the points
    assert DrawSettings("sample", None, 0).per_class(10) == 6000


@pytest.mark.parametrize("width", [2, 3, 9])
def test_a_space_from_sums_is_that_of_the_samples(width: int) -> None:
    x = drawn(30, 4, seed=1)
    unit = x / x.norm(dim=1, keepdim=True)
    halves = [Moments(u.sum(0), u.T @ u) for u in (unit[:11], unit[11:])]
    ours, theirs = (halves[0] + halves[1]).space(30, width), reference._space(x, width)
    torch.testing.assert_close(ours.centre, theirs.centre)
    a, b = ours.project(x), theirs.project(x)
    assert a.shape == (30, min(width, 4))
    torch.testing.assert_close(a.abs(), b.abs(), atol=1e-5, rtol=1e-5)
    values = np.linalg.eigvalsh(np.cov(unit.numpy().T))[::-1]
    expected = values / (values + 1e-3 * values[0])
    torch.testing.assert_close(a.var(dim=0).numpy(), expected[: a.shape[1]], atol=1e-4, rtol=1e-4)


def test_more_dimensions_than_samples_give_the_same_space() -> None:
    """By the singular values of the samples, or by the eigenvalues of their covariance."""
    x = drawn(6, 9, seed=2)
    space = reference._space(x, 64)
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    values, vectors = np.linalg.eigh(np.cov(unit.T))
    values, vectors = values[::-1][:5], vectors[:, ::-1][:, :5]
    expected = (unit - unit.mean(0)) @ (vectors / np.sqrt(values + 1e-3 * values[0]))
    np.testing.assert_allclose(np.abs(space.project(x).numpy()), np.abs(expected), atol=1e-5)


def test_narrow_arrays_are_filled_up_with_zeros() -> None:
    x = drawn(2, 3)
    for q in (3, 4, 5):
        found = reference._wider(x, q)
        assert found.shape == (2, q)
        torch.testing.assert_close(found[:, :3], x)
        assert float(found[:, 3:].abs().sum()) == 0.0
    square = reference._wider(drawn(2, 3, 3), 4, 2)
    assert square.shape == (2, 4, 4)
    torch.testing.assert_close(square[:, :3, :3], drawn(2, 3, 3))
    assert float(square[:, 3].abs().sum() + square[:, :, 3].abs().sum()) == 0.0


@pytest.mark.parametrize("n", [5, 64, 65])
@pytest.mark.parametrize("width", [3, 16, 20])
def test_the_place_of_a_sample_is_its_first_whitened_coordinates(n: int, width: int) -> None:
    """Layer after layer, at most 16 of each; a few samples and many go different ways."""
    features = Features(drawn(120, 2), {"a": drawn(120, 20, seed=1), "b": drawn(120, 30, seed=2)})
    made = make_reference(features, torch.arange(120) % 2, width=width)
    found = layer_evidence(made, features[torch.arange(n)])
    expected = [made.layers[name].project(features.layers[name][:n])[:, :16] for name in ("a", "b")]
    torch.testing.assert_close(found.place.double(), torch.cat(expected, 1), atol=1e-5, rtol=1e-4)
    assert found.place.shape == (n, 2 * min(width, 16))
    rough = layer_evidence(made, features[torch.arange(n)], refine=False)
    torch.testing.assert_close(rough.novelty, found.novelty, atol=1e-3, rtol=1e-3)


def test_classes_with_two_reference_samples_are_known() -> None:
    """The usual agreement is asked for only where a class has one or none."""
    x = drawn(6, 4)
    enough = make_reference(Features(x[:, :3], {"a": x}), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert enough.typical is None
    lacking = make_reference(Features(x[:, :3], {"a": x}), torch.tensor([0, 1, 0, 0, 1, 2]))
    assert lacking.typical is not None
    features = Features(x[:, :3], {"a": x})
    counts = torch.tensor([3, 2, 1])
    own = counts[features.label] > 1
    found = layer_evidence(lacking, features, torch.arange(6)).agreement
    torch.testing.assert_close(lacking.typical, found[own].quantile(0.5, dim=0))


def test_evidence_of_some_rows() -> None:
    whole = Evidence(drawn(5, 2), drawn(5, 2, seed=1), drawn(5, 7, seed=2), drawn(5, seed=3))
    some = whole[torch.tensor([3, 0])]
    for name in ("agreement", "novelty", "place", "length"):
        torch.testing.assert_close(getattr(some, name), getattr(whole, name)[[3, 0]])


def test_points_of_each_class() -> None:
    assert [points_per_class(None, c) for c in (0, 1, 50, 51, 2000, 10**6)] == [200, 200, 200, 196, 5, 5]
    assert points_per_class(3, 10**6) == 3
    with pytest.raises(ValueError, match="size must be at least 1"):
        points_per_class(0, 3)
    assert [(c, rows.tolist()) for c, rows in class_rows(torch.tensor([2, -1, 2, 0]))] == [
        (-1, [1]),
        (0, [3]),
        (2, [0, 2]),
    ]


def test_prototypes_of_many_samples_are_those_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 50 samples per prototype are clustered."""
    x = torch.cat([drawn(300, 2), 9 + drawn(300, 2, seed=1)])
    some = torch.randperm(600, generator=torch.Generator().manual_seed(5))[:100].sort().values
    expected = few_points(x[some], 2, "prototypes", 5)
    torch.testing.assert_close(few_points(x, 2, "prototypes", 5), expected)
    monkeypatch.setattr(condense, "PER_CLUSTER", 300)
    all_of_them = few_points(x, 2, "prototypes", 5)
    means = torch.stack([x[:300].mean(0), x[300:].mean(0)]).to(all_of_them)
    torch.testing.assert_close(all_of_them.sort(dim=0).values, means, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("precision", "error"), [("single", 1e-6), ("half", 2e-3), ("8-bit", 0.5 * 4 / 127)])
def test_points_come_back_as_precisely_as_they_are_kept(precision: str, error: float) -> None:
    x = drawn(50, 3).clamp(-4, 4)
    kept, step = packed_points(x, precision)
    assert (step is not None) == (precision == "8-bit")
    assert float((unpacked(kept, step).double() - x).abs().max()) < error
    assert {"single": 4, "half": 2, "8-bit": 1}[precision] == kept.element_size()


def test_strangeness_by_loops() -> None:
    """``h(e) + h(-a) + max h(N) / 3`` with medians and 1.4826 median deviations of the originals."""
    view, logits = seen(40).view, drawn(40, 3, seed=9)
    e = np.array([-math.log(sum(math.exp(v / 1.7) for v in row)) for row in logits.tolist()])
    np.testing.assert_allclose(energy(logits, 1.7), e)
    mean = view.agreement.mean(1).numpy()
    usual = fit_strangeness(view, energy(logits, 1.7))
    h = lambda z: math.log1p(math.log1p(math.exp(z)))
    expected = []
    for i in range(40):
        z = []
        for x in (e, mean):
            centre = np.median(x)
            z.append((x[i] - centre) / (1.4826 * np.median(np.abs(x - centre))))
        expected.append(h(z[0]) + h(-z[1]) + max(h(v) for v in view.novelty[i].tolist()) / 3)
    np.testing.assert_allclose(usual(view, energy(logits, 1.7)), expected, rtol=1e-6)


@pytest.mark.parametrize("n_last", [3, 6])
def test_permutations_against_all_of_them(n_last: int) -> None:
    """The part that is drawn may be the first or the last; the observed order counts as one permutation."""
    score = drawn(9).numpy()
    observed = score[-n_last:].mean()
    shares = [np.mean(score[list(some)]) >= observed - 1e-12 for some in combinations(range(9), n_last)]
    assert 0.05 < np.mean(shares) < 0.95
    assert _permutation_p(score, n_last, 4000, 0) == pytest.approx(np.mean(shares), abs=0.04)
    few = {_permutation_p(score, n_last, 25, seed) for seed in range(5)}
    assert all(round(26 * p) == pytest.approx(26 * p) and p >= 1 / 26 for p in few)
    assert _permutation_p(np.ones(9), n_last, 10, 0) == 1.0


def test_a_report_names_the_most_moved_layer_first() -> None:
    report = ShiftReport({"a": -0.2, "b": 1.5}, 0.0314, 0.876, 50)
    assert str(report) == "50 samples: moved by b +1.5, a -0.2 sd (p = 0.0314); expected accuracy 0.88"


def test_a_posterior_goes_to_another_precision_whole() -> None:
    parts = (drawn(3), drawn(2), drawn(3, 3), drawn(3, 2), drawn(2))
    model = LogOdds(*parts)
    assert model.to(torch.zeros(1, dtype=torch.float64)) is model
    single = model.to(torch.zeros(1))
    for name, part in zip(("weights", "offsets", "covariance", "pull", "spare"), parts, strict=True):
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name), part.float())


@pytest.mark.parametrize(
    "wrong",
    [
        {"guard": 1.5},
        {"guard": -0.1},
        {"window": 1},
        {"trust": 1.1},
        {"clean": 0.0},
        {"clean": 1.1},
        {"ridge": 0.0},
    ],
)
def test_settings_out_of_range_one_by_one(wrong: dict[str, float]) -> None:
    x = drawn(30, 3)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
        LayerEvidence(**wrong).fit(Features(x, {"a": x}), x.argmax(1))


def test_what_leaving_each_out_says_is_kept_for_originals() -> None:
    """Half of the way from one standard deviation below to one above; scores of the originals alone."""
    cal, rows = LayerEvidence(), seen(20)
    cal.seen_, cal.looseness = rows, 1.3
    f, variance = drawn(20, seed=7), drawn(20, seed=8).square()
    cal._judge_itself(f, variance)
    sigmoid = lambda z: 1 / (1 + math.exp(-z))
    for j, i in enumerate(range(0, 20, 2)):
        sd = 1.3 * math.sqrt(float(variance[i]))
        assert float(cal.loo_confidence_[j]) == pytest.approx(sigmoid(float(f[i])))
        half = (sigmoid(float(f[i]) + sd) - sigmoid(float(f[i]) - sd)) / 2
        assert float(cal.loo_std_[j]) == pytest.approx(half)
    p, y = cal.loo_confidence_.numpy(), rows.correct[::2].numpy()
    assert cal.loo_scores_["nll"] == pytest.approx(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))
