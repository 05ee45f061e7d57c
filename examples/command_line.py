"""The whole way by command line: a network in a file of your own, calibrated, compared, reported, applied,
exported.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

from salgp.cli import main

# What a user has: a file that makes the network, its weights, and data.
Path("network.py").write_text("""
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )
""")
sys.path.insert(0, ".")
from network import make  # noqa: E402

torch.manual_seed(0)
digits = load_digits()
x, y = (digits.images[:, None] / 16).astype(np.float32), digits.target
order = np.random.default_rng(0).permutation(len(x))
for name, rows in zip(("train", "calibration", "test"), np.split(order, [300, 700]), strict=True):
    np.savez(f"{name}.npz", x=x[rows], y=y[rows])
model = make()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.tensor(x[order[:300]])), torch.tensor(y[order[:300]])).backward()
    optimizer.step()
save_file(model.state_dict(), "network.safetensors")

# What a user types, each line after the word salgp.
for line in (
    "extract network.py:make train.npz --weights network.safetensors -o train.safetensors --force",
    "extract network.py:make calibration.npz --weights network.safetensors --perturb -o "
    "calibration.safetensors --force",
    "extract network.py:make test.npz --weights network.safetensors -o test.safetensors --force",
    "fit calibration.safetensors --reference train.safetensors --method layer-evidence -o calibrator --force",
    "evaluate calibrator test.safetensors",
    "explain calibrator test.safetensors",
    "compare calibration.safetensors --test test.safetensors --reference train.safetensors "
    "--method uncalibrated,temperature,layer-evidence",
    "report calibrator test.safetensors --images test.npz -o report.html --force",
    "apply calibrator test.safetensors -o predictions.csv --force",
    "export calibrator network.py:make test.npz --weights network.safetensors -o whole.onnx --force",
):
    print(f"$ salgp {line}")
    if main(line.split()) != 0:
        raise SystemExit(1)

# What runs elsewhere, without salgp: the whole of it in one file, for any number of samples.
import onnxruntime  # noqa: E402

session = onnxruntime.InferenceSession("whole.onnx")
names = [output.name for output in session.get_outputs()]
result = dict(
    zip(names, session.run(None, {"input": np.load("test.npz", allow_pickle=False)["x"]}), strict=True)
)
applied = np.genfromtxt("predictions.csv", delimiter=",", names=True)
print(
    f"whole.onnx against salgp apply: {np.abs(result['confidence'] - applied['confidence']).max():.1e} apart"
)
assert np.abs(result["confidence"] - applied["confidence"]).max() < 1e-4  # a graph works in single precision
assert (result["label"] == applied["label"]).all()
