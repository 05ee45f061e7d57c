"""Nearest neighbours and the methods that rest on them."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from salgp import Features, neighbours
from salgp.calibrators.baselines.density import DensityAwareCalibration, _fit_weights, _squared_error
from salgp.calibrators.baselines.trust import DeepKNN, TrustScore
from salgp.metrics import auroc, nll
from salgp.neighbours import ClassIndex, class_distances, nearest, nearest_of_classes, side_distances


def points(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("d", [1, 7])
def test_nearest_equals_sklearn(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, q = points(200, d), points(50, d, 1)
    for entries in (2**24, 1000):  # in one piece and in many
        monkeypatch.setattr(neighbours, "CHUNK_ENTRIES", entries)
        distance, index = nearest(q, x, 5)
        expected, rows = NearestNeighbors(n_neighbors=5).fit(x.numpy()).kneighbors(q.numpy())
        np.testing.assert_allclose(distance.numpy(), expected, atol=1e-12)
        np.testing.assert_array_equal(index.numpy(), rows)
        own, _ = nearest(x, x, 3, leave_one_out=True)
        np.testing.assert_allclose(
            own.numpy(), NearestNeighbors(n_neighbors=3).fit(x.numpy()).kneighbors()[0], atol=1e-12
        )


def test_duplicates_are_at_distance_zero_even_far_from_the_origin() -> None:
    x = points(50, 64, dtype=torch.float32) + 1e3
    assert float(nearest(x, x, 1)[0].max()) == 0.0
    assert float(nearest(x.repeat(2, 1), x.repeat(2, 1), 1, leave_one_out=True)[0].max()) == 0.0


def test_too_small_a_reference() -> None:
    assert nearest(points(3, 2), points(4, 2), 10)[0].shape == (3, 4)
    with pytest.raises(ValueError, match="no neighbours to compare with"):
        nearest(points(1, 2), points(1, 2), 1, leave_one_out=True)


def test_class_distances_equal_a_double_loop() -> None:
    x, q = points(30, 3), points(12, 3, 1)
    classes, label = torch.arange(30) % 3, torch.arange(12) % 4  # class 3 has no reference
    same, other = class_distances(q, label, x, classes)
    for i in range(12):
        d = [(float((q[i] - x[j]).norm()), int(classes[j]) == int(label[i])) for j in range(30)]
        assert float(same[i]) == pytest.approx(min((v for v, own in d if own), default=math.inf))
        assert float(other[i]) == pytest.approx(min(v for v, own in d if not own))
    alone, _ = class_distances(x, classes, x, classes, leave_one_out=True)
    assert float(alone.min()) > 0


def looped_sides(x, classes, query, label, k, leave) -> np.ndarray:
    """Own, other and any, ``(3, S, n)``, by loops over spaces and samples."""
    out = np.full((3, len(x), query.shape[1]), np.inf)
    for space in range(len(x)):
        for i, q in enumerate(query[space].numpy()):
            d = np.linalg.norm(x[space].numpy() - q, axis=1)
            keep = np.arange(len(d)) != leave[i]
            own = classes.numpy() == int(label[i])
            for side, mask in enumerate((own & keep, ~own & keep, keep)):
                if mask.any():
                    out[side, space, i] = np.sort(d[mask])[:k].mean()
    return out


@pytest.mark.parametrize("m", [40, 5000])
def test_sides_equal_loops_whatever_the_classes(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, query = torch.stack([points(m, 4), points(m, 4, 1)]), torch.stack([points(11, 4, 2), points(11, 4, 3)])
    classes = (torch.arange(m) * torch.arange(m)) % 7 - 1  # of unequal sizes; -1 is nobody's own, 2 is absent
    label = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9, 0, 1, 3])
    leave = torch.tensor([-1, 3, -1, 0, 7, -1, -1, 2, m - 1, -1, 1])
    for entries in (4_000_000, 3 * m):
        monkeypatch.setattr(neighbours, "CHUNK_ENTRIES", entries)
        found = side_distances(ClassIndex.build(x, classes), query, label, 3, leave)
        expected = looped_sides(x, classes, query, label, 3, leave.tolist())
        for side, name in enumerate(("own", "other", "any")):
            np.testing.assert_allclose(found.all[side].numpy(), expected[side], atol=1e-12, err_msg=name)


def test_huge_and_tiny_features_are_searched_alike() -> None:
    x, q = points(300, 5), points(20, 5, 1)
    index = nearest(q, x, 4)[1]
    for size in (1e-25, 1e25):
        assert torch.equal(nearest(size * q, size * x, 4)[1], index)


def test_a_thousand_classes_cost_no_more_than_ten() -> None:
    """Time of one sample, 5 layers, 5,000 points: the number of classes may not matter."""
    x, q = torch.stack([points(5000, 64, s).float() for s in range(5)]), points(5, 64, 9).double()[:, None]
    seconds = []
    for n_classes in (10, 1000):
        index = ClassIndex.build(x, torch.arange(5000) % n_classes, white=True)
        label = torch.tensor([3])
        side_distances(index, q, label, 3)
        start = time.process_time()
        for _ in range(20):
            side_distances(index, q, label, 3)
        seconds.append((time.process_time() - start) / 20)
    assert seconds[1] < 2 * seconds[0] + 1e-3


def shifted_world(n: int = 300, seed: int = 0) -> tuple[Features, torch.Tensor]:
    """Two clusters a network knows, and a share of samples far away on which it is as sure and no better than
    chance.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (n,), generator=generator)
    far = torch.rand(n, generator=generator) < 0.4
    x = torch.randn(n, 4, generator=generator) * 0.3 + 2 * labels[:, None] - 1
    x = torch.where(
        far[:, None], torch.randn(n, 4, generator=generator) * torch.tensor([1.0, -1.0, 1.0, -1.0]) * 6, x
    )
    guess = torch.where(far, torch.randint(0, 2, (n,), generator=generator), labels)
    z = torch.nn.functional.one_hot(guess, 2) * (3 + torch.rand(n, 1, generator=generator))
    return Features(z, {"noise": torch.randn(n, 3, generator=generator), "body": x}), labels


def reference() -> tuple[Features, torch.Tensor]:
    f, labels = shifted_world(400, seed=9)
    kept = f.layers["body"].norm(dim=1) < 4
    return f[kept], labels[kept]


def test_density_gradient() -> None:
    z, labels = points(20, 4), torch.arange(20) % 4
    T = (1 + points(20, 1, 3).abs()[:, 0]).requires_grad_()
    p = torch.softmax(z / T[:, None], 1)
    loss = (p - torch.nn.functional.one_hot(labels, 4)).pow(2).sum(1).mean()
    value, slope = _squared_error(z, labels, T.detach())
    assert value == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(slope, torch.autograd.grad(loss, T)[0])


def test_density_weights_are_an_optimum() -> None:
    z, labels = 3 * points(200, 3), torch.arange(200) % 3
    labels = z.argmax(1).where(torch.arange(200) % 2 > 0, labels)
    S = points(200, 2, 4).abs()
    w = _fit_weights(z, labels, S)
    best = _squared_error(z, labels, (w[0] + S @ w[1:]).clamp_min(0.05))[0]
    for seed in range(20):
        other = (w + 0.1 * points(3, 1, seed)[:, 0]).clamp_min(0)
        assert best <= _squared_error(z, labels, (other[0] + S @ other[1:]).clamp_min(0.05))[0] + 1e-7


def test_density_lowers_confidence_far_from_the_training_data() -> None:
    f, labels = shifted_world()
    new, truth = shifted_world(seed=1)
    fitted = DensityAwareCalibration(k=10).fit(f, labels, reference())
    p = fitted.predict(new)
    far = new.layers["body"].norm(dim=1) > 4
    assert float(p.confidence[far].mean()) < float(p.confidence[~far].mean()) - 0.1
    assert nll(p.probs, truth) < nll(new.probs, truth)
    assert fitted.reference_["body"].shape == reference()[0].layers["body"].shape
    then = DensityAwareCalibration(k=10, then="ensemble").fit(f, labels, reference()).predict(new)
    assert nll(then.probs, truth) < nll(new.probs, truth)


@pytest.mark.parametrize(
    "method",
    [TrustScore(), TrustScore(link="isotonic", filter=0.1), DeepKNN(), DensityAwareCalibration(k=10)],
)
@pytest.mark.parametrize("known", [True, False])
def test_neighbours_spot_errors(method: TrustScore, known: bool) -> None:
    f, labels = shifted_world()
    new, truth = shifted_world(seed=1)
    p = method.fit(f, labels, reference() if known else None).predict(new)
    right = (p.label == truth).numpy()
    raw = auroc(new.confidence.numpy(), right)
    assert auroc(p.confidence.numpy(), right) > raw + 0.1


def test_trust_score_uses_the_named_layer_and_refuses_others() -> None:
    f, labels = shifted_world(100)
    assert TrustScore().fit(f, labels).layer_ == "body"
    assert TrustScore(layer="noise").fit(f, labels).x_.shape[1] == 3
    with pytest.raises(KeyError, match="known layers: noise, body"):
        TrustScore(layer="tail").fit(f, labels)


def test_trust_score_filter_leaves_out_the_thinnest_share_of_each_class() -> None:
    f, labels = shifted_world(100)
    kept = TrustScore(filter=0.2, k=3).fit(f, labels)
    for c in (0, 1):
        total = int((labels == c).sum())
        assert int((kept.classes_ == c).sum()) == total - int(0.2 * total)
    assert float(kept.x_.norm(dim=1).max()) < float(f.layers["body"].norm(dim=1).max())


def test_deep_knn_credibility_by_hand() -> None:
    f, labels = shifted_world(60)
    fitted = DeepKNN(k=4).fit(f, labels, reference())
    new = shifted_world(5, seed=3)[0]
    known, classes = reference()
    rank = fitted.nonconformity_.numpy()
    for i, got in enumerate((-fitted.predict(new).novelty).tolist()):
        alpha = 0
        for name in ("noise", "body"):
            rows = (
                NearestNeighbors(n_neighbors=4)
                .fit(known.layers[name].numpy())
                .kneighbors(new.layers[name][i : i + 1].numpy())[1][0]
            )
            alpha += int((classes[rows] != new.label[i]).sum())
        share = (np.sum(rank >= alpha) + 0.5) / (len(rank) + 1)
        assert got == pytest.approx(math.log(share / (1 - share)), abs=1e-6)


@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize(("per_class", "k"), [(64, 3), (2, 3), (300, 2)])
def test_many_samples_are_compared_class_by_class_with_the_same_result(
    per_class: int, k: int, refine: bool
) -> None:
    """Above a number of samples those of one label go together; a few at a time they do not."""
    g = torch.Generator().manual_seed(per_class)
    classes = torch.arange(4).repeat_interleave(per_class)
    index = ClassIndex.build(torch.randn(2, len(classes), 5, generator=g), classes, white=True)
    query, label = torch.randn(2, 900, 5, generator=g), torch.randint(-1, 6, (900,), generator=g)
    together = side_distances(index, query, label, k, refine=refine).all
    apart = torch.cat(
        [
            side_distances(index, query[:, i : i + 50], label[i : i + 50], k, refine=refine).all
            for i in range(0, 900, 50)
        ],
        dim=2,
    )
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    expected = dense_sides(index, query, label, k)
    torch.testing.assert_close(together, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("sizes", "k"), [((9, 4, 7, 5), 3), ((9, 0, 1, 5), 3), ((2, 1, 1, 1), 7)])
def test_a_graph_finds_the_same_sides(sizes: tuple[int, ...], k: int) -> None:
    """Classes of unequal sizes, without points and with fewer than asked for; points of no class."""
    g = torch.Generator().manual_seed(k)
    classes = torch.cat([torch.full((3,), -1), torch.arange(4).repeat_interleave(torch.tensor(sizes))])
    classes = classes[torch.randperm(len(classes), generator=g)]
    index = ClassIndex.build(torch.randn(2, len(classes), 5, generator=g), classes, white=True)
    _ = index.for_graph, index.fewest  # worked out before the graph is taken
    query, label = torch.randn(2, 40, 5, generator=g), torch.arange(40) % 6

    class Sides(torch.nn.Module):
        def forward(self, query: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return side_distances(index, query, label, k, plenty=min(sizes) > k).all

    shapes = ({1: torch.export.Dim("n")}, {0: torch.export.Dim("n")})
    label = label.clamp_max(3) if min(sizes) > k else label
    few = query[:, :7].contiguous(), label[:7].clone()
    graph = torch.export.export(Sides(), few, dynamic_shapes=shapes, strict=False)
    found = graph.module()(query, label)
    torch.testing.assert_close(found, dense_sides(index, query, label, k), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, side_distances(index, query, label, k).all, rtol=1e-5, atol=1e-6)


def dense_sides(index: ClassIndex, query: torch.Tensor, label: torch.Tensor, k: int) -> torch.Tensor:
    """Means of the smallest distances, one sample and one space at a time."""
    own_class = torch.full((index.points.shape[1],), -1)
    for c in range(len(index.size) - 1):
        own_class[int(index.start[c]) : int(index.start[c]) + int(index.size[c])] = c
    found = torch.full((3, *query.shape[:2]), torch.inf)
    for s in range(query.shape[0]):
        D = torch.cdist(
            query[s].double(), index.points[s].double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        for i in range(query.shape[1]):
            own = own_class == label[i]
            for side, kept in enumerate((own & (label[i] >= 0), ~own | (label[i] < 0), own | True)):
                if bool(kept.any()):
                    found[side, s, i] = D[i][kept].sort().values[:k].mean()
    return found


def test_nearest_of_classes_equals_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    x, classes = points(60, 5).float(), torch.arange(60) % 4
    classes = torch.where(classes == 2, -1, classes)  # nobody's own; class 4 has no points either
    query, leave_out = x[:7] + 0.1, torch.tensor([0, -1, 2, 3, -1, 5, 59])
    for entries in (4_000_000, 100):  # in one piece and in many
        monkeypatch.setattr(neighbours, "CHUNK_ENTRIES", entries)
        monkeypatch.setattr(neighbours, "FEWEST_ROWS", 1)
        index = ClassIndex.build(torch.stack([x, 2 * x]), classes, white=True)
        found = nearest_of_classes(index, torch.stack([query, query]), 5, leave_out)
        for space, scale in enumerate((1, 2)):
            for i in range(7):
                for c in range(5):
                    far = (scale * x - query[i]).norm(dim=1)
                    far[classes != c] = math.inf
                    if leave_out[i] >= 0:
                        far[leave_out[i]] = math.inf
                    assert float(found[space, i, c]) == pytest.approx(float(far.min()), rel=1e-4)
