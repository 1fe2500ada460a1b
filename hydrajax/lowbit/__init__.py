"""Weights of few bits: types and their kernels, and files of bases in few bits (docs/low_bits.md)."""
