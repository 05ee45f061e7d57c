"""A Lightning module is calibrated like any other, and a calibrated classifier may be part of one."""

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


def trainer() -> object:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(max_epochs=2, accelerator="cpu", **quiet)


def test_a_calibrated_classifier_inside_a_module() -> None:
    """As a part of a Lightning module it predicts what it predicts alone, and its network still trains."""
    import salgp

    train, validation = loaders()
    module = Small()
    trainer().fit(module, train, validation)
    classifier = salgp.calibrate(module.model, validation, method="temperature")

    class Deployed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.classifier(batch[0]).confidence

    found = trainer().predict(Deployed(), validation)
    torch.testing.assert_close(torch.cat(found), classifier(validation.dataset.tensors[0]).confidence)
    trainer().fit(module, train, validation)
