"""Calibrate a network in one call, read the result, save it and load it again."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import salgp

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x))
train, calibration, test = (
    DataLoader(TensorDataset(x[i], y[i]), batch_size=64) for i in order.split([300, 400, 1097])
)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(15):
    for images, labels in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

classifier = salgp.calibrate(model, calibration, reference=train)

images, labels = next(iter(test))
prediction = classifier(images)
for i in range(3):
    low, high = prediction.lower[i], prediction.upper[i]
    print(
        f"says {prediction.label[i]}, confidence {prediction.confidence[i]:.2f} (90 % interval "
        f"{low:.2f} to {high:.2f}), truth {labels[i]}"
    )

# beside temperature scaling, on data like those of the calibration and on noisy ones: the negative
# log-likelihood of being right, and how well errors are told from right answers
temperature = salgp.calibrate(model, calibration, method="temperature")
noisy = [(x + 0.4 * torch.randn(x.shape), y) for x, y in test]
for title, data in (("in domain", test), ("with noise", noisy)):
    for name, one in (("temperature scaling", temperature), ("layer evidence", classifier)):
        features, labels = one.extract(data)
        scores = salgp.evaluate(one.calibrator.predict(features), labels)
        print(f"{title:11} {name:20} NLL {scores.nll_correct:.3f}  AUROC {scores.auroc:.3f}")

classifier.save("digits-calibrator")
again = salgp.load("digits-calibrator", model)
assert torch.equal(again(images).confidence, prediction.confidence)
