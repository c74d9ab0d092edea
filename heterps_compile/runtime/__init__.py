"""What runs a plan on this machine or on many; imports neither passes nor kernels."""
