"""heterps-compile: a torch.compile backend for heterogeneous resources."""
