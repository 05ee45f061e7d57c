"""Augmented samples: calibration data perturbed in many ways, to learn confidences under shift."""
