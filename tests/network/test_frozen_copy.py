"""The network is never written to: modes, buffers, hooks and attributes, from any number of threads."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm as hooked_weight_norm
from torch.utils.data import DataLoader, Dataset

import salgp
from salgp.network.frozen_copy import FrozenCopies, FrozenCopy, frozen_copy

X = torch.randn(60, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def calibrated(model: nn.Module) -> salgp.CalibratedClassifier:
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(X)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    labels = (logits + logits.std() * noise).argmax(dim=1)
    return salgp.calibrate(model, [(X, labels)], method="density-aware", perturb=False)


def nothing(network: nn.Module) -> None:
    pass


def state_of(model: nn.Module) -> list[Any]:
    return [
        [(k, v.clone(), id(v)) for k, v in [*model.named_parameters(), *model.named_buffers()]],
        [m.training for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
        [dict(m._forward_hooks) for m in model.modules()],
    ]


def assert_untouched(model: nn.Module, before: list[Any]) -> None:
    after = state_of(model)
    for (name, old, where), (_, new, there) in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new), name
        assert where == there, name
    assert before[1:] == after[1:]


class Restless(nn.Module):
    """Writes to whatever it has, whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(1))
        self.log: list[int] = []
        self.unregistered = [nn.Dropout(0.9)]
        self.act = functools.partial(self.activated, 2.0)

    def activated(self, factor: float, x: Tensor) -> Tensor:
        assert not self.training
        return factor * x.relu()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache = x[:1, 0].clone()
        self.last = x
        self.log.append(len(x))
        return self.head(self.unregistered[0](self.act(self.first(x)))) + 0 * self.calls


def test_a_view_shares_weights_and_nothing_else() -> None:
    model = networks.randomised(Restless()).train()
    before = state_of(model)
    with FrozenCopies().lent(model, nothing) as view:
        first = view.network(torch.ones(2, 4))
        again = view.network(torch.ones(2, 4))
    torch.testing.assert_close(first, again)  # the unregistered dropout rests too
    assert_untouched(model, before)
    assert model.log == []
    assert not model.unregistered[0].training or model.unregistered[0].p == 0.9
    assert [id(p) for p in view.network.parameters()] == [id(p) for p in model.parameters()]


def test_training_shows_at_once() -> None:
    model = networks.randomised(networks.sequential_cnn())
    views = FrozenCopies()

    def now() -> Tensor:
        with views.lent(model, nothing) as view:
            out: Tensor = view.network(X)
        return out

    def expected() -> Tensor:
        with torch.no_grad():
            out: Tensor = copy.deepcopy(model).eval()(X)
        return out

    torch.testing.assert_close(now(), expected())
    with torch.no_grad():
        model[0].weight.add_(0.1)
    torch.testing.assert_close(now(), expected())
    model.train()(X)  # moves the running statistics
    torch.testing.assert_close(now(), expected())
    assert len(views) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones_like(m[0].weight))),
        lambda m: m.__setitem__(2, nn.Tanh()),
        lambda m: setattr(m[1], "eps", 0.5),
        lambda m: m[3].register_forward_hook(lambda module, x, y: 2 * y),
        lambda m: m[1].register_buffer("running_mean", torch.full((4,), 3.0)),
        lambda m: m.double(),
    ],
)
def test_a_view_of_a_changed_network_is_made_anew(change: Any) -> None:
    model = networks.randomised(networks.sequential_cnn()).eval()
    views = FrozenCopies()
    with views.lent(model, nothing) as view:
        view.network(X)
    change(model)
    x = X.to(model[0].weight.dtype)
    with views.lent(model, nothing) as view, torch.no_grad():
        torch.testing.assert_close(view.network(x), model(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_of_the_user_run() -> None:
    """Old-style weight normalisation computes the weight in a hook."""
    model = networks.randomised(
        nn.Sequential(hooked_weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))
    )
    with torch.no_grad():
        model[0].weight_g.mul_(2)
        expected = copy.copy(model).eval()(torch.ones(2, 4))
    with FrozenCopies().lent(model, nothing) as view:
        torch.testing.assert_close(view.network(torch.ones(2, 4)), expected)


def test_lazy_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="run it once"):
        frozen_copy(nn.Sequential(nn.LazyLinear(3)))


def test_eight_threads_and_a_network_in_training_mode() -> None:
    """Every prediction is right, and the running statistics are as they were."""
    model = networks.randomised(networks.sequential_cnn()).train()
    classifier = calibrated(model)
    before = state_of(model)
    alone = [classifier(X[i : i + 3]).confidence for i in range(8)]
    wrong: list[int] = []
    barrier = threading.Barrier(8)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(12):
            if not torch.equal(classifier(X[i : i + 3]).confidence, alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert_untouched(model, before)


def test_predicting_while_another_thread_trains() -> None:
    model = networks.randomised(networks.sequential_cnn()).train()
    classifier = calibrated(model)
    modes: set[bool] = set()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            model(X)
            modes.update(m.training for m in model.modules())

    classifier.calibrator.network_ = None  # else a network in training is refused
    worker = threading.Thread(target=train)
    worker.start()
    try:
        for _ in range(40):
            assert bool(torch.isfinite(classifier(X).confidence).all())
    finally:
        stop.set()
        worker.join()
    assert modes == {True}


def test_nothing_leaks() -> None:
    """No hook stays, no view piles up, no tensor is held."""
    model = networks.randomised(networks.sequential_cnn()).train()
    classifier = calibrated(model)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(5):
        classifier(X)
    before = tensors()
    for _ in range(60):
        classifier(X)
    assert tensors() <= before + 2
    assert len(classifier.taps._copies) == 1
    assert not any(m._forward_hooks for m in model.modules())


def test_memory_stays_flat() -> None:
    resource = pytest.importorskip("resource")
    model = networks.randomised(networks.sequential_cnn())
    classifier = calibrated(model)

    def peak() -> int:
        for _ in range(150):
            classifier(X)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    peak()
    before = peak()
    assert peak() < before + 6_000, "more than 40 kilobytes of each call stayed"


def test_copies_of_a_classifier_are_its_own(tmp_path: Any) -> None:
    model = networks.randomised(networks.sequential_cnn())
    classifier = calibrated(model)
    expected = classifier(X).confidence
    other = copy.deepcopy(classifier)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(other(X).confidence, expected)
    with pytest.raises(ValueError, match="other weights"):
        classifier(X)


class Predicted(Dataset[Tensor]):
    """Uses a classifier inside the workers of a loader."""

    def __init__(self, classifier: salgp.CalibratedClassifier) -> None:
        self.classifier = classifier

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return self.classifier(X[i : i + 1]).confidence


def test_in_the_workers_of_a_loader() -> None:
    model = networks.randomised(networks.sequential_cnn()).train()
    classifier = calibrated(model)
    loader = DataLoader(Predicted(classifier), batch_size=4, num_workers=2, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader))[:, 0], classifier(X[:8]).confidence)


def test_compiled_networks_run_as_they_are() -> None:
    model = networks.randomised(networks.sequential_cnn()).eval()
    expected, _ = salgp.extract(model, [X])
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(salgp.extract(compiled, [X])[0].logits, expected.logits)
    model.compile(backend="eager")
    assert torch.equal(salgp.extract(model, [X])[0].logits, expected.logits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_networks_run_too() -> None:
    model = networks.randomised(networks.sequential_cnn()).eval()
    expected, _ = salgp.extract(model, [X], reader=salgp.Reader(layers=()))
    scripted = torch.jit.script(model).train()
    assert torch.equal(
        salgp.extract(scripted, [X], reader=salgp.Reader(layers=()))[0].logits, expected.logits
    )
    assert scripted.training


def test_a_view_costs_little() -> None:
    """Lending a view takes a small part of one forward pass."""
    import time

    model = networks.ResidualNet(10, width=16, channels=3).eval()
    views, x = FrozenCopies(), torch.randn(1, 3, 64, 64)

    def seconds(run: Any) -> float:
        times = []
        for _ in range(15):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return sorted(times)[3]

    def lend() -> None:
        with views.lent(model, nothing):
            pass

    with torch.no_grad():
        bare = seconds(lambda: model(x))
    assert seconds(lend) < 0.25 * bare
    assert isinstance(FrozenCopy(model, nothing).network, networks.ResidualNet)


class Uncounted(nn.Module):
    """Normalises by statistics that a pass in training mode writes to without counting a version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


def test_buffers_written_to_without_a_version_are_followed() -> None:
    model = Uncounted()
    frozen = FrozenCopy(model)
    assert frozen.follow()
    version = model.mean._version
    model.train()(5 + torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
    assert model.mean._version == version
    assert float(model.mean.min()) > 0.1
    assert frozen.follow()
    torch.testing.assert_close(frozen.network.mean, model.mean)
    torch.testing.assert_close(frozen.network.var, model.var)
