"""A real input is never taken for labels: batches of prediction that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.network.batches import Batch, KnownInputs

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
GAIN = torch.arange(60) % 4
Y = torch.arange(60) % 3
PLAIN: Any = {"method": "uncalibrated"}


class Scaled(nn.Module):
    """Takes a second input that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, target: Tensor | None = None, *, y: Tensor | None = None) -> Tensor:
        gain = target if target is not None else y
        return self.last(x if gain is None else x * gain[:, None])


def expected() -> Tensor:
    return Scaled()(X, GAIN).argmax(dim=1)


LABELLED: dict[str, Any] = {
    "tuple": (X, GAIN, Y),
    "target": {"x": X, "target": GAIN, "labels": Y},
    "y": {"x": X, "y": GAIN, "labels": Y},
    "pair": ({"x": X, "y": GAIN, "labels": Y}, Y),
    "truth": {"x": X, "y": GAIN, "truth": Y},
}
UNLABELLED: dict[str, Any] = {
    "tuple": (X, GAIN),
    "target": {"x": X, "target": GAIN},
    "y": {"x": X, "y": GAIN},
    "pair": ({"x": X, "y": GAIN},),
    "truth": {"x": X, "y": GAIN},
}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("form", LABELLED)
def test_a_batch_of_the_inputs_alone_has_no_labels(form: str, stored: bool, tmp_path: Path) -> None:
    options = {"reader": salgp.Reader(labels_at="truth")} if form == "truth" else {}
    classifier: Any = salgp.calibrate(Scaled(), [LABELLED[form]], **PLAIN, **options)
    if stored:
        classifier = salgp.load(classifier.save(tmp_path / "kept"), Scaled())
    torch.testing.assert_close(classifier.predict([UNLABELLED[form]]).label, expected())
    torch.testing.assert_close(classifier.predict([LABELLED[form]]).label, expected())
    assert classifier.extract([UNLABELLED[form]])[1] is None
    torch.testing.assert_close(classifier.extract([LABELLED[form]])[1], Y)


def test_names_of_inputs_are_known_from_the_network() -> None:
    classifier = salgp.calibrate(Scaled(), [(X, GAIN, Y)], **PLAIN)
    torch.testing.assert_close(classifier.predict([{"x": X, "target": GAIN}]).label, expected())


@pytest.mark.parametrize("name", ["target", "y"])
@pytest.mark.parametrize("calibrated_on", [(X, Y), {"x": X, "labels": Y}])
def test_a_call_keeps_what_the_network_takes(calibrated_on: Any, name: str) -> None:
    classifier = salgp.calibrate(Scaled(), [calibrated_on], **PLAIN)
    torch.testing.assert_close(classifier(x=X, **{name: GAIN}).label, expected())
    torch.testing.assert_close(classifier(x=X, labels=Y, **{name: GAIN}).label, expected())


def test_what_held_the_labels_is_no_input_of_a_call() -> None:
    classifier = salgp.calibrate(Scaled(), [{"x": X, "y": Y}], **PLAIN)
    torch.testing.assert_close(classifier(x=X, y=Y).label, Scaled()(X).argmax(dim=1))


def test_labels_that_are_none_are_none() -> None:
    classifier = salgp.calibrate(Scaled(), [{"x": X, "labels": Y}], **PLAIN)
    assert len(classifier.predict([{"x": X, "labels": None}])) == 60


def test_kept_inputs_are_checked() -> None:
    from salgp.network.reader import reader_from, reader_header

    header = reader_header(salgp.calibrate(Scaled(), [(X, GAIN, Y)], **PLAIN).taps)
    for wrong in ({"count": "2"}, {"names": [1]}, {"labels_at": 0.5}):
        with pytest.raises(TypeError, match="expected"):
            reader_from({**header, "inputs": {**header["inputs"], **wrong}}, None, None)


def test_an_example_is_read_like_the_batches_of_calibration() -> None:
    one = salgp.calibrate(Scaled(), [(X, Y)], **PLAIN)
    assert len(one.batch_of((X, Y)).inputs) == 1  # though the network takes two
    two = salgp.calibrate(Scaled(), [(X, GAIN, Y)], **PLAIN)
    for example in ((X, GAIN), (X, GAIN, Y)):
        assert len(two.batch_of(example).inputs) == 2


def test_a_pair_of_mapping_and_labels_has_labels() -> None:
    reader = salgp.calibrate(Scaled(), [LABELLED["pair"]], **PLAIN).taps
    assert isinstance(reader.batch_of(LABELLED["pair"]), Batch)
    assert reader.batch_of(LABELLED["pair"]).labels is Y


def test_a_network_of_any_names_is_called_with_a_usual_name_of_labels() -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
            return x * rest["target"]

    labelled = Batch.of({"x": X, "labels": Y})
    known = KnownInputs.of(labelled, Open())
    called = Batch.given((), {"x": X, "target": GAIN}, Open(), known=known)
    assert sorted(called.keywords) == ["target", "x"]
