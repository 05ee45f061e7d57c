"""Running a study: train, take features, calibrate, score; every stage is cached by content and every score
is one record.

Kill it at any moment: the same command continues where it stopped, repeats nothing that was finished, and
ends with the same records. Everything lives in the output folder: ``records.jsonl`` (to keep) and ``cache/``
(weights, features, predictions; may be deleted).
"""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import salgp
from salgp.calibrators import Calibrator
from salgp.features import Features, load_features
from salgp.gp.fitting import Fitted
from salgp.io import locked, read_tensors, write_tensors
from salgp.prediction import Prediction
from salgp_study.backbones import build_backbone
from salgp_study.methods import Method, methods_of, rows_of_prediction
from salgp_study.predictions import pack_prediction, unpack_prediction
from salgp_study.presets import PRESETS, STUDIES, Experiment, Preset
from salgp_study.protocol import Splits, stratified
from salgp_study.scores import join_predictions, score_prediction
from salgp_study.sources import Source, names_of_tests, open_source
from salgp_study.store import append_record, content_key, read_records
from salgp_study.train import Recipe, train_network

__all__ = ["Run", "open_runs", "run_study"]

N_LAYERS = 5
"""Every backbone of the paper is tapped at five places."""
SIDE_GROUPS = (
    "subsets",
    "coregionalised",
    "architectures",
    "class",
    "feature",
    "concat",
    "red",
    "deep",
    "adam",
)
"""Groups of methods that run once: with the first pooling, fitted on the first split."""
_POOLINGS = {"avg": "channel-avg", "max": "channel-max", "none": "flatten"}

Progress = Callable[[str], None]


def run_study(
    name: str,
    preset: str = "cpu",
    seeds: Sequence[int] = (0,),
    out: str | os.PathLike[str] = "study",
    data: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    fit_on: Sequence[str] | None = None,
) -> Path:
    """Run the study called ``name``; finished parts are not run again.

    Args:
        name: one of `list_studies`, or ``"all"`` for every study whose data are at hand.
        preset: ``smoke``, ``cpu``, ``paper`` or ``exact``.
        seeds: each trains its own network on its own split.
        out: folder of the records and the cache.
        data: folder of the real data; by default ``SALGP_DATA``.
        progress: called with a line whenever something is done.
        fit_on: splits the calibrators are fitted on, instead of the study's own: ``train``, ``validation``,
            ``both``.

    Returns:
        The output folder.
    """
    done = {record["key"] for record in read_records(out)}
    for run in open_runs(name, preset, seeds, out, data, progress, fit_on):
        with locked(run.cache / f"{run.study}-{run.seed}"):
            for record in run.missing_records(done):
                append_record(out, record)
                done.add(record["key"])
    return Path(out)


def open_runs(
    name: str,
    preset: str,
    seeds: Sequence[int],
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    fit_on: Sequence[str] | None = None,
) -> Iterator[Run]:
    """The runs of a study, one per experiment and seed; nothing is computed before it is asked for."""
    if name != "all" and name not in STUDIES:
        raise KeyError(f"no study called {name!r}; known: {', '.join(STUDIES)}, or all")
    if preset not in PRESETS:
        raise KeyError(f"no preset called {preset!r}; known: {', '.join(PRESETS)}")
    effort = PRESETS[preset]
    sources: dict[str, Source] = {}
    for study in STUDIES if name == "all" else (name,):
        for experiment in STUDIES[study][1]:
            if experiment.dataset not in sources:
                try:
                    sources[experiment.dataset] = open_source(experiment.dataset, effort, data)
                except FileNotFoundError:
                    if name != "all":
                        raise
                    continue
            chosen = experiment if fit_on is None else replace(experiment, fit_on=tuple(fit_on))
            for seed in seeds:
                yield Run(
                    study,
                    chosen,
                    effort,
                    seed,
                    sources[experiment.dataset],
                    Path(out) / "cache",
                    progress or (lambda line: None),
                )


@dataclass
class Run:
    """One experiment with one seed; each stage is computed when first asked for, or read from the cache."""

    study: str
    experiment: Experiment
    preset: Preset
    seed: int
    source: Source
    cache: Path
    progress: Progress
    _features: dict[tuple[str, str], tuple[Features, Tensor]] = field(default_factory=dict)

    def missing_records(self, done: set[str]) -> Iterator[dict[str, Any]]:
        """Score every method that has no record yet."""
        for method, pooling, fit_on in self.plan():
            rows, config = method.rows(N_LAYERS), self.method_config(method, pooling, fit_on)
            keys = {
                (row, test): content_key({**config, "study": self.study, "row": row, "test": test})
                for row in rows
                for test in names_of_tests(self.experiment)
            }
            missing = {place for place, key in keys.items() if key not in done}
            if missing:
                predictions, notes = self.predictions(method, pooling, fit_on)
                for row, test in (place for place in keys if place in missing):
                    yield self._record(
                        keys[row, test], row, test, predictions[test][row], method, pooling, fit_on, notes
                    )
                self.progress(
                    f"{self.name} {method.name} [{pooling}, fitted on {fit_on}]: {notes['seconds']} s"
                )

    def plan(self) -> Iterator[tuple[Method, str, str]]:
        """What is fitted: method, pooling, split it is fitted on."""
        gp = self.preset.gp.get(self.experiment.dataset, {})
        e = self.experiment
        for fit_on, group in product(e.fit_on, e.groups or self.preset.groups):
            main, first = group not in SIDE_GROUPS, fit_on == e.fit_on[0]
            if not (main or first):
                continue
            pooled = self.preset.pooled is None or group in self.preset.pooled
            poolings = e.poolings if main and first and pooled else e.poolings[:1]
            for method in methods_of(group, N_LAYERS, gp, self.preset.deep):
                if method.reference and fit_on != "validation":
                    continue  # the training set is its own nearest neighbour
                yield from (
                    (method, pooling, fit_on) for pooling in (poolings if method.reads_layers else ("none",))
                )

    @property
    def name(self) -> str:
        """A readable name, e.g. ``mstar-convnet/paper/100%/seed 0``."""
        e = self.experiment
        return f"{e.dataset}-{e.backbone}/{e.protocol}/{e.fraction:.0%}/seed {self.seed}"

    @property
    def recipe(self) -> Recipe:
        """How the network is trained."""
        e = self.experiment
        epochs = self.preset.epochs.get(f"{e.backbone}/{e.protocol}", self.preset.epochs[e.backbone])
        epochs = round(epochs / e.fraction) if self.preset.same_steps else epochs
        mixed = e.backbone in self.preset.mixed
        return Recipe(epochs=epochs, seed=self.seed, label_smoothing=e.label_smoothing, mixed=mixed)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the backbone, beyond the number of classes."""
        e = self.experiment
        return {**self.preset.arguments.get(e.backbone, {}), **e.arguments}

    @property
    def train_config(self) -> dict[str, Any]:
        """All that the trained network depends on."""
        e, p = self.experiment, self.preset
        config = {
            "dataset": e.dataset,
            "backbone": e.backbone,
            "protocol": e.protocol,
            "fraction": e.fraction,
            "seed": self.seed,
        }
        size = {"size": p.size} if e.dataset == "mstar" else {"n_test": p.n_test, "max_steps": p.max_steps}
        return {
            **config,
            **size,
            "data": self.source.fingerprint,
            "arguments": self.arguments,
            "recipe": asdict(self.recipe),
        }

    def method_config(self, method: Method, pooling: str, fit_on: str) -> dict[str, Any]:
        """All that the predictions of a method depend on."""
        drawn = {} if self.preset.n_calibration is None else {"n_calibration": self.preset.n_calibration}
        return {
            **self.train_config,
            **drawn,
            "method": asdict(method),
            "pooling": pooling,
            "fit_on": fit_on,
            "version": salgp.__version__,
        }

    @cached_property
    def splits(self) -> Splits:
        """The data."""
        return self.source.splits(self.experiment, self.seed)

    @cached_property
    def network(self) -> nn.Module:
        """Stage 1: the trained network."""
        arguments = {"n_classes": len(self.splits.class_names), **self.arguments}
        if self.experiment.backbone == "rnn":
            curves, meta = self.splits.train.tensors[:2]
            arguments = {**arguments, "n_bands": curves.shape[1], "n_meta": meta.shape[1]}
        folder = self.cache / f"train-{content_key(self.train_config)}"
        start = lambda: build_backbone(self.experiment.backbone, **arguments)  # noqa: E731
        return train_network(
            start, self.splits.train, self.recipe, folder, lambda line: self.progress(f"{self.name} {line}")
        )

    def features(self, pooling: str, split: str) -> tuple[Features, Tensor]:
        """Stage 2: pooled features and labels of a split."""
        if (pooling, split) not in self._features:
            path = (
                self.cache / f"features-{content_key(self.train_config)}" / f"{pooling}-{split}.safetensors"
            )
            if not path.is_file():
                features, labels = self._extract(self.splits.all[split], pooling)
                features.save(path, labels)
            features, stored = load_features(path)
            assert stored is not None
            self._features[pooling, split] = features, stored
        return self._features[pooling, split]

    def predictions(
        self, method: Method, pooling: str, fit_on: str
    ) -> tuple[dict[str, dict[str, Prediction]], dict[str, Any]]:
        """Stage 3: rows of predictions by test set, and notes on the fit."""
        path = (
            self.cache / f"predictions-{content_key(self.method_config(method, pooling, fit_on))}.safetensors"
        )
        view = self._view(method, pooling)
        if not path.is_file():
            self._calibrate(method, view, fit_on, path)
        tensors, metadata = read_tensors(path)
        fit = json.loads(metadata["fit"])
        rows: dict[str, dict[str, Prediction]] = {}
        for test in self._single_tests():
            features = method.select(self.features(view, test)[0])
            whole = unpack_prediction(tensors, test, features)
            rows[test] = rows_of_prediction(method, whole, features, fit["rest_temperature"])
        if "pooled" in names_of_tests(self.experiment):
            rows["pooled"] = {
                row: join_predictions([rows[test][row] for test in self._single_tests()])
                for row in method.rows(N_LAYERS)
            }
        return rows, {**fit, "accuracies": self._accuracies()}

    def labels(self, test: str) -> Tensor:
        """True labels of a test set, or of all together."""
        tests = self._single_tests() if test == "pooled" else (test,)
        return torch.cat([self.features(self.experiment.poolings[0], t)[1] for t in tests])

    def _view(self, method: Method, pooling: str) -> str:
        return pooling if method.reads_layers else self.experiment.poolings[0]

    def _single_tests(self) -> tuple[str, ...]:
        return tuple(t for t in names_of_tests(self.experiment) if t != "pooled")

    def _extract(self, data: TensorDataset, pooling: str) -> tuple[Features, Tensor]:
        loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data, batch_size=128)
        names: Sequence[str] = list(self.network.taps)  # type: ignore[arg-type]
        reader = salgp.Reader(layers=names, pooling=_POOLINGS[pooling])
        features, labels = salgp.extract(self.network, loader, reader=reader)
        assert labels is not None  # the loader yields them
        return features, labels

    def _calibrate(self, method: Method, pooling: str, fit_on: str, path: Path) -> None:
        names = {"train": ("train",), "validation": ("validation",), "both": ("train", "validation")}
        if fit_on not in names:
            raise KeyError(f"calibrators can be fitted on {', '.join(names)}, not on {fit_on!r}")
        parts = [self.features(pooling, split) for split in names[fit_on]]
        features, labels = self._drawn(
            method.select(Features.concatenate([f for f, _ in parts])), torch.cat([y for _, y in parts])
        )
        known = self.features(pooling, "train") if method.reference else None
        calibrator = salgp.calibrators.get(method.calibrator, **method.arguments)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calibrator.fit(
                features, labels, reference=None if known is None else (method.select(known[0]), known[1])
            )
            fitted = {
                t: calibrator.predict(method.select(self.features(pooling, t)[0]))
                for t in self._single_tests()
            }
        seconds = time.perf_counter() - start
        tensors = {
            f"{test}/{k}": x
            for test, prediction in fitted.items()
            for k, x in pack_prediction(prediction).items()
        }
        said = sorted({str(w.message).replace("\n", " ") for w in caught})
        notes = {"seconds": round(seconds, 2), "warnings": said, **notes_of_fit(calibrator, len(labels))}
        write_tensors(path, tensors, {"fit": json.dumps(notes)})

    def _drawn(self, features: Features, labels: Tensor) -> tuple[Features, Tensor]:
        """At most `Preset.n_calibration` of the samples, the same share of each class."""
        most = self.preset.n_calibration
        if most is None or most >= len(labels):
            return features, labels
        rows, _ = stratified(labels, most / len(labels), self.seed + 2)
        return features[rows], labels[rows]

    def _record(
        self,
        key: str,
        row: str,
        test: str,
        prediction: Prediction,
        method: Method,
        pooling: str,
        fit_on: str,
        notes: Mapping[str, Any],
    ) -> dict[str, Any]:
        e = self.experiment
        place = {
            "study": self.study,
            "preset": self.preset.name,
            "dataset": e.dataset,
            "backbone": e.backbone,
            "protocol": e.protocol,
        }
        what = {
            "fraction": e.fraction,
            "seed": self.seed,
            "pooling": pooling,
            "fit_on": fit_on,
            "method": row,
            "test": test,
        }
        scores = score_prediction(prediction, self.labels(test))
        config = {
            "calibrator": method.calibrator,
            "arguments": dict(method.arguments),
            "recipe": asdict(self.recipe),
        }
        keys = {
            "train": content_key(self.train_config),
            "predictions": content_key(self.method_config(method, pooling, fit_on)),
        }
        cached = {**keys, "view": self._view(method, pooling)}
        return {
            "key": key,
            **place,
            **what,
            **scores,
            **notes,
            "sizes": self._sizes(),
            "class_names": list(self.splits.class_names),
            "cache": cached,
            "config": config,
            "versions": _versions(),
        }

    def _accuracies(self) -> dict[str, float]:
        """Accuracy of the network on every split."""
        found = {}
        for split in ("train", "validation", *self._single_tests()):
            features, labels = self.features(self.experiment.poolings[0], split)
            found[split] = float(features.correct(labels).double().mean())
        return found

    def _sizes(self) -> dict[str, int]:
        return {
            split: len(self.features(self.experiment.poolings[0], split)[1])
            for split in ("train", "validation", *self._single_tests())
        }


def notes_of_fit(calibrator: Calibrator, n: int) -> dict[str, Any]:
    """Entries of a record on how its calibrator was fitted to ``n`` samples.

    Of a Gaussian process also its inference (``exact`` or ``inducing``), its number of rows, its log evidence
    and the hyperparameters that ended on a bound.
    """
    learned = vars(calibrator)
    temperature, fitted = learned.get("temperature_"), learned.get("fitted_")
    notes = {
        "temperature": None if temperature is None else float(f"{float(temperature):.6g}"),
        "rest_temperature": float(learned.get("rest_temperature_", 1.0)),
        "n_fitted": n,
    }
    if not isinstance(fitted, Fitted):
        return notes
    return {
        **notes,
        "inference": fitted.inference,
        "n_rows": n * learned["structure_"].repeats,
        "log_evidence": fitted.log_evidence,
        "at_bounds": list(fitted.at_bounds),
    }


def _versions() -> dict[str, str]:
    return {"salgp": salgp.__version__, "torch": torch.__version__, "python": platform.python_version()}
