"""Generated kernels and, beside each, the eager definition it must equal."""
