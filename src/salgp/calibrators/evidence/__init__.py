"""Layer evidence, the default: log-odds of being correct from the features of every layer."""
