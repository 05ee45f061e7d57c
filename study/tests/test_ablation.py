"""Every variant of the ablation can be put in place of the model, and is taken back."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

from salgp.calibrators.evidence.mixture import Samples

ABLATION = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "ablation.py"))


def samples() -> Samples:
    g = torch.Generator().manual_seed(0)
    t, A, N, x = (torch.rand(5, *more, generator=g).double() for more in ((), (2,), (2,), (6,)))
    sides = t[:, None].expand(5, 2)
    return Samples(sides, -sides, A, N, x, torch.ones(5).double(), torch.zeros(5).long())


def test_variants_change_the_model_and_are_taken_back() -> None:
    plain = samples()
    variants = {v.name: v for v in [*ABLATION["parts"](), *ABLATION["constants"]()]}
    for variant in variants.values():
        before = [getattr(module, name) for module, name, _ in variant.patch]
        with ABLATION["_patched"](variant):
            changed = [getattr(module, name) for module, name, _ in variant.patch]
        assert changed == [value for _, _, value in variant.patch]
        assert [getattr(module, name) for module, name, _ in variant.patch] == before
    with ABLATION["_patched"](variants["novelty"]):
        without = samples().design
    torch.testing.assert_close(without[:, :-1], plain.design[:, :-1])
    assert bool((plain.design[:, -1] < 0).all())
    assert bool((without[:, -1] == 0).all())
