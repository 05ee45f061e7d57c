"""Calibrators that see the logits alone."""
