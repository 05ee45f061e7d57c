"""Checks of calibration data: errors for what cannot be used, warnings for what makes a calibration wrong.

`check_features` refuses features that no method can work with. `warn_of_data` says, in one sentence each,
what makes a fit worth little though it succeeds: too few samples, no errors, labels of other samples, missing
classes, probabilities given as logits or of exactly 0, rows that are also in the reference. Both are called
by `Calibrator.fit`, so that every method warns alike.

Do labels belong to the samples beside them? Labels of other samples, or of classes in another order, do
not, and no calibration survives them.

They are told by comparing the network with itself: how often would it be right if the labels were shuffled?
With predicted classes counted ``a_k`` and true ones ``b_k``, the number of hits under a random order of the
``n`` labels has mean ``S / n`` and variance ``(S - sum a b^2 / n - sum a^2 b / n + (S / n)^2) / (n - 1)``
with ``S = sum a b``. A weak network is a little better than that, or does not claim to be much better.

Probabilities of exactly 0: what a calibrator takes in their place.

A forest of 20 trees gives no class a probability between 0 and .05, five neighbours none between 0 and .2, a
file of three digits none below .001, a sigmoid in single precision none above ``1 - 6e-8`` but 1. Their 0
says "less than I can tell", not "never". Its logarithm has no finite value, and any very negative one would
let a single sample whose true class got a 0 decide the whole fit.

So the calibration samples tell how small a probability the classifier can give, the smallest positive one,
and all zeros of a sample together count at most as much: a class of probability 0 gets

    log(r_k / c),   r_k = min(smallest p_k, max(smallest p, 2^-24)),

with the smallest positive ``p`` of the class ``k`` and of all classes. Positive probabilities stay as they
are, however small. The values do not depend on the type of the numbers, and are kept for `predict`. Where no
calibration sample had a zero, ``r_k = 2^-24``.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.features import Features
from salgp.logits import ZERO, at_class, look_like_probabilities, non_finite_rows, tell_nothing

__all__ = ["CalibrationWarning", "SHARED", "bounded_logits", "floor_zeros", "misaligned", "rows_in"]

FEW_SAMPLES = 50
"""Fewer calibration samples than this are worth a warning."""

PER_CLASS = 10
"""With this many samples for each class on average, a class without any is worth a warning; with fewer, more
than half of the classes are.
"""

LARGEST_LOGIT = 1e18
"""Logits of larger size are shifted and cut: their squares would overflow in single precision."""

LARGEST_NUMBER = torch.finfo(torch.float64).max

LARGEST_FEATURE = 1e75
"""Largest number a layer may hold: squared distances between larger ones overflow in double precision."""

LOOKED_AT = 1000
"""Rows looked at to tell probabilities from logits, and about how many to read the mean confidence from."""

ZEROS = 0.05
"""Share of samples whose true class has a probability of exactly 0 that is worth a warning."""

SHARED = 0.01
"""Share of calibration rows found in the reference that is worth a warning."""


Labelled = tuple[Features, Tensor]
"""Samples and their classes."""


class CalibrationWarning(UserWarning):
    """The fit worked, but the data left something undetermined: an optimum at a bound, no usable label, no
    convergence, too few samples.
    """


def check_features(features: Features, with_layers: bool, allow_empty: bool = False) -> float:
    """The size of the largest logit; refuses features no calibrator can work with, naming layer and row.

    Rows are those of the original samples: an augmented sample counts with its original.

    Example:
        >>> check_features(Features(torch.tensor([[0.0, torch.nan]])), with_layers=False)
        Traceback (most recent call last):
        ...
        ValueError: logits holds NaN or infinity in row 0 (1 rows in all); clean the data or the network first
    """
    if not isinstance(features, Features):
        advice = "build them with salgp.extract or Features(logits, layers)"
        raise TypeError(f"expected salgp.Features, got {type(features).__name__}; {advice}")
    n, n_classes = features.logits.shape
    if n == 0 and not allow_empty:
        raise ValueError("no samples: the features are empty")
    if n_classes < 2:
        advice = "for a binary network pass (n, 2) logits [0, z]"
        raise ValueError(f"logits must have at least 2 columns (classes), got {n_classes}; {advice}")
    layers = features.layers if with_layers else {}
    if with_layers and not (layers and all(x.shape[1] for x in layers.values())):
        _refuse_widths(features.widths)
    largest, *sizes = largest_sizes([features.logits, *layers.values()])
    if not largest <= LARGEST_NUMBER:  # NaN is not
        _refuse_numbers("logits", features.logits, largest, features, LARGEST_NUMBER)
    for (name, x), size in zip(layers.items(), sizes, strict=True):
        if not size <= LARGEST_FEATURE:
            _refuse_numbers(f"layer {name!r}", x, size, features, LARGEST_FEATURE)
    return largest


def _refuse_widths(widths: Mapping[str, int]) -> None:
    """Refuse features without layers, and layers without columns."""
    for name, width in widths.items():
        if width == 0:
            raise ValueError(f"layer {name!r} has no columns; leave it out: features.select([...])")
    if not widths:
        other = "take a method that reads the scores only, such as temperature"
        advice = f"extract them with salgp.extract(model, loader), or {other}"
        raise ValueError(f"this method reads hidden layers, but the features have none; {advice}")


def check_reference(reference: Features, features: Features, with_layers: bool) -> Features:
    """The reference with the layers of the calibration samples only; refuses one that lacks any.

    A method that reads the logits alone does not mind which layers the reference has.
    """
    check_features(reference, with_layers)
    if reference.n_classes != features.n_classes:
        both = f"{reference.n_classes} classes, the calibration samples of {features.n_classes}"
        raise ValueError(f"the reference has scores of {both}: is it the same network?")
    if not with_layers:
        return reference
    theirs, ours = reference.widths, features.widths
    if not ours.items() <= theirs.items():
        raise ValueError(f"reference layers {theirs} differ from the calibration layers {ours}")
    return reference.select(features.layer_names)


def bounded_logits(features: Features) -> Features:
    """The same features, with logits near the limits of their type shifted to a largest one of 0 and cut.

    The softmax does not change, and no arithmetic on such logits overflows.

    Example:
        >>> bounded_logits(Features(torch.tensor([[3e38, -3e38]]))).logits
        tensor([[ 0.0000e+00, -1.0000e+18]])
    """
    z = features.logits
    if largest_sizes([z])[0] <= LARGEST_LOGIT:
        return features
    shifted = z - z.amax(dim=1, keepdim=True)
    return replace(features, logits=shifted.clamp_min(-LARGEST_LOGIT))


def warn_of_data(features: Features, labels: Tensor, reference: Labelled | None, zeros: bool = True) -> None:
    """Warn of what ruins a calibration, one sentence for each.

    Args:
        features: original calibration samples, without augmented ones.
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
    given = features, labels
    found = [_few(features), _no_errors(*given), misaligned(*given), _missing_classes(*given)]
    found.append(_probabilities(features))
    found.append(_zeros(*given) if zeros else None)
    if reference is not None:
        found += _shared_rows(features, reference[0]), misaligned_reference(given, reference)
    for sentence in filter(None, found):
        warnings.warn(sentence, CalibrationWarning, stacklevel=3)


def _few(features: Features) -> str | None:
    n = len(features)
    if n >= FEW_SAMPLES:
        return None
    return f"few calibration samples ({n}): the result may be off by several points; give a few hundred"


def _no_errors(features: Features, labels: Tensor) -> str | None:
    known = labels >= 0
    if not known.any() or not features.correct(labels)[known].all():
        return None
    found = "every calibration sample is classified correctly, so nothing can be learned about errors"
    return f"no errors: {found}; calibrate on data the network was not trained on, and on more of it"


def _missing_classes(features: Features, labels: Tensor) -> str | None:
    count = torch.bincount(labels[labels >= 0], minlength=features.n_classes)
    missing = (count == 0).nonzero()[:, 0].tolist()
    n, c = int(count.sum()), len(count)
    if not missing or (n < PER_CLASS * c and len(missing) <= c / 2):
        return None
    more = ["..."] if len(missing) > 5 else []
    names = [*map(str, missing[:5]), *more]
    why = "confidences of predictions that should be one of them are not calibrated"
    return f"no calibration samples of {len(missing)} of {c} classes ({', '.join(names)}): {why}"


def _probabilities(features: Features) -> str | None:
    kind = look_like_probabilities(features.logits[:LOOKED_AT])
    if kind is None:
        return None
    arrays = "call them probs" if kind == "probabilities" else "pass log(p / (1 - p))"
    found = f"the logits look like {kind}: all lie in [0, 1]. They are used as logits, as announced"
    network = f'of a network, output="{kind}", on the command line --output {kind}'
    advice = f"{arrays} instead of logits, as an argument or in a file; {network}"
    return f"{found}; if the classifier ends in a softmax or sigmoid, say so: {advice}"


def _zeros(features: Features, labels: Tensor) -> str | None:
    known = labels >= 0
    true = at_class(features.logits, labels.clamp_min(0))
    n = int(known.sum())
    zeros = int(((true == ZERO) & known).sum())
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
    why = "there they are their own nearest neighbours, so confidences may come out too high"
    advice = "keep the two sets apart (equal rows of a table with few values are harmless)"
    return f"{shared} of {len(features)} calibration samples are in the reference too: {why}; {advice}"


def rows_in(rows: Tensor, others: Tensor) -> int:
    """How many rows are found among others, bit for bit; most are told apart by their largest entry alone.

    Example:
        >>> rows_in(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
        1
    """
    others = others.to(rows)
    ours, theirs = rows.amax(1), others.amax(1)
    known = set(_row_bytes(others[torch.isin(theirs, ours)]))
    return sum(row in known for row in _row_bytes(rows[torch.isin(ours, theirs)]))


def _row_bytes(rows: Tensor) -> Iterator[bytes]:
    return (row.tobytes() for row in rows.cpu().contiguous().numpy())


def largest_sizes(tensors: Sequence[Tensor]) -> list[float]:
    """Size of the largest number of each tensor, without a copy; NaN where there is one.

    Example:
        >>> largest_sizes([torch.tensor([1.0, -3.0]), torch.zeros(0, 2)])
        [3.0, 0.0]
    """
    if not all(x.numel() for x in tensors):
        return [largest_sizes([x])[0] if x.numel() else 0.0 for x in tensors]
    norms = torch._foreach_norm(list(tensors), torch.inf)
    return torch.stack(norms).cpu().tolist()


def _refuse_numbers(what: str, x: Tensor, largest: float, features: Features, limit: float) -> None:
    """Refuse NaN, infinity and numbers above the limit."""
    if largest < math.inf:
        size = f"{largest:.0e}, whose distances overflow; expected at most {limit:.0e}"
        advice = "scale the layer, or look for what has diverged in the network"
        raise ValueError(f"{what} holds numbers of size {size}: {advice}")
    wrong = non_finite_rows(x)
    rows, place = features.originals
    samples = rows[place[wrong].unique()]
    first = int(samples[0])
    where = f"row {first}" if first in wrong else f"an augmented sample of row {first}"
    note = "" if features.groups is None else ", augmented samples not counted"
    found = f"NaN or infinity in {where} ({len(samples)} rows in all{note})"
    raise ValueError(f"{what} holds {found}; clean the data or the network first")


CLAIMED = 0.1
"""Labels at the level of a guess raise a warning where the confidences exceed the accuracy by this."""
SURE = 5.0
"""Standard deviations that are no accident."""
ENOUGH = 50
"""Fewer samples cannot tell a network at the level of a guess from a weak one."""
NEVER = 1e-4
"""Chance of no hit at all by shuffled labels below which none is suspicious."""


def refuse_signs(labels: Tensor, n_classes: int) -> None:
    """Refuse labels -1 and 1 of two classes: -1 is a class the network does not know, class 0 is 0.

    Example:
        >>> refuse_signs(torch.tensor([-1, 1, 1, -1]), 2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: labels are -1 and 1; two classes are numbered 0 and 1 ...
    """
    minus, zero, plus = (int((labels == value).sum()) for value in (-1, 0, 1))
    if n_classes == 2 and zero == 0 and min(minus, plus) >= 2:
        expected = "two classes are numbered 0 and 1 (-1 is an unknown class)"
        raise ValueError(f"labels are -1 and 1; {expected}: pass (labels + 1) // 2")


@dataclass(frozen=True)
class _Hits:
    """Correct samples ``hits`` of ``n``, and mean and standard deviation of their number under shuffled
    labels.
    """

    n: int
    hits: int
    mean: float
    sd: float

    @property
    def skill(self) -> float:
        """Accuracy beyond that of shuffled labels."""
        return (self.hits - self.mean) / self.n


def misaligned(features: Features, labels: Tensor) -> str | None:
    """A sentence where the labels cannot be those of the samples.

    Args:
        features: ``n`` original samples.
        labels: ``(n,)`` their classes; -1 is left out.

    Example:
        >>> z = 5 * torch.nn.functional.one_hot(torch.arange(90) % 3).float()
        >>> misaligned(Features(z), (torch.arange(90) + 1) % 3)[:41]
        'no calibration sample is classified corre'
    """
    known = labels >= 0
    if not known.any():
        advice = "number the classes from 0, in the order of the network's outputs"
        return f"no calibration sample has a known class: all labels are -1; {advice}"
    found = _hits(features, labels)
    ask = "are the labels in the order of the network's classes, and aligned with the samples?"
    if found.hits == 0 and (1 - found.mean / found.n) ** found.n < NEVER:
        return f"no calibration sample is classified correctly: {ask}"
    if found.n < ENOUGH or found.sd == 0 or found.hits > found.mean + 2 * found.sd:
        return None
    accuracy = found.hits / found.n
    looked_at = known.nonzero()[:: 1 + found.n // LOOKED_AT, 0]
    s = features[looked_at].confidence.double()
    claimed = float(s.mean())
    variance = float((s * (1 - s)).mean())
    sd = (variance / found.n) ** 0.5
    if claimed < accuracy + max(CLAIMED, SURE * sd):
        return None
    right = f"the network is right on {accuracy:.0%} of the calibration samples"
    least = f"no more than if their labels were shuffled ({found.mean / found.n:.0%})"
    return f"{right}, {least}, and claims {claimed:.0%}: {ask}"


def misaligned_reference(calibration: Labelled, reference: Labelled) -> str | None:
    """A sentence where the network is far worse on the reference than on the calibration samples, though it
    was trained on it; references without class scores are not checked.
    """
    if tell_nothing(reference[0].logits):
        return None
    here, there = _hits(*calibration), _hits(*reference)
    if min(here.n, there.n) == 0 or there.skill > here.skill / 2:
        return None
    accuracy, lower = here.hits / here.n, there.hits / there.n
    noise = SURE * (accuracy * (1 - accuracy) * (1 / here.n + 1 / there.n)) ** 0.5
    if lower > accuracy - max(noise, CLAIMED):
        return None
    there_right = f"{lower:.0%} of the reference samples, and on {accuracy:.0%} of the calibration samples"
    ask = (
        "are the labels of the reference in the order of the network's classes, and aligned with its samples?"
    )
    return f"the network is right on {there_right}, though it was trained on the reference: {ask}"


def _hits(features: Features, labels: Tensor) -> _Hits:
    known = labels >= 0
    true, predicted = labels[known], features.label[known]
    c = features.n_classes
    b, a = (torch.bincount(x, minlength=c).double() for x in (true, predicted))
    n = len(true)
    both = float((a * b).sum())
    three = float((a * b * (a + b)).sum())
    mean = both / max(n, 1)
    variance = max(both - three / max(n, 1) + mean**2, 0.0) / max(n - 1, 1)
    return _Hits(n, int((true == predicted).sum()), mean, variance**0.5)


SINGLE = -24 * math.log(2)
"""Logarithm of half the step of single precision below 1: a class whose own probabilities are never small
is not taken to be resolved more finely."""


def learn_zero_logits(logits: Tensor) -> Tensor | None:
    """Logits ``(c,)`` in place of a probability of 0, class by class; None where there is no such.

    Args:
        logits: ``(n, c)`` of the calibration samples; logarithms of probabilities where there are zeros.

    Example:
        >>> learn_zero_logits(torch.tensor([[0.8, 0.2], [1.0, 0.0]]).log().clamp_min(ZERO)).exp()
        tensor([0.1000, 0.1000], dtype=torch.float64)
    """
    if not _has_zeros(logits):
        return None
    own = logits.where(logits != ZERO, torch.inf).amin(dim=0).double()
    least = own.amin().clamp_min(SINGLE)
    return torch.minimum(own, least) - math.log(len(own))


def floor_zeros(features: Features, zeros: Tensor | None) -> Features:
    """The same features, with what `learn_zero_logits` found in place of `ZERO`.

    Example:
        >>> f = Features(torch.tensor([[0.0, ZERO]]))
        >>> floor_zeros(f, torch.tensor([-3.0, -2.0])).logits
        tensor([[ 0., -2.]])
    """
    # an exported graph looks at every sample, and at logarithms of others
    z, exporting = features.logits, torch.compiler.is_compiling()
    if not exporting and not _has_zeros(z):
        return features
    zero = z == ZERO
    if exporting:
        zero = zero | (z == -torch.inf)
    small = SINGLE - math.log(z.shape[1]) if zeros is None else zeros.to(z)
    return replace(features, logits=torch.where(zero, small, z))


def _has_zeros(z: Tensor) -> bool:
    """One pass without a copy where there are none, as mostly."""
    return len(z) > 0 and bool(z.amin() <= ZERO) and bool((z == ZERO).any())
