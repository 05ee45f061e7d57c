"""What calibration data must be, and what ruins a calibration without stopping it.

`check_features` refuses features that no method can work with. `warn_of_data` says, in one sentence each,
what makes a fit worth little though it succeeds: too few samples, no errors, labels of other samples, missing
classes, probabilities given as logits or of exactly 0, rows that are also in the reference. Both are called
by `Calibrator.fit`, so that every method warns alike.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.augmented import originals
from salgp.calibrators.label_checks import misaligned, misaligned_reference
from salgp.features import Features
from salgp.logits import ZERO, look_like_probabilities, non_finite_rows, plain_array

__all__ = [
    "FEW_SAMPLES",
    "SHARED",
    "CalibrationWarning",
    "bounded_logits",
    "check_features",
    "check_reference",
    "rows_in",
    "warn_of_data",
]

FEW_SAMPLES = 50
"""Fewer calibration samples than this are worth a warning."""

PER_CLASS = 10
"""With this many samples for each class on average, a class without any is worth a warning."""

MISSING = 1.5
"""With fewer samples, more than half of the classes and this many times what chance leaves out are."""

LARGEST_LOGIT = 1e18
"""Logits of larger size are shifted and cut: their squares would overflow in single precision."""

LARGEST_FEATURE = 1e75
"""Largest number a layer may hold: squared distances between larger ones overflow in double precision."""

FEW_ROWS = 64
"""Samples up to which all numbers are looked at together."""

LOOKED_AT = 1000
"""Rows looked at to tell probabilities from logits."""

ZEROS = 0.05
"""Share of samples whose true class has a probability of exactly 0 that is worth a warning."""

SHARED = 0.01
"""Share of calibration rows found in the reference that is worth a warning."""


class CalibrationWarning(UserWarning):
    """The fit worked, but the data left something undetermined: an optimum at a bound, no usable label, no
    convergence, too few samples.
    """


def check_features(features: Features, with_layers: bool, allow_empty: bool = False) -> None:
    """Refuse features no calibrator can work with, naming the layer and the row.

    Rows are those of the original samples: a perturbed copy counts with its original.

    Example:
        >>> check_features(Features(torch.tensor([[0.0, torch.nan]])), with_layers=False)
        Traceback (most recent call last):
        ...
        ValueError: logits holds NaN or infinity in row 0 (1 rows in all); clean the data or the network first
    """
    if not isinstance(features, Features):
        raise TypeError(
            f"expected salgp.Features, got {type(features).__name__}; build them with "
            f"salgp.extract or Features(logits, layers)"
        )
    if len(features) == 0 and not allow_empty:
        raise ValueError("no samples: the features are empty")
    if features.n_classes < 2:
        raise ValueError(
            f"logits must have at least 2 columns (classes), got {features.n_classes}; for a "
            f"binary network pass (n, 2) logits [0, z]"
        )
    hollow = [name for name, width in features.widths.items() if width == 0]
    if with_layers and hollow:
        raise ValueError(f"layer {hollow[0]!r} has no columns; leave it out: features.select([...])")
    if with_layers and not features.layers:
        raise ValueError(
            "this method reads hidden layers, but the features have none; extract them with "
            "salgp.extract(model, loader), or take a method that reads the scores only, such as temperature"
        )
    for name, x in features.layers.items() if with_layers else ():
        _refuse_huge(name, x)
    values = [features.logits, *(features.layers.values() if with_layers else ())]
    if len(features) <= FEW_ROWS and _all_finite(values):
        return
    _refuse_non_finite("logits", features.logits, features)
    for name, x in features.layers.items() if with_layers else ():
        _refuse_non_finite(f"layer {name!r}", x, features)


def check_reference(reference: Features, features: Features, with_layers: bool) -> Features:
    """The reference with the layers of the calibration samples only; refuses one that lacks any.

    A method that reads the logits alone does not mind which layers the reference has.
    """
    check_features(reference, with_layers)
    if reference.n_classes != features.n_classes:
        raise ValueError(
            f"the reference has scores of {reference.n_classes} classes, the calibration samples of "
            f"{features.n_classes}: is it the same network?"
        )
    if not with_layers:
        return reference
    known = {name: width for name, width in reference.widths.items() if name in features.layers}
    if known != features.widths:
        raise ValueError(
            f"reference layers {reference.widths} differ from the calibration layers {features.widths}"
        )
    return reference.select(features.layer_names)


def bounded_logits(features: Features) -> Features:
    """The same features, with logits near the limits of their type shifted to a largest one of 0 and cut.

    The softmax does not change, and no arithmetic on such logits overflows.

    Example:
        >>> bounded_logits(Features(torch.tensor([[3e38, -3e38]]))).logits
        tensor([[ 0.0000e+00, -1.0000e+18]])
    """
    z = features.logits
    if not z.numel() or _largest_size(z) <= LARGEST_LOGIT:
        return features
    return replace(features, logits=(z - z.amax(dim=1, keepdim=True)).clamp_min(-LARGEST_LOGIT))


def warn_of_data(
    features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None, zeros: bool = True
) -> None:
    """Warn of what ruins a calibration, one sentence for each.

    Args:
        features: original calibration samples, without perturbed copies.
        labels: ``(n,)`` their true classes.
        reference: training samples compared against and their classes, if any.
        zeros: do probabilities of exactly 0 matter to the method?

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_data(Features(torch.eye(2).repeat(40, 1)), torch.arange(80) // 2 % 2, None)
        >>> str(caught[0].message)[:35]
        'the logits look like probabilities:'
    """
    found = (
        _few(features),
        _no_errors(features, labels),
        misaligned(features, labels),
        _missing_classes(features, labels),
        _probabilities(features),
        _zeros(features, labels) if zeros else None,
        None if reference is None else _shared_rows(features, reference[0]),
        None if reference is None else misaligned_reference((features, labels), reference),
    )
    for sentence in found:
        if sentence is not None:
            warnings.warn(sentence, CalibrationWarning, stacklevel=3)


def _few(features: Features) -> str | None:
    n = len(features)
    if n >= FEW_SAMPLES:
        return None
    return f"few calibration samples ({n}): the result may be off by several points; give a few hundred"


def _no_errors(features: Features, labels: Tensor) -> str | None:
    known = labels >= 0
    if not bool(known.any()) or not bool(features.correct(labels)[known].all()):
        return None
    return (
        "no errors: every calibration sample is classified correctly, so nothing can be learned about "
        "errors; calibrate on data the network was not trained on, and on more of it"
    )


def _missing_classes(features: Features, labels: Tensor) -> str | None:
    count = torch.bincount(labels[labels >= 0], minlength=features.n_classes)
    missing = (count == 0).nonzero()[:, 0].tolist()
    n, c = int(count.sum()), features.n_classes
    by_chance = c * (1 - 1 / c) ** n  # so many of c equally frequent classes are missing among n samples
    if not missing or (n < PER_CLASS * c and len(missing) <= max(c / 2, MISSING * by_chance)):
        return None
    names = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return (
        f"no calibration samples of {len(missing)} of {features.n_classes} classes ({names}): confidences of "
        f"predictions that should be one of them are not calibrated"
    )


def _probabilities(features: Features) -> str | None:
    if not look_like_probabilities(features.logits[:LOOKED_AT]):
        return None
    return (
        "the logits look like probabilities: all lie in [0, 1] and every row sums to 1, or there is one "
        "column of them. They are used as logits, as announced; if the classifier ends in a softmax or "
        "sigmoid, say so: call them probs instead of logits, as an argument or in a file; of a network, "
        'output="probabilities", on the command line --output probabilities'
    )


def _zeros(features: Features, labels: Tensor) -> str | None:
    known = labels >= 0
    true = features.logits.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    n, zeros = int(known.sum()), int(((true == ZERO) & known).sum())
    if zeros <= ZEROS * n:
        return None
    return (
        f"the true class of {zeros} of {n} calibration samples has a probability of exactly 0: the "
        f"classifier tells few values apart (a tree, a small forest, few neighbours) or is far too sure. "
        f"Zeros count as the smallest probability it gives; if confidences matter more than the other "
        f'classes, method="isotonic" may suit it better, given a few hundred samples'
    )


def _shared_rows(features: Features, reference: Features) -> str | None:
    shared = rows_in(features.logits, reference.logits)
    if shared <= SHARED * len(features):
        return None
    return (
        f"{shared} of {len(features)} calibration samples are in the reference too: there they are their own "
        f"nearest neighbours, so confidences may come out too high; keep the two sets apart (equal rows of a "
        f"table with few values are harmless)"
    )


def rows_in(rows: Tensor, others: Tensor) -> int:
    """How many rows are found among others, bit for bit; most are told apart by their largest entry alone.

    Example:
        >>> rows_in(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
        1
    """
    ours, theirs = rows.amax(dim=1), others.to(rows).amax(dim=1)
    alike = rows[torch.isin(ours, theirs)].cpu()
    known = {row.tobytes() for row in others.to(rows)[torch.isin(theirs, ours)].cpu().contiguous().numpy()}
    return sum(row.tobytes() in known for row in alike.contiguous().numpy())


def _all_finite(values: list[Tensor]) -> bool:
    """Are few numbers finite for sure? Not where their sum overflows."""
    if all(map(plain_array, values)):  # beside a network that runs on one sample every step counts
        return math.isfinite(np.abs(np.concatenate([x.numpy() for x in values], axis=1)).max(initial=0.0))
    return math.isfinite(float(torch.cat(values, dim=1).sum()))


def _largest_size(z: Tensor) -> float:
    if len(z) <= FEW_ROWS and plain_array(z):
        return float(np.abs(z.numpy()).max())
    return max(abs(float(end)) for end in torch.aminmax(z))  # one pass, no copy


def _refuse_huge(name: str, x: Tensor) -> None:
    if x.dtype != torch.float64 or not x.numel():  # single precision ends long before
        return
    largest = float(x.abs().amax())
    if LARGEST_FEATURE < largest < math.inf:
        raise ValueError(
            f"layer {name!r} holds numbers of size {largest:.0e}, whose distances overflow; expected at most "
            f"{LARGEST_FEATURE:.0e}: scale the layer, or look for what has diverged in the network"
        )


def _refuse_non_finite(what: str, x: Tensor, features: Features) -> None:
    wrong = non_finite_rows(x)
    if not len(wrong):
        return
    rows, place = originals(features)
    samples = rows[place[wrong].unique()]
    first = int(samples[0])
    where = f"row {first}" if bool((wrong == first).any()) else f"a perturbed copy of row {first}"
    copies = "" if features.groups is None else ", perturbed copies not counted"
    raise ValueError(
        f"{what} holds NaN or infinity in {where} ({len(samples)} rows in all{copies}); clean the data "
        f"or the network first"
    )
