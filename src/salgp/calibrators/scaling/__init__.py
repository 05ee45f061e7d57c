"""Calibrators that see the logits alone: one file each."""
