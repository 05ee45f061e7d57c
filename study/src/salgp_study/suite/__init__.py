"""How well confidences hold in domain and under shift: every method on the same features."""
