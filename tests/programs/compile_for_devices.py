"""Compile for one device, and for a mesh of several. Argument: the number of devices of the mesh."""

import sys

import jax

from hydrajax.sharding import make_mesh, replicated

if __name__ == "__main__":
    jax.jit(lambda x: x + 1)(2)
    mesh = make_mesh(int(sys.argv[1]))
    jax.jit(lambda x: x * x, out_shardings=replicated(mesh))(3)
