"""Every part and every constant of layer evidence: what happens without it, with half and with double of it.

    python study/benchmarks/ablation.py --cache CACHE --seeds 0 --out study/results/ablation.md

Development sets of the shift suite only, on cached features (`python -m salgp_study.suite features`). A
variant is the library's own code with one constant or function replaced. Scores are means over data sets,
each the mean of its shifted sets: ECE / NLL of correctness / AUROC of spotting errors. Resumable: a variant
that is in the JSON lines beside the page is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp import metrics
from salgp.calibrators.evidence import calibrator as calibrators
from salgp.calibrators.evidence import fitting, layer_spaces, monotone, windows
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.layer_spaces import Evidence, layer_evidence, make_reference
from salgp.calibrators.evidence.mixture import Mixture, Samples, Scales, samples_of, scales_of
from salgp.calibrators.evidence.monotone import MonotoneLogistic
from salgp.calibrators.evidence.windows import window_sums
from salgp.features import Features
from salgp_study.suite.cache import case_folder, read_case

SETS = (
    "tabular-wine",
    "tabular-breast-cancer",
    "tabular-digits",
    "digits",
    "digits-weak",
    "mstar-convnet",
    "spcc-rnn",
    "banking77-minilm",
    "cifar10-resnet32",
)
WINDOW = 50
Scores = dict[str, list[float]]


@dataclass(frozen=True)
class Variant:
    """One change of the model.

    Args:
        name: for the table.
        patch: ``(module, name, value)`` replaced while it runs.
        settings: of `LayerEvidence`.
        change: of the fitted mixture.
        layers: which columns of the evidence are kept: ``all`` or ``last``.
    """

    name: str
    patch: tuple[tuple[Any, str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    change: Callable[[Mixture], Mixture] | None = None
    layers: str = "all"


def parts() -> list[Variant]:
    """The model without one part each."""

    design = Samples.design.func

    def no_novelty(samples: Samples) -> Tensor:
        return design(replace(samples, novelty=torch.zeros_like(samples.novelty)))

    def without(column: int) -> Callable[[Mixture], Mixture]:
        def change(found: Mixture) -> Mixture:
            assert found.window is not None
            weights = found.window.weights.clone()
            weights[column] = 0.0
            return replace(found, window=replace(found.window, weights=weights))

        return change

    def without_offsets(*rows: Any, **settings: Any) -> MonotoneLogistic:
        return monotone.fit_monotone(*rows[:5], offsets=False)

    def without_length(*some: Any) -> Scales:
        found = scales_of(*some)
        return replace(found, largest_norm=torch.full_like(found.largest_norm, 1e300))

    return [
        Variant("the model"),
        Variant("layers other than the last (agreement)", layers="last"),
        Variant("novelty", ((Samples, "design", property(no_novelty)),)),
        Variant("class offsets", ((fitting, "fit_monotone", without_offsets),)),
        Variant("choice in domain: always temperature", settings=(("layers_in_domain", False),)),
        Variant("choice in domain: always the layers", settings=(("layers_in_domain", True),)),
        Variant("coordinates in the shift score", ((layer_spaces, "COORDINATES", 0),)),
        Variant("shift score (its statistic)", change=without(0)),
        Variant("confidence of f_shift (its statistic)", change=without(1)),
        Variant("choice of the noise (always 16)", ((fitting, "NOISE", (16.0,)),)),
        Variant("over-prediction", settings=(("over_prediction", False),)),
        Variant("windows of 1 when w is learned", ((fitting, "SIZES", (50,)),)),
        Variant("windows of 50 when w is learned", ((fitting, "SIZES", (1,)),)),
        Variant("how families differ (the root)", change=partial(replace, level_variance=0.0)),
        Variant("norm excess", ((calibrators, "scales_of", without_length),)),
    ]


CONSTANTS: tuple[tuple[Any, str], ...] = (
    (monotone, "RIDGE"),
    (fitting, "FEWEST_ERRORS"),
    (fitting, "SCORE_RIDGE"),
    (fitting, "AUGMENTED_SHARE"),
    (fitting, "LOST"),
    (windows, "CLASS_NOISE"),
    (fitting, "DRAWS"),
)
"""Constants of the model; `width` and `size` are settings and follow below."""


def constants() -> list[Variant]:
    """Half and double of every constant."""
    found = []
    for module, name in CONSTANTS:
        value = getattr(module, name)
        found += [Variant(f"{name} {x:g}", ((module, name, x),)) for x in _half_and_double(value)]
    found += [Variant(f"noise at least {x:g}", ((fitting, "NOISE", noises(x)),)) for x in (8.0, 32.0)]
    found += [Variant(f"width {x}", settings=(("width", x),)) for x in (32, 128)]
    found += [Variant(f"size {x}", settings=(("size", x),)) for x in (100, 400)]
    return [*found, *(Variant(f"COORDINATES {x}", ((layer_spaces, "COORDINATES", x),)) for x in (8, 32))]


def noises(least: float) -> tuple[float, ...]:
    """As many candidates as there are, from another first one on."""
    return tuple(least * 2**i for i in range(len(fitting.NOISE)))


def _half_and_double(value: float) -> tuple[float, float]:
    return (value // 2, value * 2) if isinstance(value, int) else (value / 2, value * 2)


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/shift"))
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("study/results/ablation.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    log = options.cache / "ablation.jsonl"
    done = {r["key"]: r for r in map(json.loads, log.read_text().splitlines())} if log.is_file() else {}
    evidence: dict[Any, Any] = {}
    for variant in [*parts(), *constants()]:
        key = f"{variant.name} | {' '.join(options.sets)} | {options.seeds}"
        if key not in done:
            each = [
                _scored(variant, options.cache, name, seed, evidence)
                for name in options.sets
                for seed in options.seeds
            ]
            scores = {k: np.nanmean([one[k] for one in each], axis=0).tolist() for k in each[0]}
            done[key] = {"key": key, "name": variant.name, "scores": scores}
            with log.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
            print(variant.name, {k: [round(x, 4) for x in v] for k, v in scores.items()}, flush=True)
    _write(
        options,
        {
            v.name: done[f"{v.name} | {' '.join(options.sets)} | {options.seeds}"]["scores"]
            for v in [*parts(), *constants()]
        },
    )


def _scored(variant: Variant, cache: Path, name: str, seed: int, known: dict[Any, Any]) -> Scores:
    """Scores of one variant on one case."""
    with _patched(variant), torch.no_grad():
        calibrator = LayerEvidence(**dict(variant.settings))
        (features, labels), found, tests = _evidence(calibrator, cache, name, seed, known)
        scales, _, model, _ = calibrator._checked_model(features, labels, _kept(found, variant.layers))
        model = model if variant.change is None else variant.change(model)
        scores: Scores = {}
        for kind, test, y, its in tests:
            samples = samples_of(test, _kept(its, variant.layers), scales)
            correct = test.correct(y).double()
            last = max(len(y) // WINDOW - 1, 0)
            number = (torch.arange(len(y)) // WINDOW).clamp(max=last)
            context = model(samples, window_sums(model.parts(samples), number)).mean
            for how, f in (("single", model(samples).mean), ("context", context)):
                scores.setdefault(f"{kind} {how}", []).append(_three(f, correct))  # type: ignore[arg-type]
        return {k: np.nanmean(v, axis=0).tolist() for k, v in scores.items()}


def _evidence(calibrator: LayerEvidence, cache: Path, name: str, seed: int, known: dict[Any, Any]) -> Any:
    """Calibration features, their evidence, and the test sets with theirs; kept for the next variant."""
    key = (name, seed, calibrator.width, calibrator.size, layer_spaces.COORDINATES)
    if key not in known:
        case = read_case(case_folder(cache, name, seed))
        reference = make_reference(*case.reference, calibrator._reference_settings)

        def of(features: Features) -> tuple[Features, Evidence]:
            bare = Features(features.logits, {}, features.groups, features.families, features.strengths)
            return bare, layer_evidence(reference, features)

        features, found = of(case.calibration[0])
        tests = [(t.kind, t.labels, *of(t.features)) for t in case.tests if t.kind in ("in", "shift")]
        value = (features, case.calibration[1]), found, [(kind, f, y, e) for kind, y, f, e in tests]
        if key[2:] != (64, None, 16):
            return value
        known[key] = value
    return known[key]


def _kept(evidence: Evidence, layers: str) -> Evidence:
    if layers == "all":
        return evidence
    return replace(evidence, agreement=evidence.agreement[:, -1:], novelty=evidence.novelty[:, -1:])


def _three(f: Tensor, correct: Tensor) -> list[float]:
    s, y = torch.sigmoid(f).numpy(), correct.numpy()
    mixed = 0 < y.mean() < 1
    return [metrics.ece(s, y), metrics.nll_correct(s, y), metrics.auroc(s, y) if mixed else np.nan]


@contextlib.contextmanager
def _patched(variant: Variant) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in variant.patch]
    try:
        for module, name, value in variant.patch:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _write(options: argparse.Namespace, found: dict[str, Scores]) -> None:
    columns = ("in single", "in context", "shift single", "shift context")
    base = found["the model"]

    def row(name: str) -> str:
        cells = [
            " / ".join(f"{x:.4f}"[1:] if 0 <= x < 1 else f"{x:.3f}" for x in found[name][c]) for c in columns
        ]
        rise = [found[name][c][0] - base[c][0] for c in columns[2:]]
        return f"| {name} | {' | '.join(cells)} | {rise[0]:+.4f}, {rise[1]:+.4f} |"

    head = [
        "| | in domain, single | in domain, context | shift, single | shift, context | change of ECE |",
        "|---|---|---|---|---|---|",
    ]
    seeds = " ".join(map(str, options.seeds))
    lines = [
        "# Parts and constants of layer evidence",
        "",
        f"Made by `python study/benchmarks/ablation.py --seeds {seeds}`;",
        f"data sets: {', '.join(options.sets)}.",
        "ECE / NLL of correctness / AUROC of spotting errors, means over data sets; a context is 50 samples.",
        "",
        "## Without one part",
        "",
        *head,
        *(row(v.name) for v in parts()),
        "",
        "## Half and double of every constant",
        "",
        *head,
        *(row(v.name) for v in constants()),
        "",
    ]
    options.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
