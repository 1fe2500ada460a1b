"""Compile before and after `hydrajax.load`, which turns the compilation cache on. Argument: the base."""

import sys

import jax

import hydrajax

if __name__ == "__main__":
    jax.jit(lambda x: x + 1)(2)  # a compilation before the cache is on does not disable it
    hydrajax.load(sys.argv[1])
    jax.jit(lambda x: x * x)(3)
