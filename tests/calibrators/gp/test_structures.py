"""Every structured covariance against plain loops and against GPyTorch, and the special cases that must
coincide.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from posteriors import joint
from references import GPyTorchGP, double_loop, gpytorch_inputs, gpytorch_kernel, perturbed_start
from samples import sample

from salgp.calibrators.gp.structures import STACKED, STRUCTURES, Structure, rows_of, structure
from salgp.features import Features
from salgp.gp.covariance import Covariance, Index, Product, Stationary, gaps
from salgp.gp.kernels import Rows
from salgp.gp.optimise import Scale
from salgp.gp.regression import (
    Statistics,
    condition_exact,
    condition_inducing,
    exact_log_evidence,
    inducing_log_evidence,
    statistics,
)

NOISE = 0.05
CASES = [
    pytest.param("single", {}, id="single"),
    pytest.param("rio", {}, id="rio"),
    pytest.param("red", {}, id="red"),
    pytest.param("concat", {}, id="concat"),
    pytest.param("sum", {}, id="sum"),
    pytest.param("ml", {}, id="ml"),
    pytest.param("ml", {"rank": 1}, id="ml-rank1"),
    pytest.param("ml", {"rank": 2}, id="ml-rank2"),
    pytest.param("hl", {}, id="hl"),
    pytest.param("additive", {}, id="additive"),
    pytest.param("icm", {}, id="icm"),
    pytest.param("icm", {"rank": 2}, id="icm-rank2"),
    pytest.param("lcm", {}, id="lcm"),
    pytest.param("lcm", {"rank": 2, "n_latent": 3}, id="lcm-rank2"),
    pytest.param("nested", {"groups": ("layer",)}, id="nested-layer"),
    pytest.param("nested", {"groups": ("class",)}, id="nested-class"),
    pytest.param("nested", {"groups": ("layer", "class")}, id="nested-layer-class"),
    pytest.param("nested", {"groups": ("layer", "layer/class")}, id="nested-three-levels"),
]


def build(
    name: str, options: dict[str, object], n: int, seed: int = 0, kernel: str = "matern52"
) -> tuple[Structure, Features, Rows, torch.Tensor]:
    features, labels = sample(n, seed=seed)
    features = features.select(["layer1"]) if name in ("single", "rio", "red") else features
    made = structure(name, features.widths, features.n_classes, kernel=kernel, **options)  # type: ignore[arg-type]
    target = features.residual(labels).double().repeat_interleave(len(made.layers) if made.stacked else 1)
    rows = rows_of(made, features)
    return made, features, rows.flatten() if made.stacked else rows, target


def scale_of(covariance: Covariance) -> Scale:
    return Scale({block: 2.0 for block, _ in covariance.reads()}, 0.3)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("kernel", ["matern52", "matern32", "matern12", "rbf"])
def test_matches_a_double_loop(name: str, options: dict[str, object], kernel: str) -> None:
    made, features, rows, _ = build(name, options, 5, kernel=kernel)
    theta = perturbed_start(made, scale_of(made.covariance))
    K = made.covariance(theta, gaps(rows, rows, made.covariance))
    expected = double_loop(
        name, theta, features, kernel, int(options.get("rank", 0)), options.get("groups", ()), made.stacked
    )  # type: ignore[arg-type, call-overload]
    torch.testing.assert_close(K, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("kernel", ["matern52", "rbf"])
def test_evidence_mean_and_variance_match_gpytorch(
    name: str, options: dict[str, object], kernel: str
) -> None:
    made, features, rows, y = build(name, options, 16, kernel=kernel)
    _, new_features, new_rows, _ = build(name, options, 6, seed=1, kernel=kernel)
    theta = perturbed_start(made, scale_of(made.covariance))
    noise = torch.full_like(y, NOISE)

    theirs = gpytorch_kernel(name, theta, features, kernel, options.get("groups", ()), made.stacked)  # type: ignore[arg-type]
    reference = GPyTorchGP(theirs, gpytorch_inputs(features, made.stacked), y, NOISE)
    mean, covariance = reference.posterior(gpytorch_inputs(new_features, made.stacked))

    ours = exact_log_evidence(made.covariance(theta, gaps(rows, rows, made.covariance)), y, noise)
    posterior = condition_exact(made.covariance, theta, rows, y, noise)
    our_mean, our_variance = posterior(new_rows)
    assert float(ours) == pytest.approx(reference.log_evidence(), rel=1e-6)
    torch.testing.assert_close(our_mean, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_variance, covariance.diagonal(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(joint(posterior, new_rows)[1], covariance, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_inducing_with_all_rows_is_exact(name: str, options: dict[str, object]) -> None:
    made, _, rows, y = build(name, options, 12)
    _, _, new_rows, _ = build(name, options, 6, seed=1)
    theta = perturbed_start(made, scale_of(made.covariance))
    noise, covariance = torch.full_like(y, NOISE), made.covariance
    K = covariance(theta, gaps(rows, rows, covariance))
    sums = statistics(K, K.diagonal(), y, noise)
    assert float(inducing_log_evidence(K, sums)) == pytest.approx(
        float(exact_log_evidence(K, y, noise)), rel=1e-6
    )
    for ours, exact in zip(
        condition_inducing(covariance, theta, rows, sums)(new_rows),
        condition_exact(covariance, theta, rows, y, noise)(new_rows),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6 * float(K.diagonal().mean()))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_is_positive_semi_definite_symmetric_and_diagonal_agrees(
    name: str, options: dict[str, object]
) -> None:
    made, _, rows, _ = build(name, options, 10)
    theta = perturbed_start(made, scale_of(made.covariance), size=1.0)
    K = made.covariance(theta, gaps(rows, rows, made.covariance))
    assert float(torch.linalg.eigvalsh(K)[0]) > -1e-9 * float(K.diagonal().max())
    torch.testing.assert_close(K, K.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(made.covariance.variance(theta, rows), K.diagonal())


def test_statistics_add_up_over_batches() -> None:
    made, _, rows, y = build("ml", {}, 12)
    theta = perturbed_start(made, scale_of(made.covariance))
    K = made.covariance(theta, gaps(rows, rows, made.covariance))
    noise = NOISE * (1.0 + torch.arange(len(y), dtype=torch.float64) / len(y))
    whole = statistics(K[:7], K.diagonal(), y, noise)
    first, second = (
        statistics(K[:7, part], K.diagonal()[part], y[part], noise[part])
        for part in (slice(0, 11), slice(11, None))
    )
    _same_statistics(first + second, whole)


def _same_statistics(a: Statistics, b: Statistics) -> None:
    for name in ("A", "b", "yy", "log_noise", "trace"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-12)
    assert a.n == b.n


# --- special cases that must coincide
# ----------------------------------------------------------------------------


def test_icm_with_diagonal_b_is_additive_without_global_part() -> None:
    made, _, rows, _ = build("icm", {"rank": 1}, 6)
    beta, lengthscale = (
        torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64),
        torch.tensor(0.3, dtype=torch.float64),
    )
    icm = {
        "latent0.log_lengthscale": lengthscale,
        "layer0.W": torch.zeros(3, 1, dtype=torch.float64),
        "layer0.log_own": beta.log(),
    }
    additive = {"local.log_lengthscale": lengthscale.expand(3), "local.log_variance": beta.log()}
    local = Stationary("joint", "matern52", "local", per="layer", n_groups=3)
    compared = gaps(rows, rows, made.covariance)
    torch.testing.assert_close(made.covariance(icm, compared), local(additive, compared), rtol=1e-14, atol=0)


def test_icm_with_shared_plus_diagonal_b_is_global_plus_local() -> None:
    _, _, rows, _ = build("icm", {}, 6)
    a, beta = torch.tensor(0.7, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    lengthscale = torch.tensor(0.3, dtype=torch.float64)
    icm = Product((Stationary("joint", unit=True, name="k"), Index("layer", 3, 0)))
    K = icm(
        {"k.log_lengthscale": lengthscale, "layer.log_shared": a.log(), "layer.log_own": beta.log()},
        gaps(rows, rows, icm),
    )
    additive = structure("additive", {"x": 4, "y": 6, "z": 5}, 3).covariance
    theta = {"global.log_lengthscale": lengthscale, "global.log_variance": a.log()}
    theta |= {"local.log_lengthscale": lengthscale.expand(3), "local.log_variance": beta.log()}
    torch.testing.assert_close(K, additive(theta, gaps(rows, rows, additive)), rtol=1e-14, atol=0)


def test_one_layer_sum_is_rio() -> None:
    features, _ = sample(8)
    one = features.select(["layer1"])
    ours, rio = structure("sum", one.widths, 3), structure("rio", one.widths, 3)
    values = [0.2, -0.4, 0.1, -1.0]
    thetas = [
        {
            p.name: torch.tensor(v, dtype=torch.float64)
            for p, v in zip(s.covariance.parameters(scale_of(s.covariance)), values, strict=True)
        }
        for s in (ours, rio)
    ]
    Ks = [
        s.covariance(t, gaps(rows_of(s, one), rows_of(s, one), s.covariance))
        for s, t in zip((ours, rio), thetas, strict=True)
    ]
    torch.testing.assert_close(Ks[0], Ks[1], rtol=1e-14, atol=0)


def test_nested_with_one_level_is_hl() -> None:
    hl, _, rows, _ = build("hl", {}, 6)
    nested, _, _, _ = build("nested", {"groups": ("layer",)}, 6)
    theta = perturbed_start(hl, scale_of(hl.covariance))
    renamed = {k.replace("local.", "local-layer."): v for k, v in theta.items()}
    compared = gaps(rows, rows, hl.covariance)
    torch.testing.assert_close(
        hl.covariance(theta, compared), nested.covariance(renamed, compared), rtol=1e-14, atol=0
    )


def test_ml_with_reduced_b_is_rank_one_with_equal_weights() -> None:
    reduced, _, rows, _ = build("ml", {}, 6)
    full, _, _, _ = build("ml", {"rank": 1}, 6)
    theta = perturbed_start(reduced, scale_of(reduced.covariance))
    W = (0.5 * theta["layer.log_shared"]).exp().expand(3, 1)
    compared = gaps(rows, rows, reduced.covariance)
    torch.testing.assert_close(
        reduced.covariance(theta, compared), full.covariance({**theta, "layer.W": W}, compared)
    )


def test_three_level_tree_has_the_block_matrix_of_its_functions() -> None:
    """``f ~ GP(0, kf)``, ``g_q ~ GP(f, kg)``, ``h_qr ~ GP(g_q, kh)``: the joint covariance of all of them,
    built from independent parts as ``T blockdiag(Kf, Kg, Kg, Kh, ...) T'``; a row of ``f`` or ``g`` is one
    with group -1 below its level.
    """
    made, _, _, _ = build("nested", {"groups": ("layer", "layer/class")}, 4)
    theta = perturbed_start(made, scale_of(made.covariance))
    n, Nq, Nr = 4, 2, 3
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    level = [
        (-1, -1),
        *((q, -1) for q in range(Nq)),
        *((q, q * Nr + r) for q in range(Nq) for r in range(Nr)),
    ]
    rows = Rows(
        {"joint": x.repeat(len(level), 1)},
        {
            "layer": torch.tensor([q for q, _ in level]).repeat_interleave(n),
            "layer/class": torch.tensor([r for _, r in level]).repeat_interleave(n),
        },
    )
    kernel = [
        Stationary("joint", "matern52", name) for name in ("global", "local-layer", "local-layer-class")
    ]
    one = Rows({"joint": x}, {})
    Kf, Kg, Kh = (k(theta, gaps(one, one, k)) for k in kernel)
    independent = torch.block_diag(Kf, *[Kg] * Nq, *[Kh] * (Nq * Nr))
    T = torch.zeros(len(level), len(level), dtype=torch.float64)
    for row, (q, qr) in enumerate(level):
        T[row, 0] = 1.0
        if q >= 0:
            T[row, 1 + q] = 1.0
        if qr >= 0:
            T[row, 1 + Nq + qr] = 1.0
    T = torch.kron(T, torch.eye(n, dtype=torch.float64))
    K = made.covariance(theta, gaps(rows, rows, made.covariance))
    torch.testing.assert_close(K, T @ independent @ T.T, rtol=1e-12, atol=1e-12)
    f, g, h = slice(0, n), slice(n, 2 * n), slice(n * (1 + Nq), n * (2 + Nq))
    torch.testing.assert_close(K[f, g], Kf, rtol=1e-12, atol=1e-12)  # K_fg = [k_f ... k_f]
    torch.testing.assert_close(K[f, h], Kf, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        K[g, h] - K[f, h], Kg, rtol=1e-12, atol=1e-12
    )  # beyond the shared f, K_gh holds k_g on its diagonal
    torch.testing.assert_close(K[h, h] - K[g, h], Kh, rtol=1e-12, atol=1e-12)


def test_ungrouped_rows_keep_only_what_layers_share() -> None:
    made, _, rows, _ = build("nested", {"groups": ("layer", "layer/class")}, 4)
    theta = perturbed_start(made, scale_of(made.covariance))
    shared = Stationary("joint", name="global")
    loose = rows.ungrouped("layer")
    torch.testing.assert_close(
        made.covariance(theta, gaps(loose, rows, made.covariance)),
        shared(theta, gaps(loose, rows, made.covariance)),
    )


def test_rows_are_padded_with_zeros_and_carry_their_layer() -> None:
    features, _ = sample(3)
    made = structure("ml", features.widths, 3)
    rows = rows_of(made, features)
    assert rows.blocks["features"].shape == (3, 3, 6)
    assert bool((rows.blocks["features"][:, 0, 4:] == 0).all())
    torch.testing.assert_close(rows.blocks["features"][:, 2, :5], features.layers["layer2"])
    assert rows.groups["layer"].tolist() == [[0, 1, 2]] * 3
    assert rows.flatten().groups["layer"].tolist() == [0, 1, 2] * 3


def test_layers_of_different_precision_are_stacked() -> None:
    features, _ = sample(4)
    mixed = Features(features.logits, {"a": features.layers["layer0"].half(), "b": features.layers["layer1"]})
    assert rows_of(structure("hl", mixed.widths, 3), mixed).blocks["joint"].shape == (4, 2, 7)
    assert rows_of(structure("ml", mixed.widths, 3), mixed).blocks["features"].shape == (4, 2, 6)


def test_a_layer_called_confidence_keeps_its_own_parameters() -> None:
    covariance = structure("sum", {"confidence": 3, "other": 2}, 3).covariance
    names = [p.name for p in covariance.parameters(scale_of(covariance))]
    assert len(names) == len(set(names)) == 6


def test_stacked_names_are_known() -> None:
    assert set(STACKED) < set(STRUCTURES)
    assert {
        name
        for name in STRUCTURES
        if name not in ("single", "rio", "red") and structure(name, {"a": 1}, 2).stacked
    } == set(STACKED)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "unknown covariance 'nonsense'; choose from single"),
        ("rio", {}, "reads exactly one layer, got 2"),
        ("nested", {"groups": ("colour",)}, "groups of a nested covariance must come from"),
        ("nested", {"groups": ()}, "groups of a nested covariance must come from"),
        ("ml", {"kernel": "cosine"}, "unknown kernel 'cosine'; choose from rbf"),
    ],
)
def test_refuses_what_it_does_not_know(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structure(name, {"a": 2, "b": 3}, 4, **options)  # type: ignore[arg-type]


def test_a_covariance_without_a_kernel_of_choice_refuses_an_unknown_one_too() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'cosine'"):
        structure("red", {"a": 3}, 4, kernel="cosine")


def test_terms_of_samples_and_stacked_rows_exclude_each_other() -> None:
    plain = structure("sum", {"a": 2, "b": 3}, 3)
    with pytest.raises(ValueError, match="not of stacked rows"):
        dataclasses.replace(plain, stacked=True)
