"""Custom kernels for work that XLA compiles poorly. Each has an equivalent in plain JAX."""
