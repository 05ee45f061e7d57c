"""Calibrators that compare a sample with the training data in hidden layers: one file each."""
