"""Perturbed copies of calibration data: rehearsing shift before it happens.

A `Family` disturbs a batch with a strength of its own for each sample. Input families change what the network
sees; layer families change the output of a randomly chosen tapped layer while the network runs, and so work
for any input, tokens included. How strong is strong depends on data and network, so the scale of each family
is found by trying: it grows until the network has lost most of what it knows, or to the family's own bound;
samples then get strengths uniform between nothing and that scale. Originals always stay, and copies share
their original's group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from salgp.network.taps import Tap, unwrap

__all__ = ["FAMILIES", "KINDS", "Family", "disturbed", "families_for", "kind_of"]

Disturbance = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""``disturb(x, strength, generator) -> x`` with ``x`` ``(n, ...)`` and ``strength`` ``(n,)``."""


@dataclass(frozen=True)
class Family:
    """One kind of perturbation.

    Args:
        name: of the family.
        disturb: the perturbation; strength 0 leaves a sample as it is.
        largest: strength beyond which it is not scaled up.
        inside: does it act on the output of a layer, and not on the input?

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> FAMILIES["noise"](torch.arange(4.0)[:, None], torch.tensor([0.0, 0.0, 1.0, 1.0]), g)[:2, 0]
        tensor([0., 1.])
    """

    name: str
    disturb: Disturbance
    largest: float = 4.0
    inside: bool = False

    def __call__(self, x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
        return self.disturb(x, strength.to(x), generator)


def families_for(choice: str | Sequence[str | Family], x: Tensor | None = None) -> tuple[Family, ...]:
    """The families meant by ``choice``: ``"auto"`` (by the kind of input), a kind out of `KINDS`, or names
    and families.

    Example:
        >>> [f.name for f in families_for("auto", torch.zeros(2, 7))]
        ['noise', 'gain', 'mixup', 'layer-noise']
        >>> [f.name for f in families_for(["blur", FAMILIES["noise"]])]
        ['blur', 'noise']
    """
    if isinstance(choice, str):
        kind = kind_of(x) if choice == "auto" else choice
        if kind not in KINDS:
            raise ValueError(
                f"perturb must be 'auto', one of {', '.join(KINDS)}, or a list of families; got {choice!r}"
            )
        return tuple(FAMILIES[name] for name in KINDS[kind])
    unknown = [f for f in choice if isinstance(f, str) and f not in FAMILIES]
    if unknown:
        raise KeyError(f"no family of perturbations called {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    return tuple(f if isinstance(f, Family) else FAMILIES[f] for f in choice)


def kind_of(x: Tensor | None) -> str:
    """Kind of input by its axes: images (4), sequences (3), tabular (2), or tokens where it is not floating
    point.

    Example:
        >>> kind_of(torch.zeros(2, 1, 8, 8)), kind_of(torch.zeros(2, 8, dtype=torch.long))
        ('images', 'tokens')
    """
    if x is None or not x.is_floating_point():
        return "tokens"
    return {4: "images", 3: "sequences", 2: "tabular"}.get(x.ndim, "tokens")


@contextmanager
def disturbed(
    model: nn.Module,
    taps: Sequence[Tap],
    family: Family,
    layer: Tensor,
    strength: Tensor,
    generator: torch.Generator,
) -> Iterator[None]:
    """While open, sample ``i`` has the output of tapped layer ``layer[i]`` disturbed with ``strength[i]``.

    Args:
        model: the network; its hooks are as before on leaving.
        taps: its tapped layers.
        family: a layer family.
        layer: ``(n,)`` position in ``taps``.
        strength: ``(n,)``.
        generator: of the perturbation.
    """
    network, handles = unwrap(model), []
    try:
        for j, tap in enumerate(taps):
            module = network.get_submodule(tap.module)
            handles.append(
                module.register_forward_hook(
                    _disturber(family, layer == j, strength, generator, tap.layout.batch_axis)
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _disturber(
    family: Family, chosen: Tensor, strength: Tensor, generator: torch.Generator, axis: int
) -> Callable[..., Any]:
    def change(h: Tensor) -> Tensor:
        first = h.transpose(0, axis) if h.ndim > axis else h
        if not h.is_floating_point() or len(first) != len(chosen) or not bool(chosen.any()):
            return h
        rows = chosen.to(h.device)
        new = first.clone()
        new[rows] = family(first, strength, generator)[rows]
        return new.transpose(0, axis) if h.ndim > axis else new

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        if type(output) is tuple and output and isinstance(output[0], Tensor):
            return (change(output[0]), *output[1:])
        return None

    return hook


def _per(strength: Tensor, x: Tensor) -> Tensor:
    return strength.reshape(-1, *[1] * (x.ndim - 1))


def _normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=generator.device).to(x)


def _uniform(n: int | tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device).to(x)


def _noise(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Independent noise, in units of the data's standard deviation."""
    return x + _per(strength, x) * x.std() * _normal(x, generator)


def _gain(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast and brightness: deviations from the sample's mean are scaled, and the mean is moved."""
    mean = x.flatten(1).mean(dim=1)
    factor = torch.exp(1.8 * strength * (2 * _uniform(len(x), x, generator) - 1))
    moved = mean + 0.7 * strength * x.std() * _normal(mean, generator)
    return (x - _per(mean, x)) * _per(factor, x) + _per(moved, x)


def _affine(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Rotation (up to 1 rad), scale (up to e^0.5), shear and translation of images."""
    r = (2 * _uniform((len(x), 5), x, generator) - 1) * strength[:, None]
    scale, cos, sin = torch.exp(0.5 * r[:, 1]), torch.cos(r[:, 0]), torch.sin(r[:, 0])
    rows = [scale * cos, 0.5 * r[:, 2] - scale * sin, 0.3 * r[:, 3], scale * sin, scale * cos, 0.3 * r[:, 4]]
    grid = affine_grid(torch.stack(rows, dim=1).reshape(-1, 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="border", align_corners=False)


def _mixup(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Another sample of the batch mixed in, up to one half."""
    share = _per(0.5 * strength.clamp(0, 1), x)
    other = torch.randperm(len(x), generator=generator, device=generator.device).to(x.device)
    return (1 - share) * x + share * x[other]


def _blur(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian blur of images; strength 1 is a standard deviation of an eighth of their width."""
    n, c, h, w = x.shape
    reach = max(1, math.ceil(0.3 * w))
    t = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (t / (strength[:, None] * w / 8).clamp_min(1e-3)).square())
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(c, 0)
    y = pad(x.reshape(1, n * c, h, w), (reach, reach, reach, reach), mode="replicate")
    y = conv2d(y, kernel[:, None, None, :], groups=n * c)
    return conv2d(y, kernel[:, None, :, None], groups=n * c).reshape(x.shape)


def _speckle(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Multiplicative log-normal noise of mean 1, as of coherent radar; measured from the smallest value."""
    s, low = _per(strength, x), x.amin()
    return low + (x - low) * torch.exp(s * _normal(x, generator) - 0.5 * s.square())


def _channel_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """One normal number per sample and channel, ready to broadcast: channels are last in sequences, else
    second.
    """
    shape = (len(x), 1, x.shape[2]) if x.ndim == 3 else (*x.shape[:2], *[1] * (x.ndim - 2))
    return torch.randn(shape, generator=generator, device=generator.device).to(x)


def _channel_gain(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Every channel (feature) multiplied by a log-normal factor of its own."""
    return x * torch.exp(_per(strength, x) * _channel_noise(x, generator))


def _time_warp(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Steps of a sequence ``(n, T, d)`` repeated or skipped: the n-th step shown is step ``n * rate``, rate
    in e^-1..e^1.
    """
    rate = torch.exp((2 * _uniform(len(x), x, generator) - 1) * strength)
    step = (
        (torch.arange(x.shape[1], device=x.device) * rate[:, None]).round().long().clamp(max=x.shape[1] - 1)
    )
    return x.gather(1, step[:, :, None].expand_as(x))


def _flux_noise(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Noise added to the fluxes of light curves, in units of their errors, which grow to match."""
    flux, error = x[..., 1].sinh(), x[..., 2].sinh()
    extra = _per(4 * strength, flux)
    flux = flux + extra * error * _normal(flux, generator)
    return _with_flux(x, flux, error * (1 + extra.square()).sqrt())


def _dimming(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """The same object further away: signal falls by up to e^-2 per unit of strength, errors stay; then
    rescaled as the loader does.
    """
    flux, error = x[..., 1].sinh(), x[..., 2].sinh()
    fading = _per(torch.exp(-2 * strength * _uniform(len(x), x, generator)), flux)
    flux = fading * flux + (1 - fading.square()).clamp_min(0).sqrt() * error * _normal(flux, generator)
    top = ((flux.abs() - error) * x[..., 3]).flatten(1).amax(dim=1).clamp_min(1e-3)
    return _with_flux(x, flux / _per(top, flux), error / _per(top, error))


def _with_flux(x: Tensor, flux: Tensor, error: Tensor) -> Tensor:
    seen = x[..., 3]
    return torch.stack([x[..., 0], flux.asinh() * seen, error.asinh() * seen, seen], dim=-1)


def _epoch_drop(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Observations lost, up to 90 %; what is left moves to the front, and one observation per band always
    stays.
    """
    seen = x[..., 3] > 0
    lost = _uniform(tuple(seen.shape), x, generator) < _per((0.9 * strength).clamp(max=0.9), seen)
    lost[..., 0] = False
    kept = seen & ~lost
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., None].expand_as(x)
    return (x * kept[..., None]).gather(-2, order)


def _stretch(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Time axis of light curves stretched or shortened by up to e^1 per unit of strength, as by redshift."""
    factor = _per(torch.exp((2 * _uniform(len(x), x, generator) - 1) * strength), x[..., 0])
    return torch.cat([(x[..., 0] * factor)[..., None], x[..., 1:]], dim=-1)


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("noise", _noise),
        Family("gain", _gain, 2.0),
        Family("affine", _affine, 2.0),
        Family("mixup", _mixup, 1.0),
        Family("blur", _blur, 2.0),
        Family("speckle", _speckle, 2.0),
        Family("channel-gain", _channel_gain, 2.0),
        Family("time-warp", _time_warp, 2.0),
        Family("flux-noise", _flux_noise),
        Family("dimming", _dimming),
        Family("epoch-drop", _epoch_drop, 1.0),
        Family("stretch", _stretch, 2.0),
        Family("layer-noise", _noise, 4.0, inside=True),
        Family("layer-gain", _channel_gain, 4.0, inside=True),
        Family("layer-mixup", _mixup, 1.0, inside=True),
    )
}
"""Every family by name. Light curves are ``(n, bands, T, 4)``: time, asinh flux, asinh error, mask."""

KINDS: dict[str, tuple[str, ...]] = {
    "images": ("noise", "gain", "affine", "mixup", "layer-noise"),
    "sequences": ("noise", "gain", "time-warp", "mixup", "layer-noise"),
    "tabular": ("noise", "gain", "mixup", "layer-noise"),
    "tokens": ("layer-noise", "layer-gain", "layer-mixup"),
    "light-curves": ("flux-noise", "epoch-drop", "dimming", "stretch", "layer-noise"),
}
"""Families used for each kind of input."""
