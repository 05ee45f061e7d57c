"""Calibrators that are Gaussian processes."""
