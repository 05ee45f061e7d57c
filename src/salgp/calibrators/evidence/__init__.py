"""Layer evidence, the default: what every layer says of a prediction, made log-odds of being correct."""
