"""The Lightning callback calibrates the final weights on the validation data and leaves the module alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

pytestmark = pytest.mark.filterwarnings("ignore")


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loaders() -> tuple[DataLoader, DataLoader]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(240, 4, generator=g)
    y = (x[:, :3] + 0.5 * torch.randn(240, 3, generator=g)).argmax(1)
    return DataLoader(TensorDataset(x[:120], y[:120]), batch_size=40), DataLoader(
        TensorDataset(x[120:], y[120:]), batch_size=40
    )


def trainer(callback: object) -> object:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **quiet)


@pytest.mark.parametrize("every_epoch", [False, True])
def test_calibrates_the_final_weights(every_epoch: bool) -> None:
    from salgp.lightning import CalibrateAfterValidation

    train, validation = loaders()
    callback = CalibrateAfterValidation(method="temperature", network="model", every_epoch=every_epoch)
    module = Small()
    trainer(callback).fit(module, train, validation)
    assert callback.classifier is not None
    assert callback.classifier.model is module.model
    x = validation.dataset.tensors[0]
    assert torch.equal(callback.classifier(x).label, module.model(x).argmax(1))


def test_without_data_it_says_what_to_do() -> None:
    from salgp.lightning import CalibrateAfterValidation

    train, _ = loaders()
    with pytest.raises(ValueError, match="pass loader="):
        trainer(CalibrateAfterValidation(method="temperature")).fit(Small(), train)


def test_a_calibrated_classifier_inside_a_module() -> None:
    """As a part of a Lightning module it predicts what it predicts alone, and its network still trains."""
    import salgp

    train, validation = loaders()
    module = Small()
    trainer(pl.Callback()).fit(module, train, validation)
    classifier = salgp.calibrate(module.model, validation, method="temperature")

    class Deployed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.classifier(batch[0]).confidence

    found = trainer(pl.Callback()).predict(Deployed(), validation)
    torch.testing.assert_close(torch.cat(found), classifier(validation.dataset.tensors[0]).confidence)
    trainer(pl.Callback()).fit(module, train, validation)


def test_one_of_several_validation_loaders_must_be_named() -> None:
    """A list of loaders was taken for a list of batches."""
    from salgp.lightning import CalibrateAfterValidation

    class Several(Small):
        def validation_step(self, batch: list[torch.Tensor], index: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, index)

    train, validation = loaders()
    callback = CalibrateAfterValidation(method="temperature", network="model")
    with pytest.raises(ValueError, match="2 validation loaders, and calibration takes one"):
        trainer(callback).fit(Several(), train, [validation, validation])
    trainer(callback).fit(Several(), train, [validation])
    assert callback.classifier is not None
    named = CalibrateAfterValidation(validation, method="temperature", network="model")
    trainer(named).fit(Several(), train, [validation, validation])
    assert named.classifier is not None
