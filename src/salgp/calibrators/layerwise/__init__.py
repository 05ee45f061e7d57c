"""SAL-GP: Gaussian processes on the pooled features of every layer, with the paper's structured kernels."""
