"""What the options of a command say of the user's network and data, made ready to read one with the other."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli.console import Console, UsageError
from salgp.cli.networks import HUGGING_FACE, has_own_weights, import_object, open_network, open_tokenizer
from salgp.cli.options import split_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.io.images import ImageOptions
    from salgp.io.loader import FileLoader
    from salgp.network.reader import Reader

__all__ = [
    "DataOptions",
    "check_numbering",
    "layer_names",
    "metadata_of",
    "network_of",
    "note_guessing",
    "note_shared_samples",
    "open_sets",
]

IMAGENET = "0.485,0.456,0.406:0.229,0.224,0.225"


@dataclass(frozen=True)
class DataOptions:
    """How the data of one network are read; the same for every set. The fields are options as typed."""

    model: str
    batch_size: int = 64
    inputs: str | None = None
    classes: str | None = None
    scale: float | None = None
    prepare: str | None = None
    image_size: str | None = None
    gray: bool = False
    normalize: str | None = None

    def open(self, path: Path, classes: list[str] | None = None, labels: bool = True) -> FileLoader:
        """The data as batches; ``classes`` stand for those of the options, where there are none."""
        from salgp.io.loader import open_data

        hugging_face = self.model.startswith(HUGGING_FACE)
        return open_data(
            path,
            batch_size=self.batch_size,
            inputs=split_names(self.inputs),
            classes=split_names(self.classes) or classes,
            images=self.images(),
            scale=self.scale,
            by_name=hugging_face,
            tokenizer=open_tokenizer(self.model) if hugging_face else None,
            labels=labels,
            prepare=None if self.prepare is None else import_object(self.prepare, "--prepare"),
        )

    def images(self) -> ImageOptions:
        """The options given, and for a Hugging Face folder what its ``preprocessor_config.json`` says."""
        from salgp.io.images import ImageOptions

        stored: dict[str, Any] = {}
        path = Path(self.model.removeprefix(HUGGING_FACE)) / "preprocessor_config.json"
        if self.model.startswith(HUGGING_FACE) and path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
        known = stored.get("size", {})
        has_size = isinstance(known, dict) and "height" in known
        size = (int(known["height"]), int(known["width"])) if has_size else None
        if self.image_size is not None:
            sides = _numbers("--image-size", self.image_size)
            size = (int(sides[0]), int(sides[-1]))
        mean, std = stored.get("image_mean") or (0.0,), stored.get("image_std") or (1.0,)
        if self.normalize is not None:
            text = IMAGENET if self.normalize == "imagenet" else self.normalize
            first, _, second = text.partition(":")
            mean, std = _numbers("--normalize", first), _numbers("--normalize", second)
        return ImageOptions(size, self.gray, mean, std)


def open_sets(data: DataOptions, paths: Mapping[str, Path | None]) -> dict[str, FileLoader]:
    """Labelled data by the names of their options, all with the same columns and class numbers."""
    from salgp.labels import LABEL_KEYS

    sets = _same_classes(data, {name: path for name, path in paths.items() if path is not None})
    for name, found in sets.items():
        if found.labels is None:
            raise ValueError(f"--{name}: no labels there; name them {' or '.join(map(repr, LABEL_KEYS))}")
    first, *others = sets
    for name in others:
        mine, theirs = sets[first].columns, sets[name].columns
        if mine != theirs:
            raise ValueError(
                f"--{name}: the columns of --inputs ({', '.join(theirs[:3])}, ...) are not those of "
                f"--{first} ({', '.join(mine[:3])}, ...) in the same order; the network takes them by place"
            )
    return sets


def _same_classes(data: DataOptions, paths: Mapping[str, Path]) -> dict[str, FileLoader]:
    """The sets, all with the same class numbers: where sub-folders give these, one set must have them all."""
    sets = {name: data.open(path) for name, path in paths.items()}
    numbered = {name: found.classes or [] for name, found in sets.items() if found.numbered}
    if not numbered:
        return sets
    widest = max(numbered, key=lambda name: len(numbered[name]))
    for name, classes in numbered.items():
        missing = [each for each in classes if each not in numbered[widest]]
        if missing:
            raise ValueError(
                f"--{name} has a sub-folder {missing[0]!r} that --{widest} has not, so that neither shows "
                f"all classes; name all in the order of the network's outputs: --classes A,B,..."
            )
    again = {name: data.open(paths[name], numbered[widest]) for name in numbered}
    return sets | {name: replace(found, numbered=True) for name, found in again.items()}


def note_shared_samples(console: Console, sets: Mapping[str, FileLoader]) -> None:
    """Say that test samples are among those that a calibrator learns from: scores on them are too good."""
    from salgp.calibrators.checks import SHARED

    if "test" not in sets:
        return
    tested = _digests(sets["test"])
    for name in (name for name in sets if name != "test"):
        known = set(_digests(sets[name]))
        shared = sum(digest in known for digest in tested)
        if shared > SHARED * len(tested):
            console.say(
                f"note: {shared:,} of {len(tested):,} samples of --test are in --{name} too: scores on them "
                f"are too good; keep the sets apart (where a table has few values, equal rows are harmless)"
            )


def _digests(data: FileLoader) -> list[bytes]:
    """One digest per sample, of its inputs without zeros at the end: padding does not count."""
    found = []
    for start in range(0, data.n, data.batch_size):
        inputs = data.take(slice(start, min(start + data.batch_size, data.n)))
        columns = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        for row in zip(*columns, strict=True):
            parts = (x.contiguous().numpy().tobytes().rstrip(b"\0") for x in row)
            found.append(hashlib.sha256(b"|".join(parts)).digest())
    return found


def network_of(console: Console, model: str, weights: Path | None, device: str | None = None) -> nn.Module:
    """The user's network with its weights, where it is to run."""
    network = open_network(model, weights)
    if weights is None and not has_own_weights(model):
        console.say("note: no --weights given; the network is used as the factory made it")
    if device is None:
        return network
    try:
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch that was built without it
        raise UsageError(
            f"--device {device}: not available here ({str(error).splitlines()[0][:120]})"
        ) from error


def check_numbering(network: nn.Module, *sets: FileLoader) -> None:
    """Refuse sub-folders as class numbers where the network has more or fewer outputs: some class has no
    folder, and those after it would get wrong numbers.
    """
    from salgp import Reader, extract

    for data in sets:
        if not data.numbered or data.classes is None:
            continue
        reader = Reader(layers=(), output="logits")  # whatever they are, they are counted
        features, _ = extract(network, itertools.islice(data, 1), reader=reader, progress=False)
        if features.n_classes != len(data.classes):
            raise ValueError(
                f"{len(data.classes)} sub-folders ({', '.join(data.classes[:5])}) for a network of "
                f"{features.n_classes} classes: which is which? Name all classes in the order of its "
                f"outputs: --classes A,B,..."
            )


def note_guessing(console: Console, features: Features, labels: Tensor | None) -> float | None:
    """The network's accuracy on the samples themselves; with a note where it is no better than a guess, which
    is what forgotten weights and wrong preprocessing look like.
    """
    from salgp.calibrators.rows import originals

    if labels is None or not len(features):
        return None
    rows = originals(features)[0]
    n, chance = len(rows), 1 / features.n_classes
    accuracy = float(features[rows].correct(labels[rows]).double().mean())
    if accuracy <= chance + 2 * (chance * (1 - chance) / n) ** 0.5:
        console.say(
            f"note: the network is right on {accuracy:.0%} of these samples, no more than a guess among "
            f"{features.n_classes:,} classes; are these its weights, and the inputs it was trained on "
            f"(--weights, --scale, --normalize, --prepare)?"
        )
    return accuracy


def layer_names(text: str) -> Any:
    """``auto``, or names and positions.

    Example:
        >>> layer_names("conv1,-1")
        ['conv1', -1]
    """
    if text == "auto":
        return "auto"
    return [int(name) if name.lstrip("-").isdecimal() else name for name in split_names(text) or []]


def metadata_of(network: nn.Module, reader: Reader, classes: list[str] | None) -> dict[str, str]:
    """What a features file says of its network: enough to put network and calibrator together again."""
    import salgp
    from salgp.network.reader import FORMAT, FORMAT_VERSION, module_header

    header = module_header(network, reader)
    kept = {
        "network": header["fingerprint"]["weights"],
        "output": reader.output or "logits",
        "salgp": salgp.__version__,
        "module": json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION} | header),
    }
    return kept | ({} if classes is None else {"classes": json.dumps(classes)})


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected numbers separated by commas") from error
