"""Calibrate after validation: a Lightning callback (extra ``salgp[lightning]``).

After every validation epoch (or only the last) the module's current weights are calibrated on the validation
data; the result is ``callback.classifier``. The module itself is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from salgp.calibrators import Calibrator
from salgp.classifier import CalibratedClassifier, calibrate
from salgp.extras import require

require("lightning")
import lightning.pytorch as pl  # noqa: E402  (after the question whether it is there)

__all__ = ["CalibrateAfterValidation"]


class CalibrateAfterValidation(pl.Callback):
    """Fit a calibrator on labelled data whenever validation ends.

    Args:
        loader: labelled calibration data, as `salgp.calibrate` takes it; the trainer's validation data by
            default.
        method: calibrator or its name; None for the library's default.
        network: attribute of the module that holds the classifier (``"model"``); the module itself by
            default.
        reference: training data, for methods that compare against it.
        every_epoch: calibrate after each validation, or only when fitting ends.
        calibrate_options: further arguments of `salgp.calibrate`.

    Attributes:
        classifier: the latest `salgp.CalibratedClassifier`, or None before the first.

    Example:
        >>> callback = CalibrateAfterValidation(method="temperature", network="model")
        >>> trainer = pl.Trainer(max_epochs=5, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.fit(module, train_loader, validation_loader)  # doctest: +SKIP
        >>> callback.classifier(images).confidence  # doctest: +SKIP
        >>> callback.classifier is None  # nothing was trained here
        True
    """

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        method: Calibrator | str | None = None,
        network: str | None = None,
        reference: Iterable[Any] | None = None,
        every_epoch: bool = False,
        calibrate_options: dict[str, Any] | None = None,
    ) -> None:
        self.loader = loader
        self.method = method
        self.network = network
        self.reference = reference
        self.every_epoch = every_epoch
        self.calibrate_options = calibrate_options or {}
        self.classifier: CalibratedClassifier | None = None

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate after this validation epoch, where asked for."""
        if self.every_epoch and not trainer.sanity_checking:
            self._calibrate(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calibrate the final weights."""
        self._calibrate(trainer, pl_module)

    def _calibrate(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loader = self.loader if self.loader is not None else trainer.val_dataloaders
        if loader is None:
            raise ValueError(
                "no calibration data: pass loader= to CalibrateAfterValidation, or give the "
                "trainer a validation loader"
            )
        if self.loader is None:
            loader = _one_loader(loader)
        network: nn.Module = getattr(module, self.network) if self.network else module
        self.classifier = calibrate(
            network, loader, method=self.method, reference=self.reference, **self.calibrate_options
        )


def _one_loader(loaders: Any) -> Iterable[Any]:
    """The trainer's validation data: one loader, also in a list of its own; several are refused."""
    if not isinstance(loaders, list | tuple | Mapping):
        one: Iterable[Any] = loaders
        return one
    found = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    raise ValueError(
        f"the trainer has {len(found)} validation loaders, and calibration takes one: say which with "
        f"CalibrateAfterValidation(loader=...), or join their data with torch.utils.data.ConcatDataset"
    )
