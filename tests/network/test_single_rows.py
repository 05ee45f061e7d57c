"""One row without a batch axis is refused, and labels that no prediction needs may be anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import salgp
from salgp import CalibratedClassifier


def two_classes(outputs: int = 2) -> tuple[CalibratedClassifier, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))
    x = torch.randn(300, 3)
    return salgp.calibrate(model, [(x, (x[:, 0] > 0).long())], method="temperature"), x


def test_a_row_of_a_network_of_two_classes_is_not_two_samples(tmp_path: Path) -> None:
    """Two scores of one row were once taken for the log-odds of two samples."""
    classifier, x = two_classes()
    again = salgp.load(classifier.save(tmp_path / "c"), classifier.model)
    for c in (classifier, again):
        with pytest.raises(ValueError, match="needs a batch axis"):
            c(x[0])
        with pytest.raises(ValueError, match="needs a batch axis"):
            c.predict(list(x))
        assert len(c(x[:1])) == 1


def test_a_network_of_one_output_keeps_its_single_log_odds() -> None:
    classifier, x = two_classes(1)
    assert len(classifier(x)) == len(x)
    assert len(classifier.predict([x[:1]])) == 1


def test_an_array_is_no_loader() -> None:
    classifier, x = two_classes()
    with pytest.raises(TypeError, match="loader must yield batches, got a ndarray"):
        classifier.predict(x.numpy())


@pytest.mark.parametrize("beside", [[f"{i}.png" for i in range(5)], torch.rand(5), torch.rand(5, 2)])
def test_labels_that_are_not_asked_for_may_be_anything(beside: object) -> None:
    classifier, x = two_classes()
    assert torch.equal(classifier.predict([(x[:5], beside)]).probs, classifier(x[:5]).probs)
