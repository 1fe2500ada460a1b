"""Kernels of our own, where XLA leaves most of a machine's speed unused. A plain JAX twin can replace each."""
