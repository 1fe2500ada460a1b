"""Kernels of products with weights of few bits. Those of a CPU are in C++ (`hydrajax.ops.cpu`)."""
