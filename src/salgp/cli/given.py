"""What the options of a command say of the user's network and data, made ready to read one with the other."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salgp.cli import files
from salgp.cli.inputs import Images, Inputs, open_inputs
from salgp.cli.networks import HUGGING_FACE, has_own_weights, import_object, open_network
from salgp.cli.shell import Shell, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.network.reader import Reader

__all__ = [
    "DataOptions",
    "check_numbering",
    "image_options",
    "layer_names",
    "metadata_of",
    "network_of",
    "note_guessing",
]


@dataclass(frozen=True)
class DataOptions:
    """How the data of one network are read; the same for every set.

    Args:
        model: as named on the command line.
        batch_size: samples per batch.
        inputs: arrays to pass.
        classes: class names.
        images: how images are read.
        scale: numbers are multiplied by it.
        prepare: the user's own preprocessing, by name.
    """

    model: str
    batch_size: int = 64
    inputs: str | None = None
    classes: str | None = None
    images: Images = field(default_factory=Images)
    scale: float | None = None
    prepare: str | None = None

    def open(self, path: Path, classes: list[str] | None = None) -> Inputs:
        """The data as batches; ``classes`` stand for those of the options, where there are none."""
        folder = Path(self.model.removeprefix(HUGGING_FACE)) if self.model.startswith(HUGGING_FACE) else None
        return open_inputs(
            path,
            batch_size=self.batch_size,
            inputs=files.split_names(self.inputs),
            classes=files.split_names(self.classes) or classes,
            images=self.images,
            scale=self.scale,
            by_name=folder is not None,
            tokenizer=folder,
            prepare=None if self.prepare is None else import_object(self.prepare, "--prepare"),
        )


def network_of(shell: Shell, model: str, weights: Path | None, device: str | None) -> nn.Module:
    """The user's network with its weights, where it is to run."""
    network = open_network(model, weights)
    if weights is None and not has_own_weights(model):
        shell.say("note: no --weights given; the network is used as the factory made it")
    return network if device is None else _sent_to(network, device)


def check_numbering(network: nn.Module, *sets: Inputs) -> None:
    """Refuse sub-folders as class numbers where the network has more or fewer outputs: some class has no
    folder, and those after it would get wrong numbers.
    """
    from salgp.network.reader import Reader
    from salgp.network.reading import read_batches

    for data in sets:
        if not data.numbered or data.classes is None:
            continue
        first = read_batches(network, itertools.islice(data, 1), Reader(layers=()), progress=False)
        outputs = next(first).features.n_classes
        if outputs != len(data.classes):
            raise ValueError(
                f"{len(data.classes)} sub-folders ({', '.join(data.classes[:5])}) for a network of {outputs} "
                f"classes: which is which? Name all classes in the order of its outputs: --classes A,B,..."
            )


def note_guessing(shell: Shell, features: Features, labels: Tensor | None) -> float | None:
    """The network's accuracy on the samples themselves; with a note where it is no better than a guess, which
    is what forgotten weights and wrong preprocessing look like.
    """
    from salgp.calibrators.copies import originals

    if labels is None or not len(features):
        return None
    rows = originals(features)[0]
    n, chance = len(rows), 1 / features.n_classes
    accuracy = float(features[rows].correct(labels[rows]).double().mean())
    if accuracy <= chance + 2 * (chance * (1 - chance) / n) ** 0.5:
        shell.say(
            f"note: the network is right on {accuracy:.0%} of these samples, no more than a guess among "
            f"{features.n_classes:,} classes; are these its weights, and the inputs it was trained on "
            f"(--weights, --scale, --image-mean, --prepare)?"
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
    return [int(name) if name.lstrip("-").isdecimal() else name for name in files.split_names(text) or []]


def image_options(model: str, size: str | None, gray: bool, mean: str | None, std: str | None) -> Images:
    """The options given, and for a Hugging Face folder what its ``preprocessor_config.json`` says."""
    stored: dict[str, Any] = {}
    path = Path(model.removeprefix(HUGGING_FACE)) / "preprocessor_config.json"
    if model.startswith(HUGGING_FACE) and path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
    known = stored.get("size", {})
    default = (
        (int(known["height"]), int(known["width"])) if isinstance(known, dict) and "height" in known else None
    )
    sides = _floats("--image-size", size)
    return Images(
        default if sides is None else (int(sides[0]), int(sides[-1])),
        gray,
        _floats("--image-mean", mean) or stored.get("image_mean") or (0.0,),
        _floats("--image-std", std) or stored.get("image_std") or (1.0,),
    )


def metadata_of(network: nn.Module, reader: Reader, classes: list[str] | None) -> dict[str, str]:
    """What a features file says of its network: enough to put network and calibrator together again."""
    import salgp
    from salgp.network.keeping import FORMAT, FORMAT_VERSION, module_header

    header = module_header(network, reader)
    stated = {"format": FORMAT, "format_version": FORMAT_VERSION}
    known = header["fingerprint"]
    kept = {
        "network": known["weights"],
        "network_structure": known["structure"],
        "salgp": salgp.__version__,
        "module": json.dumps(stated | header),
    }
    return kept | ({} if classes is None else {"classes": json.dumps(classes)})


def _sent_to(network: nn.Module, device: str) -> nn.Module:
    try:
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch that was built without it
        raise UsageError(
            f"--device {device}: not available here ({str(error).splitlines()[0][:120]})"
        ) from error


def _floats(option: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected numbers separated by commas") from error
