"""CPU kernels for products with weights of 8 and 4 bits (`few_bits.cc`).

Each row of x is rounded to 8 bits in groups of 32 numbers, of which the largest becomes 127; integers are multiplied
and summed within a group, by AMX, vectors with AVX-512 and VNNI, AVX-VNNI, AVX2 or NEON (`few_bits_isa.h`), where the
CPU has them. A row's result does not depend on the number of rows or on these instructions, to the last bit.

Weights lie in tiles, so that a kernel reads memory in order (`hydrajax.lowbit.kernels.tile_layout`).

HYDRAJAX_PLAIN_CPU_KERNELS in the environment chooses the code: ``avx512vnni``, ``avxvnni``, ``avx2``, ``neoni8mm``,
``neondot``, or ``1`` for that of CPUs without these instructions. With any value AMX is not used.

AMX multiplies 6 rows or more (int8) and 12 or more (int4). Sums of a tile are stored while the next ones are
multiplied: stored at once they take twice as long. docs/design.md and docs/low_bits.md have measurements.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from hydrajax.models.arrays import Array


def matmul(
    x: Float[Array, "R D"],
    width: int,
    tiles: Shaped[Array, "tiles groups steps 64 4"],
    *scales: Shaped[Array, "tiles scales 64"],
) -> Float[Array, "R F"]:
    """Return ``x @ weight`` in float32; without a gradient.

    Args:
        width: F.
        tiles: int8, or uint8 with two numbers of 0 to 15, or codes, in a byte.
        scales: Float16 or float32, a scale of each group and column (`tile_layout.scale_shape`). Perhaps followed by
            float16 numbers that are added to the scaled ones, or by uint8 zeros that are subtracted before. Or
            uint8 exponents alone, for codes (`hydrajax.lowbit.mxfp4`).
    """
    out = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    return jax.ffi.ffi_call("hydrajax_matmul_few_bits", out, vmap_method="sequential")(x, tiles, *scales)


def matmul_experts(
    x: Float[Array, "R_or_pairs D"],
    experts: Int[Array, "R k"],
    width: int,
    tiles: Shaped[Array, "E tiles groups steps 64 4"],
    *scales: Shaped[Array, "E tiles scales 64"],
) -> Float[Array, "pairs F"]:
    """Return `matmul` with the weight of its expert for each pair of a row and one of its experts.

    See `hydrajax.ops.cpu.experts.matmul_experts`.
    """
    out = jax.ShapeDtypeStruct((experts.size, width), jnp.float32)
    call = jax.ffi.ffi_call("hydrajax_matmul_few_bits_experts", out, vmap_method="sequential")
    return call(x, experts.astype(jnp.int32), tiles, *scales)
