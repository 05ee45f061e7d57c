"""Calibrate a Lightning module on its validation data."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import salgp

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, validation = (
    DataLoader(TensorDataset(x[:800], y[:800]), batch_size=64),
    DataLoader(TensorDataset(x[800:1300], y[800:1300]), batch_size=256),
)

trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Digits()
trainer.fit(module, train, validation)

classifier = salgp.calibrate(module, validation, reference=train)
prediction = classifier(x[1300:])
accuracy = (prediction.label == y[1300:]).float().mean()
print(f"accuracy {accuracy:.3f}, mean calibrated confidence {prediction.confidence.mean():.3f}")
