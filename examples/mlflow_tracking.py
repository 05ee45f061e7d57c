"""Scores and the report of a calibration in MLflow: two lines beside the calibration. Needs ``mlflow``."""

import mlflow
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import salgp

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
x = torch.tensor(images[order] / 16, dtype=torch.float32)
y = torch.tensor(labels[order])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[:300]), y[:300]).backward()
    optimizer.step()

classifier = salgp.calibrate(model, [(x[300:600], y[300:600])], method="temperature")
test = [(x[600:], y[600:])]
features, truth = classifier.extract(test)
prediction = classifier.predict(test)
scores = salgp.evaluate(prediction, truth)

with mlflow.start_run(run_name="temperature scaling"):
    mlflow.log_metrics({name: value for name, value in scores.as_dict().items() if value is not None})
    mlflow.log_artifact(str(salgp.report.build("report.html", features, truth, prediction, force=True)))
print(scores)
