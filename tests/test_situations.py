"""Thirty situations of users: what happens in each, so that none is silent and harmful.

`SITUATIONS` is the table of ``docs/situations.md``; a test below checks that the page says the same. Each
situation works, warns, or is refused with a sentence that says what to do.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample
from torch import Tensor, nn

import salgp
from salgp.calibrators.checks import CalibrationWarning
from salgp.cli import main
from salgp.network.layers import NetworkWarning

PAGE = Path(__file__).parents[1] / "docs" / "situations.md"
G = torch.Generator


@dataclass(frozen=True)
class Situation:
    """What a user has, what happens, and the trial that proves it."""

    has: str
    happens: str
    trial: Callable[[Path], None]


SITUATIONS: list[Situation] = []


def situation(has: str, happens: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Add a trial to the table."""

    def add(trial: Callable[[Path], None]) -> Callable[[Path], None]:
        SITUATIONS.append(Situation(has, happens, trial))
        return trial

    return add


def data(n: int = 160, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = G().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, :classes] + 0.8 * torch.randn(n, classes, generator=g)).argmax(1)


def network(classes: int = 3, *end: nn.Module) -> nn.Sequential:
    """A network that is right more often than not, without training."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, classes), *end)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.zero_()
        model[0].weight.copy_(torch.cat([torch.eye(6), -torch.eye(6)]))
        model[2].weight.copy_(3 * torch.cat([torch.eye(classes, 6), -torch.eye(classes, 6)], 1))
    return model


def agrees(classifier: Any, model: nn.Module, x: Tensor) -> None:
    """The label is the network's own, and the confidence a probability."""
    prediction = classifier(x)
    assert torch.equal(prediction.label, model(x).argmax(1))
    assert bool(((prediction.confidence > 0) & (prediction.confidence < 1)).all())


class Dictionary(nn.Module):
    """Takes its input by name and returns a dictionary, as Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(image), "extra": image}


@situation(
    "a Hugging Face text classifier and dictionary batches", "works; tokens and masks are read as they are"
)
def _text(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32, num_labels=3, max_position_embeddings=12
    )
    torch.manual_seed(0)
    model = transformers.DistilBertForSequenceClassification(config).eval()
    ids = torch.randint(5, 50, (60, 8), generator=G().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(60) % 3}
    classifier = salgp.calibrate(model, [batch], method="platt")
    assert classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).confidence.shape == (60,)


@situation(
    "a Hugging Face image classifier (ViT)",
    "works; its blocks are the layers, and its images are augmented",
)
def _vit(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(24, 3, 16, 16, generator=G().manual_seed(0))
    batch = {"pixel_values": images, "labels": torch.arange(24) % 3}
    features, labels = salgp.extract(model, [batch], perturb=["noise"])
    assert len(features.layers) == 2
    assert labels is not None
    assert len(features) == len(labels) == 48


class Answers(nn.Module):
    """Returns what a function makes of features and logits."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.made = network(), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.body[:2](x), self.body(x))


@situation(
    "a network that returns a dictionary or a tuple",
    "works; `logits` is taken, or the only tensor that can be scores",
)
def _outputs(folder: Path) -> None:
    x, y = data()
    model = Dictionary()
    classifier = salgp.calibrate(model, [({"image": x}, y)], method="platt")
    assert torch.equal(classifier(image=x).label, model(x)["logits"].argmax(1))
    with_loss = Answers(lambda hidden, z: (z.sum(), z))
    agrees(salgp.calibrate(with_loss, [(x, y)], method="platt"), with_loss.body, x)


@situation(
    "a network that returns `(features, logits)`",
    "refused, as nothing tells which are the scores: "
    "`reader=salgp.Reader(forward=lambda model, batch: model(batch[0])[1])`",
)
def _two_outputs(folder: Path) -> None:
    x, y = data()
    model = Answers(lambda hidden, z: (hidden, z))
    with pytest.raises(ValueError, match=r"forward=lambda model, batch: model\(batch\[0\]\)\[1\]"):
        salgp.calibrate(model, [(x, y)], method="platt")
    forward = {"forward": lambda model, batch: model(batch[0])[1]}
    agrees(salgp.calibrate(model, [(x, y)], method="platt", reader=salgp.Reader(**forward)), model.body, x)


@situation("dictionary batches with keys `image` and `label`, or `x` and `target`", "works")
def _keys(folder: Path) -> None:
    x, y = data()
    for batch in ({"image": x, "label": y}, {"image": x, "target": y}):
        assert len(salgp.extract(Dictionary(), [batch])[1]) == len(y)


@situation(
    "batches `(x, y, id)`",
    "works with `reader=salgp.Reader(labels_at=1)`; without it, refused with that hint",
)
def _triples(folder: Path) -> None:
    x, y = data()
    with pytest.raises(TypeError, match="labels_at=1"):
        salgp.extract(network(), [(x, y, torch.arange(len(y)))])
    features, labels = salgp.extract(
        network(), [(x, y, torch.arange(len(y)))], reader=salgp.Reader(labels_at=1)
    )
    assert torch.equal(labels, y)
    assert torch.equal(features.logits, network()(x).detach())


class Beside(nn.Module):
    """Takes an image and what is known about it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.body(image) + meta


@situation(
    "batches `((image, meta), y)`",
    "refused with the way out: `reader=salgp.Reader(forward=lambda model, batch: model(*batch[0]))`",
)
def _nested(folder: Path) -> None:
    x, y = data()
    batch, way_out = ((x, 0 * x[:, :3]), y), {"forward": lambda model, batch: model(*batch[0])}
    with pytest.raises(RuntimeError, match=r"forward=lambda model, batch: model\(\*batch\[0\]\)"):
        salgp.calibrate(Beside(), [batch])
    classifier = salgp.calibrate(Beside(), [batch], reader=salgp.Reader(**way_out))
    assert torch.equal(classifier.predict([batch]).label, network()(x).argmax(1))


@situation("a loader given to the classifier itself", "refused: `classifier.predict(loader)`")
def _called_with_a_loader(folder: Path) -> None:
    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=40)
    classifier = salgp.calibrate(network(), loader, method="platt")
    with pytest.raises(TypeError, match=r"\.predict\(loader\)"):
        classifier(loader)
    assert len(classifier.predict(loader)) == len(x)


@situation("several loaders in one list", "refused: one loader of a `ConcatDataset`")
def _several_loaders(folder: Path) -> None:
    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=40)
    with pytest.raises(TypeError, match="ConcatDataset"):
        salgp.calibrate(network(), [loader, loader], method="platt")


@situation(
    "multi-label targets, several classes per sample", "refused: calibrate each class as a binary problem"
)
def _multi_label(folder: Path) -> None:
    x, _ = data()
    with pytest.raises(ValueError, match="one class at a time"):
        salgp.calibrate(network(), [(x, torch.ones(len(x), 3, dtype=torch.long))], method="platt")


@situation("one-hot labels", "works with a network; with arrays, pass `labels.argmax(1)`")
def _one_hot(folder: Path) -> None:
    z, y = sample(100)[0].logits, sample(100)[1]
    with pytest.raises(ValueError, match=r"argmax\(1\)"):
        salgp.calibrate_outputs(z, np.eye(3)[y.numpy()])
    x, y = data()
    assert torch.equal(salgp.extract(network(), [(x, torch.eye(3)[y])])[1], y)


@situation("a binary network with one output, `(n, 1)` or `(n,)`", "works; it is the log-odds of class 1")
def _binary(folder: Path) -> None:
    x, _ = data()
    y = (x[:, 0] + 0.5 * torch.randn(len(x), generator=G().manual_seed(1)) > 0).long()
    for end in ((), (nn.Flatten(0),)):
        model = nn.Sequential(nn.Linear(6, 1), *end)
        with torch.no_grad():
            model[0].weight.copy_(4 * torch.eye(1, 6))
        classifier = salgp.calibrate(model, [(x, y)], method="platt")
        assert torch.equal(classifier(x).label, (model(x).reshape(-1) > 0).long())


@situation("float labels 0. and 1.", "works where they are whole numbers; other numbers are refused")
def _float_labels(folder: Path) -> None:
    z, y = sample(100)[0].logits, sample(100)[1]
    by_floats, by_integers = (salgp.calibrate_outputs(z, labels) for labels in (y.double(), y))
    assert torch.equal(by_floats.predict(z).confidence, by_integers.predict(z).confidence)
    with pytest.raises(TypeError, match="no whole numbers"):
        salgp.calibrate_outputs(z, y + 0.5)


@situation(
    "a network that ends in a softmax or sigmoid, undeclared",
    "refused; say `output='probabilities'`, or `'sigmoids'` for one sigmoid per class",
)
def _undeclared(folder: Path) -> None:
    x, y = data()
    with pytest.raises(ValueError, match="look like probabilities"):
        salgp.calibrate(network(3, nn.Softmax(1)), [(x, y)], method="platt")
    with pytest.raises(ValueError, match="look like probabilities"):
        salgp.calibrate(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), [(x, y % 2)], method="platt")
    with pytest.raises(ValueError, match="say output='sigmoids'"):
        salgp.calibrate(network(3, nn.Sigmoid()), [(x, y)], method="platt")


@situation("the same, declared", "works, and agrees with the logits")
def _declared(folder: Path) -> None:
    x, y = data()
    by_probs = salgp.calibrate(
        network(3, nn.Softmax(1)), [(x, y)], method="temperature", output="probabilities"
    )
    by_logits = salgp.calibrate(network(), [(x, y)], method="temperature")
    torch.testing.assert_close(by_probs(x).confidence, by_logits(x).confidence, atol=1e-3, rtol=0)
    sigmoids = network(3, nn.Sigmoid())
    by_class = salgp.calibrate(sigmoids, [(x, y)], method="temperature", output="sigmoids")
    torch.testing.assert_close(by_class(x).confidence, by_logits(x).confidence, atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="output='sigmoids'"):
        salgp.calibrate(sigmoids, [(x, y)], method="temperature", output="probabilities")


@situation(
    "a segmentation network, one score per pixel",
    "refused: scores must be `(n, c)`; `calibrate_outputs` calibrates pixels",
)
def _segmentation(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(n, c\)"):
        salgp.extract(nn.Conv2d(1, 3, 1), [(torch.zeros(4, 1, 5, 5), torch.zeros(4, dtype=torch.long))])


@situation("a regression network with real targets", "refused: labels must be class indices")
def _regression(folder: Path) -> None:
    x, _ = data()
    with pytest.raises((TypeError, ValueError), match="labels"):
        salgp.calibrate(nn.Linear(6, 1), [(x, torch.randn(len(x)))], method="platt")


@situation("a regression network on targets 0 and 1", "refused: its border is at 0.5, that of log-odds at 0")
def _regression_on_classes(folder: Path) -> None:
    x, y = data(classes=2)
    model = nn.Linear(6, 1)
    design = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    weights = torch.linalg.lstsq(design, y[:, None].float()).solution
    with torch.no_grad():
        model.weight.copy_(weights[:6].T)
        model.bias.copy_(weights[6])
    with pytest.raises(ValueError, match="regression"):
        salgp.calibrate(model, [(x, y)], method="platt")


@situation(
    "a network trained further after calibration, with a module replaced, or another one",
    "refused: calibrate again",
)
def _trained_further(folder: Path) -> None:
    x, y = data()
    model = network()
    classifier = salgp.calibrate(model, [(x, y)], method="platt")
    other = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(ValueError, match="other weights"):
        classifier.calibrator.predict(salgp.extract(other, [x])[0])
    head, model[-1] = model[-1], nn.Sequential(model[-1], nn.Tanh())
    with pytest.raises(ValueError, match="were replaced"):
        classifier(x)
    model[-1] = head
    assert len(classifier(x)) == len(x)
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    with pytest.raises(ValueError, match="other weights"):
        classifier(x)


@situation("float16 or bfloat16 networks", "works, in single precision where it matters")
def _half(folder: Path) -> None:
    x, y = data()
    model = network().to(torch.bfloat16)
    classifier = salgp.calibrate(model, [(x, y)], method="temperature")
    assert classifier(x).probs.dtype in (torch.float32, torch.float64)


@situation("50 calibration samples or fewer", "warns that the result may be off by several points")
def _few(folder: Path) -> None:
    x, y = data(40)
    with pytest.warns(CalibrationWarning, match="few calibration samples"):
        salgp.calibrate(network(), [(x, y)], method="platt")


@situation("2,000 classes", "works; classes without a calibration sample are named in a warning")
def _many_classes(folder: Path) -> None:
    g = G().manual_seed(0)
    z = torch.randn(300, 2000, generator=g)
    y = torch.multinomial(torch.softmax(2 * z, 1), 1, generator=g)[:, 0]
    with pytest.warns(CalibrationWarning, match="of 2000 classes"):
        found = salgp.calibrate_outputs(4 * z, y)
    assert found.predict(4 * z).probs.shape == (300, 2000)


@situation(
    "99 samples of one class for each of the other", "works; a class without samples is named in a warning"
)
def _unbalanced(folder: Path) -> None:
    g = G().manual_seed(0)
    y = (torch.arange(400) % 100 == 0).long()
    z = 2 * torch.randn(400, 2, generator=g) + 3 * nn.functional.one_hot(y, 2)
    prediction = salgp.calibrate_outputs(z, y).predict(z)
    assert torch.equal(prediction.label, z.argmax(1))
    with pytest.warns(CalibrationWarning, match="no calibration samples of 1 of 2 classes"):
        salgp.calibrate_outputs(z[y == 0], y[y == 0])


@situation(
    "no training data as a reference", "works; samples are compared with each other, leaving out themselves"
)
def _no_reference(folder: Path) -> None:
    x, y = data()
    agrees(salgp.calibrate(network(), [(x, y)]), network(), x)


@situation(
    "embeddings of the training data, without class scores",
    "works as a reference; its true classes take the place of predictions",
)
def _embeddings_alone(folder: Path) -> None:
    x, y = data()
    known = y.where(y < 2, -1)  # no class 2 among the training data, but unknown ones
    right = salgp.Features.from_logits(torch.eye(3)[known.clamp_min(0)], {"x": x})
    z = 3 * x[:, :3]
    alone, scored = (
        salgp.calibrate_outputs(z, y, layers={"x": x}, reference=(given, known))
        for given in ({"x": x}, right)
    )
    found, expected = (one.calibrator.reference_ for one in (alone, scored))
    assert found.classes.tolist() == sorted(known[known >= 0].tolist())
    assert torch.equal(found.points, expected.points)


@situation(
    "a network without hidden layers (a linear probe), of plain tensors, or of TorchScript",
    "works; temperature scaling takes over, with a warning",
)
def _no_layers(folder: Path) -> None:
    x, y = data()
    probe = nn.Linear(6, 3)
    with torch.no_grad():
        probe.weight.copy_(3 * torch.eye(3, 6))
    with pytest.warns(CalibrationWarning, match="temperature scaling is used instead"):
        classifier = salgp.calibrate(probe, [(x, y)])
    agrees(classifier, probe, x)
    with pytest.raises(ValueError, match='use method="temperature"'):
        salgp.calibrate(probe, [(x, y)], method="layer-evidence")


class Dropping(nn.Module):
    """Monte Carlo dropout: it stays on in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body[2](nn.functional.dropout(self.body[:2](x), training=True))


@situation(
    "a network that is random in evaluation mode (Monte Carlo dropout)",
    "warns where layers are read: a confidence is that of one random pass",
)
def _random(folder: Path) -> None:
    x, y = data()
    with pytest.warns(NetworkWarning, match="that of one random pass"):
        salgp.calibrate(Dropping(), [(x, y)])


@situation("the training data given as calibration data", "warns of shared rows and of data without errors")
def _training_set(folder: Path) -> None:
    x, y = data()
    with pytest.warns(CalibrationWarning, match="are in the reference too"):
        salgp.calibrate(network(), [(x, y)], reference=[(x, y)], perturb=None)
    with pytest.warns(CalibrationWarning, match="no errors"):
        salgp.calibrate(network(), [(x, network()(x).argmax(1))], method="platt")


@situation(
    "labels that are shuffled, in another order, or off by one",
    "warns that they may not be those of the samples; of the reference too",
)
def _labels_of_others(folder: Path) -> None:
    features, labels = sample(300)
    known, seen = sample(300, seed=1)
    with pytest.warns(CalibrationWarning, match="aligned with the samples"):
        salgp.calibrators.get("isotonic").fit(features, labels.roll(1))
    with pytest.warns(CalibrationWarning, match="are the labels of the reference"):
        salgp.calibrators.get("layer-evidence").fit(features, labels, (known, seen.roll(1)))


@situation(
    "a column in other units, such as metres for kilometres",
    "confidence falls back to chance and `novelty` rises; without layers nothing can tell",
)
def _other_units(folder: Path) -> None:
    x, y = data(240)
    model = salgp.calibrate(network(), [(x[:120], y[:120])], reference=[(x[120:], y[120:])])
    wrong = x.clone()
    wrong[:, 0] *= 1e9
    home, there = model(x), model(wrong)
    torch.testing.assert_close(there.confidence, torch.full_like(there.confidence, 1 / 3), atol=0.02, rtol=0)
    assert float(there.novelty.min()) > float(home.novelty.max())


@situation("a class that the network does not know", "label -1: never correct, counted, left out of NLL")
def _unknown_class(folder: Path) -> None:
    features, labels = sample(100)
    labels[:10] = -1
    scores = salgp.evaluate(salgp.calibrate_outputs(features.logits, labels).predict(features.logits), labels)
    assert scores.n_unknown == 10


def scores_files(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features, labels = sample(100)
    z, y = features.logits.numpy(), labels.numpy()
    np.savez(folder / "s.npz", logits=z, labels=y)
    lines = [",".join(map(str, (*row, label))) for row, label in zip(z, y, strict=True)]
    (folder / "s.csv").write_text("\n".join(["logits.0,logits.1,logits.2,label", *lines]))
    pq.write_table(pa.table({"logits": z.tolist(), "label": y}), folder / "s.parquet")


@situation("logits in .npz, .csv or .parquet", "works: `salgp fit logits.npz -o calibrator`")
def _files(folder: Path) -> None:
    scores_files(folder)
    for suffix in ("npz", "csv", "parquet"):
        assert main(["fit", str(folder / f"s.{suffix}"), "-o", str(folder / suffix), "-q"]) == 0


@situation("probabilities only", "works: `probs=...`; logits passed as probabilities are refused")
def _probabilities(folder: Path) -> None:
    features, labels = sample(100)
    assert salgp.calibrate_outputs(labels=labels, probs=features.probs).output == "probabilities"
    with pytest.raises(ValueError, match="are they logits"):
        salgp.calibrate_outputs(labels=labels, probs=features.logits)


@situation(
    "XGBoost, LightGBM or a fitted scikit-learn classifier", "works: `CalibratedEstimator(model).fit(X, y)`"
)
def _estimator(folder: Path) -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    from salgp.sklearn import CalibratedEstimator

    x, y = (part.numpy() for part in data(300))
    names = np.array(["ant", "bee", "cow"])[y]
    trees = HistGradientBoostingClassifier(max_iter=5, random_state=0).fit(x[:150], names[:150])
    calibrated = CalibratedEstimator(trees).fit(x[150:], names[150:])
    np.testing.assert_array_equal(calibrated.predict(x), trees.predict(x))
    np.testing.assert_allclose(calibrated.predict_proba(x).sum(1), 1, atol=1e-6)


@situation(
    "a forest, tree or k-NN whose probabilities are exactly 0",
    "works: zeros count as the smallest probability it gives; warns where many true classes have 0",
)
def _zeros(folder: Path) -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.tree import DecisionTreeClassifier

    from salgp.sklearn import CalibratedEstimator

    x, y = (part.numpy() for part in data(900))
    forest = RandomForestClassifier(20, random_state=0).fit(x[:300], y[:300])
    found = CalibratedEstimator(forest).fit(x[300::2], y[300::2]).prediction(x[301::2])
    assert abs(float(found.confidence.mean()) - forest.score(x[301::2], y[301::2])) < 0.05
    tree = DecisionTreeClassifier(random_state=0).fit(x[:300], y[:300])
    with pytest.warns(CalibrationWarning, match="has a probability of exactly 0"):
        CalibratedEstimator(tree).fit(x[300:600], y[300:600])


@situation(
    "a fitted classifier in `cross_val_score` or a search",
    "refused with the hint `FrozenEstimator(model)`, which works",
)
def _cross_validated(folder: Path) -> None:
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    from salgp.sklearn import CalibratedEstimator

    x, y = (part.numpy() for part in data(400))
    model = LogisticRegression().fit(x[:200], y[:200])
    with pytest.raises(ValueError, match="FrozenEstimator"):
        cross_val_score(CalibratedEstimator(model), x[200:], y[200:], cv=2, error_score="raise")
    frozen = CalibratedEstimator(FrozenEstimator(model))
    assert cross_val_score(frozen, x[200:], y[200:], cv=2).mean() > 0.5


@situation("a Keras-like model: NumPy in, NumPy out, with embeddings", "works; embeddings become layers")
def _numpy_model(folder: Path) -> None:
    features, labels = sample(200)
    layers = {"embedding": features.layers["layer0"].numpy()}
    found = salgp.calibrate_outputs(features.logits.numpy(), labels.numpy(), layers=layers)
    assert found.calibrator.name == "layer-evidence"


@situation("labels that are names", "works in a table whose columns are named; else says how to number them")
def _names(folder: Path) -> None:
    z = sample(60)[0].logits
    with pytest.raises(TypeError, match="map class names"):
        salgp.calibrate_outputs(z, ["cat", "dog", "cow"] * 20)


@situation("NaN or infinity in the data", "refused, naming the row")
def _nan(folder: Path) -> None:
    features, labels = sample(60)
    z = features.logits.clone()
    z[7, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in row 7"):
        salgp.calibrate_outputs(z, labels)


@situation("NumPy arrays at prediction", "works")
def _numpy_input(folder: Path) -> None:
    x, y = data()
    classifier = salgp.calibrate(network(), [(x, y)], method="platt")
    assert torch.equal(classifier(x.numpy()).confidence, classifier(x).confidence)


@situation("an optional library is missing", 'refused with the line to type: `pip install "salgp[...]"`')
def _extras(folder: Path) -> None:
    from salgp.extras import EXTRAS, hint

    for library, extra in EXTRAS.items():
        assert f'pip install "salgp[{extra}]"' in hint(library)


@situation(
    "a checkpoint that holds a whole pickled model", "refused: opening it could run code; save a state dict"
)
def _pickled(folder: Path) -> None:
    from salgp.io.weights import load_weights

    torch.save(network(), folder / "whole.pt")
    with pytest.raises(ValueError, match="could run code"):
        load_weights(network(), folder / "whole.pt")


@situation("weights of another network, or a calibrator of another network", "refused")
def _other_network(folder: Path) -> None:
    x, y = data()
    salgp.calibrate(network(), [(x, y)], method="platt").save(folder / "cal")
    other = network()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    with pytest.raises(ValueError, match="other weights"):
        salgp.load(folder / "cal", other)


@situation("a misspelt method, layer or file", "refused, with the nearest name")
def _misspelt(folder: Path) -> None:
    x, y = data()
    with pytest.raises(KeyError, match="did you mean 'temperature'"):
        salgp.calibrate(network(), [(x, y)], method="temprature")
    with pytest.raises(KeyError, match="known layers"):
        salgp.extract(network(), [(x, y)], reader=salgp.Reader(layers=["conv1"]))


@situation(
    "the network in training mode, with dropout",
    "works: it is read in evaluation mode, and its mode is restored",
)
def _training_mode(folder: Path) -> None:
    x, y = data()
    model = nn.Sequential(network(), nn.Dropout(0.5)).train()
    one, two = (salgp.extract(model, [(x, y)])[0].logits for _ in range(2))
    assert torch.equal(one, two)
    assert model.training


def command(line: str, folder: Path) -> tuple[int, str]:
    """Exit code of a command run in ``folder``, and what it said beside its result."""
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        return main(line.split()), " ".join(said.getvalue().split())


@situation(
    "image folders of which one lacks a class",
    "works where another set has a folder of every class; else refused: name them with `--classes`",
)
def _image_folders(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (folder / "net.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
    )
    for name, classes in (("cal", "abc"), ("test", "bc")):
        for k, letter in enumerate(classes):
            (folder / name / letter).mkdir(parents=True)
            for i in range(20):
                pixels = np.full((2, 2, 3), 10 * i + k, np.uint8)
                image.fromarray(pixels).save(folder / name / letter / f"{i}.png")
    line = "calibrate net.py:make --calibration cal --test test -m platt -o out"
    assert command(line, folder)[0] == 0
    assert set(salgp.load_features(folder / "out" / "test.safetensors")[1].tolist()) == {1, 2}  # type: ignore[union-attr]
    code, said = command("extract net.py:make test -o test.safetensors", folder)
    assert code == 1
    assert "--classes" in said


def saved(folder: Path, name: str, seed: int, network: str = "a") -> None:
    features, labels = sample(120, seed=seed)
    features.save(folder / f"{name}.safetensors", labels, {"network": network * 64})


@situation(
    "test samples that are also in the calibration data",
    "noted: what is checked on them looks better than it is",
)
def _shared(folder: Path) -> None:
    saved(folder, "cal", 0)
    code, said = command("compare cal.safetensors --test cal.safetensors --method platt", folder)
    assert code == 0
    assert "120 of 120 samples of --test are in cal.safetensors too" in said


@situation(
    "augmented samples in features that are evaluated, reported on or watched",
    "noted: only the samples themselves count",
)
def _copies(folder: Path) -> None:
    saved(folder, "cal", 0)
    features, labels = sample(60, seed=1)
    groups = torch.arange(60).repeat(2)
    twice = salgp.Features.concatenate([features, features])
    replace(twice, groups=groups).save(folder / "copies.safetensors", labels.repeat(2))
    assert command("fit cal.safetensors -m platt -o cal", folder)[0] == 0
    assert "they are left out" in command("evaluate cal copies.safetensors", folder)[1]


@situation("features of another network", "refused by every command: extract them again")
def _features_of_another(folder: Path) -> None:
    saved(folder, "cal", 0)
    saved(folder, "other", 1, "b")
    assert command("fit cal.safetensors -m platt -o cal", folder)[0] == 0
    for line in (
        "apply cal other.safetensors -o p.csv",
        "evaluate cal other.safetensors",
        "report cal other.safetensors -o r.html",
        "fit cal.safetensors --reference other.safetensors -m platt -o again",
        "compare cal.safetensors --test other.safetensors --method platt",
    ):
        code, said = command(line, folder)
        assert code == 1
        assert "another network" in said


@situation("another calibrator for a monitor that watches one", "refused: start a new monitor")
def _other_calibrator(folder: Path) -> None:
    saved(folder, "cal", 0)
    saved(folder, "home", 1)
    for method in ("platt", "beta"):
        assert command(f"fit cal.safetensors -m {method} -o {method}", folder)[0] == 0
    assert command("monitor platt --state watch --reference home.safetensors", folder)[0] == 0
    code, said = command("monitor beta --state watch", folder)
    assert code == 1
    assert "start a new monitor" in said


@situation(
    "a few labels from the field, where data have shifted",
    "works: `learn_correction(today[picked], labels)`, or `salgp apply --field-labels`, corrects all "
    "confidences by them",
)
def _field_labels(folder: Path) -> None:
    x, y = data(400)
    moved = x + 1.5 * torch.randn(x.shape, generator=G().manual_seed(1))
    classifier = salgp.calibrate(network(), [(x, y)], method="temperature")
    today = classifier.predict([(moved, y)])
    better = salgp.estimate.learn_correction(today[:40], y[:40])(today)
    before, after = (salgp.evaluate(p[40:], y[40:]).ece for p in (today, better))
    assert after < 0.7 * before
    assert torch.equal(better.label, today.label)
    classifier.save(folder / "cal")
    for name, rows in (("few", slice(40)), ("new", slice(40, None))):
        features, labels = classifier.extract([(moved[rows], y[rows])])
        features.save(folder / f"{name}.safetensors", labels)
    code, said = command("apply cal new.safetensors -o new.csv --field-labels few.safetensors", folder)
    assert code == 0
    assert "40 labels: " in said
    written = np.genfromtxt(folder / "new.csv", delimiter=",", names=True)["confidence"]
    np.testing.assert_allclose(written, better.confidence[40:].numpy(), atol=1e-5)


@situation(
    "masked NumPy arrays, as samples, labels or confidences", "refused: leave the rows out, or fill them"
)
def _masked(folder: Path) -> None:
    features, labels = sample(60)
    z, y = features.logits.numpy(), labels.numpy()
    masked = np.ma.masked_array(z, z > 2), np.ma.masked_array(y, y == 1)
    prediction = salgp.calibrate_outputs(z, y, method="platt").predict(z)
    for call in (
        lambda: salgp.calibrate_outputs(masked[0], y),
        lambda: salgp.calibrate_outputs(z, masked[1]),
        lambda: salgp.evaluate(prediction, masked[1]),
    ):
        with pytest.raises(ValueError, match="are masked"):
            call()


@situation("layer features of 1e155 in double precision", "refused: their distances overflow")
def _huge(folder: Path) -> None:
    features, labels = sample(60)
    with pytest.raises(ValueError, match="overflow"):
        salgp.calibrate_outputs(features.logits, labels, layers={"a": 1e155 * torch.randn(60, 4).double()})


@situation(
    "scores read as probabilities, for a calibrator fitted on logits",
    "refused: the meaning of the scores is kept in every file, and must match",
)
def _meaning(folder: Path) -> None:
    scores_files(folder)
    probs = torch.softmax(torch.from_numpy(np.load(folder / "s.npz")["logits"]), 1).numpy()
    np.savez(folder / "p.npz", probs=probs, labels=np.load(folder / "s.npz")["labels"])
    assert command("fit s.npz -m temperature -o cal", folder)[0] == 0
    code, said = command("evaluate cal p.npz", folder)
    assert code == 1
    assert "probabilities" in said


@situation(
    "prediction sets from 10 samples at 95 %, or from more samples of unknown classes than it leaves",
    "refused with the number of samples it takes; every set would hold all classes",
)
def _few_for_sets(folder: Path) -> None:
    features, labels = sample(200)
    prediction = salgp.calibrate_outputs(features.logits, labels, method="platt").predict(features.logits)
    with pytest.raises(ValueError, match="at least 19 labelled samples"):
        salgp.sets.fit_sets(prediction[:10], labels[:10], 0.95)
    labels[:20] = -1
    with pytest.raises(ValueError, match="label -1"):
        salgp.sets.fit_sets(prediction, labels, 0.95)


@situation("files of two monitors in one folder", "refused: restore the files of one")
def _mixed_monitors(folder: Path) -> None:
    features, labels = sample(200)
    prediction = salgp.calibrate_outputs(features.logits, labels, method="platt").predict(features.logits)
    for name in ("one", "two"):
        salgp.Monitor.start(prediction, folder / name).feed(prediction[:50])
    (folder / "one" / "log.jsonl").write_bytes((folder / "two" / "log.jsonl").read_bytes())
    with pytest.raises(salgp.FormatError, match="another monitor"):
        salgp.Monitor.open(folder / "one")


@situation(
    "labels that come later, for a monitor",
    "works: measured accuracy comes first, and decides whether a change matters; the estimate beside it",
)
def _late_labels(folder: Path) -> None:
    features, labels = sample(400)
    prediction = salgp.calibrate_outputs(features.logits, labels, method="platt").predict(features.logits)
    monitor = salgp.Monitor.start(prediction)
    monitor.feed(prediction[:200], key="monday")
    told = monitor.observe(prediction[:200], labels[:200], key="monday")
    right = float((prediction.label == labels)[:200].double().mean())
    assert told.details.startswith(f"Measured accuracy {100 * right:.1f} %")


@situation(
    "a regressor or a clustering of scikit-learn; a list of dictionaries, or a model that is no network",
    "refused by name, with what is expected instead",
)
def _wrong_kind(folder: Path) -> None:
    from sklearn.linear_model import LinearRegression, LogisticRegression

    from salgp.sklearn import CalibratedEstimator

    x, y = data()
    with pytest.raises(TypeError, match="is a regressor"):
        CalibratedEstimator(LinearRegression().fit(x, y)).fit(x.numpy(), y.numpy())
    classifier = salgp.calibrate(network(), [(x, y)], method="platt")
    with pytest.raises(TypeError, match="expected one batch"):
        classifier([{"x": x}, {"x": x}])
    with pytest.raises(TypeError, match="CalibratedEstimator"):
        salgp.calibrate(LogisticRegression().fit(x, y), [(x, y)])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def strict_warnings() -> Iterator[None]:
    """A situation that warns must say so: any other warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("one", SITUATIONS, ids=lambda s: s.trial.__name__.strip("_"))
def test_situation(one: Situation, tmp_path: Path) -> None:
    one.trial(tmp_path)


def test_the_page_shows_the_same_table() -> None:
    assert len(SITUATIONS) >= 30
    rows = [f"| {s.has} | {s.happens} |" for s in SITUATIONS]
    page = PAGE.read_text(encoding="utf-8")
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/situations.md lacks:\n" + "\n".join(missing)
    assert page.count("\n| ") - 1 == len(rows)
