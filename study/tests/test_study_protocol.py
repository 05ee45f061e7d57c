"""Splits: who goes where, nobody twice, every class in its share."""

from __future__ import annotations

import pytest
import torch

from salgp_study.protocol import curve_splits, mstar_splits, stratified
from salgp_study.toy_data import toy_chips, toy_lightcurves


@pytest.mark.parametrize(
    ("protocol", "angle", "tests"), [("paper", 15, ("17", "30")), ("soc", 17, ("15", "30"))]
)
def test_mstar_protocols(protocol: str, angle: int, tests: tuple[str, ...]) -> None:
    chips = toy_chips()
    splits = mstar_splits(chips, protocol, seed=3)
    assert tuple(splits.tests) == tests
    trained = torch.cat([splits.train.tensors[0], splits.validation.tensors[0]])
    mine = chips.x[chips.depression == angle]
    assert sorted(trained.flatten(1).sum(1).tolist()) == sorted(mine.flatten(1).sum(1).tolist()), (
        "train and validation share out the angle"
    )
    assert len(splits.validation) == round(0.2 * len(mine) / 3) * 3
    assert sum(splits.sizes.values()) == len(chips)


def test_fraction_is_per_class_and_seeded() -> None:
    chips = toy_chips()
    half = mstar_splits(chips, fraction=0.5, seed=0)
    counts = torch.bincount(torch.cat([half.train.tensors[1], half.validation.tensors[1]]))
    assert counts.tolist() == [12, 12, 12]
    again, other = mstar_splits(chips, fraction=0.5, seed=0), mstar_splits(chips, fraction=0.5, seed=1)
    assert torch.equal(half.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(half.train.tensors[0], other.train.tensors[0])


def test_curves_hold_rare_types_out() -> None:
    curves = toy_lightcurves()
    splits = curve_splits(curves, unknown=("Z",), seed=0)
    assert splits.class_names == ("A", "B", "C")
    assert int(splits.train.tensors[-1].min()) >= 0
    assert (
        int((splits.tests["photometric"].tensors[-1] == -1).sum())
        == int(((curves.target == "Z") & ~curves.spectroscopic.numpy()).sum())
        > 0
    )
    torch.testing.assert_close(splits.train.tensors[1].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    assert len(curve_splits(curves, unknown=("Z",), n_test=11).tests["photometric"]) == 11


def test_every_class_gets_at_least_one() -> None:
    drawn, rest = stratified(torch.tensor([0] * 100 + [1]), 0.1, seed=0)
    assert (len(drawn), len(rest)) == (11, 90)
    with pytest.raises(ValueError, match="share"):
        stratified(torch.zeros(3), 0.0, seed=0)
    with pytest.raises(KeyError, match="paper, soc"):
        mstar_splits(toy_chips(), "eoc")
