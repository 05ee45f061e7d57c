"""A stand-in for a reader's own project: a trained network and its data, for the documents' examples."""

from __future__ import annotations

from salgp import demo
from salgp.demo_digits import draw_digits, photograph

demo.EPOCHS = 15
_train, _test = draw_digits(400, 1), draw_digits(400, 3)

model = demo.train_network(_train)
train_loader = _train.loader()
calibration_loader = draw_digits(300, 2).loader()
test_loader = photograph(_test).loader()
