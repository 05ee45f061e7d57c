"""Augmented samples: calibration data perturbed in many ways, so that shift is met before it happens."""
