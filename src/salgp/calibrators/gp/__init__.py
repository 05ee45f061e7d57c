"""Calibrators that are Gaussian processes: one file each."""
