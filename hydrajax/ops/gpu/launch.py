"""The only module that turns a GPU kernel into an operation of JAX, through Pallas' Triton backend.

JAX 0.11 deprecates that backend and names no version that removes it. Kernels are functions of references which use
`jax.numpy`, `pl.program_id`, `pl.ds` and `dot` only; docs/gpu.md describes a port to another compiler.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hydrajax.models.arrays import Array

dot = triton.dot


def launch(
    kernel: Callable[..., None],
    *inputs: Array,
    name: str,
    out_shape,
    grid: tuple[int, ...] = (),
    warps: int,
    stages: int | None = None,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
):
    """Run a kernel once per point of the grid, and return its outputs.

    Args:
        kernel: Called with references to the inputs, then to the outputs; arrays inside have powers of two elements.
        inputs: Whole arrays; the kernel indexes them.
        name: Of the kernel in compiled programs.
        out_shape: Tree of `jax.ShapeDtypeStruct`.
        grid: Numbers of programs by axis.
        warps: Warps per program.
        stages: Stages of software pipelining; None for the compiler's default.
        aliases: Number of an output, by the number of the input that it overwrites.
        interpret: Run without a GPU.
    """

    def named(*references):
        kernel(*references)

    named.__name__ = name  # jax 0.11 names a kernel by its function, jax 0.10 by the argument
    return pl.pallas_call(
        named,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*inputs)
