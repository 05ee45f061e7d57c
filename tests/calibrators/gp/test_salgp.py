"""SAL-GP as a calibrator: predictions against dense algebra, degenerate sets, refusals, persistence, the
science.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from posteriors import joint
from references import double_loop
from samples import sample
from sealing import edit_tensors
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import Tensor

import salgp
from salgp.calibrators.gp.correction import predict_corrections
from salgp.calibrators.gp.salgp import SALGP
from salgp.calibrators.gp.structures import rows_of, structure
from salgp.calibrators.loading import read_parts
from salgp.features import Features
from salgp.gp.covariance import Index, Sum, gaps
from salgp.gp.optimise import NotConvergedWarning
from salgp.gp.regression import condition_exact, statistics

COVARIANCES = ["sum", "ml", "hl", "additive", "icm", "lcm", "nested", "concat"]
FEATURES, LABELS = sample(40)
NEW, NEW_LABELS = sample(25, seed=1)


def quick(covariance: str = "sum", **arguments: Any) -> SALGP:
    return SALGP(covariance, **{"max_steps": 8, **arguments})


def fitted(method: SALGP, features: Features = FEATURES, labels: Tensor = LABELS) -> SALGP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return method.fit(features, labels)


# --- predictions against dense algebra
# ---------------------------------------------------------------------------


def test_hl_global_prediction_is_the_papers_closed_form() -> None:
    """Index -1 keeps ``k_global`` only; the sample's L inputs are averaged under their joint posterior."""
    n, new, L = 12, 5, 3
    both = Features.concatenate([FEATURES[:n], NEW[:new]])
    calibrator = fitted(quick("hl", inference="exact", max_steps=3), FEATURES[:n], LABELS[:n])
    theta, noise = (
        calibrator.fitted_.posterior.theta,
        torch.tensor(calibrator.fitted_.log_noise, dtype=torch.float64).exp(),
    )
    K_all = double_loop("hl", theta, both, "matern52", stacked=True)
    K_global = double_loop(
        "hl", {**theta, "local.log_variance": torch.tensor(-torch.inf)}, both, "matern52", stacked=True
    )
    train, test = slice(0, n * L), slice(n * L, None)
    y = FEATURES[:n].residual(LABELS[:n]).double().repeat_interleave(L)
    inverse = torch.linalg.inv(K_all[train, train] + noise * torch.eye(n * L, dtype=torch.float64))
    mean = K_global[test, train] @ inverse @ y
    covariance = K_global[test, test] - K_global[test, train] @ inverse @ K_global[train, test]
    blocks = torch.stack([covariance[i * L : (i + 1) * L, i * L : (i + 1) * L] for i in range(new)])

    prediction = calibrator.predict(NEW[:new])
    assert prediction.std is not None
    expected = (NEW[:new].confidence.double() + mean.reshape(new, L).mean(1)).clamp(1e-6, 1 - 1e-6)
    torch.testing.assert_close(prediction.confidence, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(prediction.std.square(), blocks.mean((1, 2)), rtol=1e-6, atol=1e-9)

    loose = rows_of(calibrator.structure_, NEW[:new]).ungrouped("layer").flatten()
    one_mean, pure_global_variance = calibrator.fitted_.posterior(loose)
    torch.testing.assert_close(one_mean, mean, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(pure_global_variance, covariance.diagonal(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("covariance", ["ml", "hl", "additive", "icm", "lcm", "nested"])
def test_stacked_predictions_are_those_of_the_joint_posterior(covariance: str) -> None:
    """Layer predictions keep local terms; the global one is the mean of the shared function, with full L x L
    covariance.
    """
    calibrator = fitted(quick(covariance, inference="exact", max_steps=3))
    posterior, made = calibrator.fitted_.posterior, calibrator.structure_
    mean, variance, layer_mean, layer_variance = predict_corrections(made, posterior, NEW)
    rows = rows_of(made, NEW)
    joint_mean, among = joint(posterior, rows)
    torch.testing.assert_close(layer_mean, joint_mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(layer_variance, among.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=1e-10)
    shared = rows if covariance in ("icm", "lcm") else rows.ungrouped("layer")
    shared_mean, within = joint(posterior, shared)
    torch.testing.assert_close(mean, shared_mean.mean(1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(variance, within.mean((1, 2)), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_layer_terms_of_sum_add_up_each_with_its_variance(inference: str) -> None:
    calibrator = fitted(quick("sum", inference=inference, n_inducing=20))
    posterior, made = calibrator.fitted_.posterior, calibrator.structure_
    mean, variance, layer_mean, layer_variance = predict_corrections(made, posterior, NEW)
    torch.testing.assert_close(layer_mean.sum(1), mean, rtol=0, atol=1e-8)
    assert layer_mean.shape == layer_variance.shape == (25, 4)
    compared = gaps(rows_of(made, NEW), posterior.rows, made.covariance)
    for index, term in enumerate(made.covariance.terms):  # type: ignore[attr-defined]
        cross = term(posterior.theta, compared)
        prior = posterior.theta[f"{term.block}.log_variance"].exp()
        torch.testing.assert_close(layer_mean[:, index], cross @ posterior.alpha, rtol=0, atol=1e-10)
        expected = prior - ((cross @ posterior.root) ** 2).sum(1)
        torch.testing.assert_close(layer_variance[:, index], expected, rtol=1e-7, atol=1e-10)
    prediction = calibrator.predict(NEW)
    assert prediction.layers is not None
    assert prediction.layers.additive
    assert prediction.layers.names == ("layer0", "layer1", "layer2", "confidence")
    assert prediction.layers.scale == "confidence"
    assert bool((variance >= 0).all())


def test_prediction_is_the_dense_posterior_of_the_residual() -> None:
    calibrator = fitted(quick("concat", inference="exact"))
    posterior = calibrator.fitted_.posterior
    y = FEATURES.residual(LABELS).double()
    rows = rows_of(calibrator.structure_, FEATURES)
    noise = torch.full_like(y, calibrator.fitted_.log_noise).exp()
    again = condition_exact(posterior.covariance, posterior.theta, rows, y, noise)
    torch.testing.assert_close(again.alpha, posterior.alpha)
    mean, variance = again(rows_of(calibrator.structure_, NEW))
    prediction = calibrator.predict(NEW)
    assert prediction.std is not None
    torch.testing.assert_close(prediction.confidence, (NEW.confidence.double() + mean).clamp(1e-6, 1 - 1e-6))
    torch.testing.assert_close(prediction.std, variance.sqrt())


# --- inference
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_all_rows_inducing_predicts_as_exact(covariance: str) -> None:
    """Same hyperparameters, both conditionings: means and variances agree."""
    from salgp.gp.regression import condition_inducing

    calibrator = fitted(quick(covariance, inference="exact", max_steps=3))
    made, exact = calibrator.structure_, calibrator.fitted_
    assert exact.y is not None
    noise = torch.full_like(exact.y, exact.log_noise).exp()
    K = made.covariance(
        exact.posterior.theta, gaps(exact.posterior.rows, exact.posterior.rows, made.covariance)
    )
    inducing = condition_inducing(
        made.covariance,
        exact.posterior.theta,
        exact.posterior.rows,
        statistics(K, K.diagonal(), exact.y, noise),
    )
    for a, b in zip(
        predict_corrections(made, inducing, NEW), predict_corrections(made, exact.posterior, NEW), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(K.diagonal().mean()))


def test_auto_chooses_by_size_and_says_so() -> None:
    assert fitted(quick("ml")).fitted_.inference == "exact"
    small = fitted(quick("ml", n_inducing=30, exact_limit=100))
    assert small.fitted_.inference == "inducing"
    assert len(small.fitted_.posterior.alpha) == 30
    with pytest.raises(ValueError, match="inference must be 'auto', 'exact' or 'inducing', got 'fast'"):
        quick(inference="fast").fit(FEATURES, LABELS)


def test_inducing_bound_is_below_the_exact_evidence() -> None:
    exact = fitted(SALGP("sum", inference="exact"))
    few = fitted(SALGP("sum", inference="inducing", n_inducing=10))
    more = fitted(SALGP("sum", inference="inducing", n_inducing=30))
    assert few.fitted_.log_evidence <= more.fitted_.log_evidence + 1e-3 <= exact.fitted_.log_evidence + 2e-3


@pytest.mark.parametrize("inference", ["exact", "inducing"])
def test_evidence_only_rises_and_is_that_of_the_result(inference: str) -> None:
    short = fitted(quick("sum", inference=inference, n_inducing=20, max_steps=1))
    long = fitted(quick("sum", inference=inference, n_inducing=20, max_steps=60))
    assert long.fitted_.log_evidence >= short.fitted_.log_evidence - 1e-6


def test_adam_recipe_reaches_the_same_evidence() -> None:
    lbfgs = fitted(SALGP("sum"))
    adam = fitted(SALGP("sum", optimizer="adam", max_steps=100, learning_rate=0.1))
    assert adam.fitted_.log_evidence == pytest.approx(lbfgs.fitted_.log_evidence, abs=0.3)
    assert adam.fitted_.reason.startswith("ran its 100 steps")


def test_restarts_never_lower_the_evidence() -> None:
    alone = fitted(quick("ml"))
    several = fitted(quick("ml", restarts=2, seed=3))
    assert several.fitted_.log_evidence >= alone.fitted_.log_evidence - 1e-9


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_non_convergence_warns_with_its_reason_at_the_callers_line(optimizer: str) -> None:
    with pytest.warns(NotConvergedWarning, match="did not converge: ") as caught:
        SALGP("sum", max_steps=2, optimizer=optimizer).fit(FEATURES, LABELS)
    assert Path(caught[0].filename).name == "test_salgp.py"
    method = fitted(SALGP("sum", max_steps=2, optimizer=optimizer))
    assert not method.fitted_.converged
    assert method.fitted_.reason


def test_l_times_the_noise_is_one_row_per_sample_where_layers_are_equal() -> None:
    """L identical layers, each seen with L times the noise, hold the information of one layer."""
    x = FEATURES.layers["layer0"]
    repeated = Features(FEATURES.logits, {"a": x, "b": x, "c": x})
    single = Features(FEATURES.logits, {"a": x})
    hl = structure("hl", repeated.widths, 3)
    rio_like = structure("concat", single.widths, 3)
    log_l, log_v = torch.tensor(0.2, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    off = torch.tensor(-60.0, dtype=torch.float64)
    theta = {
        "global.log_lengthscale": log_l,
        "global.log_variance": log_v,
        "local.log_lengthscale": log_l,
        "local.log_variance": off,
    }
    y = FEATURES.residual(LABELS).double()
    noise = torch.full_like(y, 0.1)
    stacked = condition_exact(
        hl.covariance,
        theta,
        rows_of(hl, repeated).flatten(),
        y.repeat_interleave(3),
        (3 * noise).repeat_interleave(3),
    )
    plain = condition_exact(
        rio_like.covariance,
        {"concat.log_lengthscale": log_l, "concat.log_variance": log_v},
        rows_of(rio_like, single),
        y,
        noise,
    )
    new = Features(NEW.logits, dict.fromkeys("abc", NEW.layers["layer0"]))
    for a, b in zip(
        predict_corrections(hl, stacked, new)[:2],
        predict_corrections(rio_like, plain, new.select(["a"]))[:2],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


# --- the science
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_prediction_keeps_its_promises(covariance: str) -> None:
    p = fitted(quick(covariance)).predict(NEW)
    assert torch.equal(p.label, NEW.label)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(25, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(p.probs.gather(1, p.label[:, None])[:, 0], p.confidence)
    assert p.std is not None
    assert p.lower is not None
    assert p.upper is not None
    assert bool(((p.confidence > 0) & (p.confidence < 1) & (p.std >= 0)).all())
    assert bool(
        ((p.lower >= 0) & (p.lower <= p.confidence) & (p.confidence <= p.upper) & (p.upper <= 1)).all()
    )
    if covariance == "concat":
        assert p.layers is None
        return
    assert p.layers is not None
    assert p.layers.std is not None
    assert p.layers.mean.shape == p.layers.std.shape == (25, len(p.layers.names))


def test_new_samples_profit() -> None:
    features, labels = sample(150, seed=5)
    new, new_labels = sample(400, seed=6)
    prediction = fitted(SALGP("sum"), features, labels).predict(new)
    correct = new.correct(new_labels)
    assert float((prediction.confidence - correct.double()).square().mean()) < 0.8 * float(
        (new.confidence - correct.double()).square().mean()
    )


def test_order_of_calibration_samples_does_not_matter() -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    a = fitted(SALGP("sum")).predict(NEW)
    b = fitted(SALGP("sum"), FEATURES[order], LABELS[order]).predict(NEW)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=0, atol=2e-3)


def test_order_of_predicted_samples_only_changes_the_order() -> None:
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
    calibrator = fitted(quick("hl"))
    torch.testing.assert_close(
        calibrator.predict(NEW[order]).confidence,
        calibrator.predict(NEW).confidence[order],
        rtol=1e-10,
        atol=1e-12,
    )


def test_chunks_of_prediction_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = fitted(quick("ml"))
    whole = calibrator.predict(NEW)
    monkeypatch.setattr("salgp.calibrators.gp.correction.CHUNK_ENTRIES", 1000)
    parts = calibrator.predict(NEW)
    torch.testing.assert_close(whole.confidence, parts.confidence, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole.std, parts.std, rtol=1e-8, atol=1e-10)


def test_same_data_gives_the_same_fit() -> None:
    a, b = (fitted(quick("sum", restarts=1, seed=4)).predict(NEW) for _ in range(2))
    assert torch.equal(a.confidence, b.confidence)


def test_layer_matrix_is_positive() -> None:
    for covariance, rank in (("ml", 0), ("ml", 2), ("icm", 1)):
        gp = fitted(quick(covariance, rank=rank, max_steps=4))
        k = gp.structure_.covariance
        parts = k.terms if isinstance(k, Sum) else k.factors  # type: ignore[attr-defined]
        (index,) = (part for part in parts if isinstance(part, Index))
        B = index.matrix(gp.fitted_.posterior.theta)
        assert B.shape == (3, 3)
        assert float(torch.linalg.eigvalsh(B)[0]) > 0


def test_starting_scales_see_every_layer() -> None:
    """500 samples of 5 layers are 2500 rows; an even stride of 5 would look at the first layer only."""
    from salgp.gp.optimise import typical_square

    block = torch.arange(2500, dtype=torch.float64)[:, None] % 5
    assert typical_square(block) > 0.5
    assert typical_square(block[:1]) == 1.0
    assert typical_square(torch.ones(7, 3)) == 1.0


# --- degenerate but real calibration sets
# ------------------------------------------------------------------------


def degenerate() -> dict[str, tuple[Features, Tensor]]:
    f, y, c = FEATURES, LABELS, FEATURES.n_classes
    duplicated = Features.concatenate([f[:8]] * 4)
    certain = Features(torch.where(torch.arange(c) == f.label[:, None], 1e4, -1e4).double(), f.layers)
    return {
        "all correct": (f, f.label),
        "all wrong": (f, (f.label + 1) % c),
        "all unknown": (f, torch.full_like(y, -1)),
        "some unknown": (f, torch.where(torch.arange(40) % 3 == 0, -1, y)),
        "five samples": (f[:5], y[:5]),
        "two samples": (f[:2], y[:2]),
        "duplicate rows": (duplicated, y[:8].repeat(4)),
        "duplicate rows that disagree": (
            duplicated,
            torch.cat([duplicated.label[:16], (duplicated.label[16:] + 1) % c]),
        ),
        "constant features": (Features(f.logits, {k: torch.ones_like(x) for k, x in f.layers.items()}), y),
        "constant everything": (
            Features(torch.zeros_like(f.logits), {k: torch.zeros_like(x) for k, x in f.layers.items()}),
            y,
        ),
        "one class": (f, torch.zeros_like(y)),
        "one predicted class": (Features(f.logits + torch.tensor([50.0, 0.0, 0.0]), f.layers), y),
        "certain and correct": (certain, f.label),
        "certain and half wrong": (
            certain,
            torch.where(torch.arange(40) % 2 == 0, f.label, (f.label + 1) % c),
        ),
        "huge features": (Features(f.logits, {k: 1e8 * x for k, x in f.layers.items()}), y),
        "tiny features": (Features(f.logits, {k: 1e-8 * x for k, x in f.layers.items()}), y),
        "half precision": (f.to(torch.float16), y),
        "width one": (Features(f.logits, {k: x[:, :1] for k, x in f.layers.items()}), y),
    }


@pytest.mark.parametrize(("covariance", "inference"), [("sum", "exact"), ("ml", "inducing"), ("hl", "exact")])
@pytest.mark.parametrize("case", degenerate())
def test_degenerate_calibration_sets_work(case: str, covariance: str, inference: str) -> None:
    features, labels = degenerate()[case]
    p = fitted(
        quick(covariance, inference=inference, n_inducing=12, max_steps=5),
        features,
        labels,
    ).predict(features)
    assert p.std is not None
    assert bool(
        (torch.isfinite(p.confidence) & torch.isfinite(p.std) & (p.confidence > 0) & (p.confidence < 1)).all()
    )
    assert torch.equal(p.label, features.label)
    torch.testing.assert_close(
        p.probs.sum(1), torch.ones(len(features), dtype=torch.float64), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("case", ["all correct", "all wrong", "constant features", "certain and half wrong"])
def test_degenerate_calibration_sets_end_where_they_should(case: str) -> None:
    features, labels = degenerate()[case]
    confidence = fitted(SALGP("sum"), features, labels).predict(features).confidence
    low, high = {
        "all correct": (0.85, 1),
        "all wrong": (0, 0.15),
        "constant features": (0.3, 0.9),
        "certain and half wrong": (0.35, 0.65),
    }[case]
    assert low <= float(confidence.mean()) <= high


def test_empty_prediction() -> None:
    for covariance in ("sum", "ml", "hl"):
        p = fitted(quick(covariance, max_steps=2)).predict(NEW[:0])
        assert len(p) == 0
        assert p.probs.shape == (0, 3)


# --- refusals
# ----------------------------------------------------------------------------------------------------


def spoiled(value: float, layer: str | None, row: int) -> Features:
    logits, layers = FEATURES.logits.clone(), {k: x.clone() for k, x in FEATURES.layers.items()}
    (logits if layer is None else layers[layer])[row, 1] = value
    return Features(logits, layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_by_layer_and_row(value: float) -> None:
    with pytest.raises(ValueError, match=r"layer 'layer1' holds NaN or infinity in row 7 \(1 rows in all\)"):
        SALGP().fit(spoiled(value, "layer1", 7), LABELS)
    with pytest.raises(ValueError, match="logits holds NaN or infinity in row 3"):
        SALGP().fit(spoiled(value, None, 3), LABELS)
    with pytest.raises(ValueError, match="layer 'layer2' holds NaN or infinity in row 0"):
        fitted(quick(max_steps=2)).predict(spoiled(value, "layer2", 0))


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.full((40,), 3), ValueError, "label 3 of sample 0 is out of range: expected 0..2, or -1"),
        (torch.full((40,), -2), ValueError, "label -2 of sample 0 is out of range"),
        (torch.zeros(39, dtype=torch.long), ValueError, r"labels must have shape \(40,\)"),
        (torch.full((40,), 0.5), TypeError, "labels must be integer class indices"),
        (["cat"] * 40, TypeError, "labels must be integers"),
    ],
)
def test_bad_labels_are_refused(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SALGP().fit(FEATURES, labels)


def test_bad_features_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        SALGP().fit(FEATURES[:0], LABELS[:0])
    with pytest.raises(ValueError, match="reads hidden layers, but the features have none"):
        SALGP().fit(Features(FEATURES.logits), LABELS)
    with pytest.raises(TypeError, match=r"expected salgp.Features, got Tensor"):
        SALGP().fit(FEATURES.logits, LABELS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 columns"):
        SALGP().fit(Features(FEATURES.logits[:, :1], FEATURES.layers), torch.zeros(40, dtype=torch.long))


def test_other_features_at_prediction_are_refused() -> None:
    calibrator = fitted(quick(max_steps=2))
    wider = {**NEW.layers, "layer1": torch.zeros(25, 9, dtype=torch.float64)}
    with pytest.raises(ValueError, match="layer 'layer1' has width 9, fitted on 6: is it the same network"):
        calibrator.predict(Features(NEW.logits, wider))
    with pytest.raises(ValueError, match="layer 'layer2' is missing; fitted on"):
        calibrator.predict(NEW.select(["layer0", "layer1"]))
    with pytest.raises(ValueError, match="fitted on 3 classes, got class scores of 2"):
        calibrator.predict(Features(NEW.logits[:, :2], NEW.layers))
    extra = Features(NEW.logits, {"more": NEW.logits, **dict(reversed(NEW.layers.items()))})
    assert torch.equal(calibrator.predict(extra).confidence, calibrator.predict(NEW).confidence)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown covariance 'mlp'"):
        SALGP("mlp").fit(FEATURES, LABELS)
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'"):
        SALGP(optimizer="sgd").fit(FEATURES, LABELS)


def test_not_fitted() -> None:
    with pytest.raises(NotFittedError, match="this SALGP is not fitted"):
        SALGP().predict(NEW)
    with pytest.raises(NotFittedError):
        SALGP().save("nowhere")


# --- estimator manners, persistence
# ------------------------------------------------------------------------------


def test_clone_keeps_arguments_and_forgets_the_fit() -> None:
    method = quick("nested", groups=["layer", "layer/class"], restarts=1)
    copy = clone(fitted(method))
    assert copy.get_params() == method.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(NEW)


def test_fit_leaves_arguments_and_features_alone() -> None:
    before, arguments = (
        [FEATURES.logits.clone(), *(x.clone() for x in FEATURES.layers.values())],
        quick("hl").get_params(),
    )
    method = fitted(quick("hl"))
    assert method.get_params() == arguments
    assert all(
        torch.equal(a, b) for a, b in zip(before, [FEATURES.logits, *FEATURES.layers.values()], strict=True)
    )


@pytest.mark.parametrize("inference", ["exact", "inducing"])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_saved_and_loaded_predicts_bit_for_bit_the_same(
    covariance: str, inference: str, tmp_path: Path
) -> None:
    method = fitted(quick(covariance, inference=inference, n_inducing=15, max_steps=2))
    loaded = salgp.load(method.save(tmp_path / "cal"))
    a, b = method.predict(NEW), loaded.predict(NEW)
    assert loaded.get_params() == method.get_params()
    for name in ("label", "probs", "confidence", "std", "lower", "upper"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    if a.layers is None or b.layers is None:
        assert covariance == "concat"
        return
    assert torch.equal(a.layers.mean, b.layers.mean)
    assert torch.equal(a.layers.std, b.layers.std)  # type: ignore[arg-type]


def test_memory_layout_of_the_features_does_not_reach_the_saved_file(tmp_path: Path) -> None:
    turned = Features(
        FEATURES.logits.T.contiguous().T, {k: x.T.contiguous().T for k, x in FEATURES.layers.items()}
    )
    for covariance in ("sum", "concat", "hl"):
        method = fitted(quick(covariance, max_steps=2), turned)
        loaded = salgp.load(method.save(tmp_path / covariance))
        assert torch.equal(method.predict(NEW).confidence, loaded.predict(NEW).confidence)


def test_changing_the_features_afterwards_does_not_reach_the_fit() -> None:
    mine, labels = sample(20)
    method = fitted(quick("sum", max_steps=2), mine, labels)
    before = method.predict(NEW).confidence
    mine.layers["layer0"].mul_(100.0)
    assert torch.equal(method.predict(NEW).confidence, before)


def test_a_failed_fit_is_not_a_fit() -> None:
    method = SALGP("mlp")
    with pytest.raises(ValueError, match="unknown covariance"):
        method.fit(FEATURES, LABELS)
    with pytest.raises(NotFittedError):
        method.predict(NEW)


def test_saved_files_are_plain(tmp_path: Path) -> None:
    fitted(quick(max_steps=2)).save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["calibrator.safetensors"]
    assert read_parts(tmp_path)["calibrator"] == "sal-gp"


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = fitted(quick(max_steps=2)).save(tmp_path / "cal") / "calibrator.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(salgp.FormatError, match="not a whole"):
        salgp.load(path.parent)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(salgp.FormatError, match="damaged"):
        salgp.load(path.parent)
    path.write_bytes(content)
    edit_tensors(path, lambda tensors, metadata: metadata.update(format_version="99"))
    with pytest.raises(salgp.FormatError, match="newer version"):
        salgp.load(path.parent)


# --- explanations
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["sum", "ml", "hl"])
def test_explanation_is_in_points_that_add_up(covariance: str) -> None:
    calibrator = fitted(quick(covariance))
    for i in range(5):
        line = calibrator.explain(NEW, i)
        before, after = line.split(" (")[0].split(" -> ")
        points = [float(part.split()[-1]) for part in line.split(": ")[1].split(", ")]
        assert sum(points) == pytest.approx(float(after) - float(before), abs=0.005 * (len(points) + 2))


def test_explanation_of_a_gaussian_model_shows_its_corrections() -> None:
    calibrator = fitted(quick("sum"))
    prediction = calibrator.predict(NEW)
    assert prediction.layers is not None
    sample, term = divmod(int(prediction.layers.mean.abs().argmax()), len(prediction.layers.names))
    assert f"{prediction.layers.names[term]} {float(prediction.layers.mean[sample, term]):+.2f}" in (
        calibrator.explain(NEW, sample)
    )
