"""CPU kernels for products with weights of 8 and 4 bits (`few_bits.cc`).

Each row of x is rounded to 8 bits in groups of 32 numbers, of which the largest becomes 127; integers are multiplied
and summed within a group, by AMX, AVX-512 with VNNI (`few_bits_512.h`), AVX-VNNI or AVX2 (`few_bits_256.h`) where the
CPU has them. A row's result does not depend on the number of rows or on these instructions, to the last bit.

Weights lie in tiles of 64 columns and 32 rows, so that a kernel reads memory in order: `to_tiles`. A scale serves one,
two or four tiles of a column.

HYDRAJAX_PLAIN_CPU_KERNELS in the environment chooses the code: ``avx512vnni``, ``avxvnni``, ``avx2``, or ``1`` for that
of CPUs without these instructions. With any value AMX is not used.

Measured on 2 cores of an AMD EPYC (Zen 5), jax 0.10.2, all products of SmolLM2-135M, in ms:

| rows                    | 1    | 2    | 4    | 8    | 64   |
|-------------------------|------|------|------|------|------|
| float32 (`few_rows`)    | 13.7 | 14.7 | 14.9 | 13.7 | 64   |
| int8                    | 4.2  | 4.9  | 5.4  | 5.0  | 28   |
| int4                    | 2.5  | 2.9  | 3.2  | 3.5  | 24   |

Groups of other sizes, on 2 cores of a Zen 4 while other programs used them, the least of four interleaved runs, in ms.
*Zeros* is the storage of other programs' files, a float16 scale and a zero of a byte. At one row the bytes decide:

| products of            | bits | SmolLM2, 1 row | 8 rows | 1.1B shape, 1 row | 8 rows |
|------------------------|------|----------------|--------|-------------------|--------|
| groups of 32           | 5.00 | 3.4            | 8.8    | 31.1              | 70     |
| groups of 64           | 4.50 | 2.9            | 8.1    | 31.3              | 62     |
| groups of 128          | 4.25 | 2.9            | 6.4    | 24.4              | 62     |
| groups of 32, zeros    | 4.75 | 3.1            | 7.8    |                   |        |
| groups of 128, zeros   | 4.19 | 2.7            | 7.6    | 23.4              | 56     |

Alone on these cores, random weights of SmolLM2's shapes with the lm head in 8 bits take 4.0, 3.9 and 3.8 ms for one
row in groups of 32, 64 and 128, and 6.7, 6.8 and 6.3 ms for eight.

One layer of SmolLM2, 3.5M weights, on one core of a Zen 4 that other programs used too, the least of 1500 times, in
turn, in ms. The weights stay in the cache, so that instructions and not memory are measured. AVX-VNNI's code ran with
the same instruction in AVX-512's encoding, as the CPU has no other:

| rows             | 1    | 2    | 4    | 8    | 64   |
|------------------|------|------|------|------|------|
| int8             | 0.08 | 0.10 | 0.15 | 0.25 | 1.96 |
| int8, AVX-VNNI   | 0.10 | 0.15 | 0.26 | 0.54 | 3.59 |
| int8, AVX2       | 0.13 | 0.19 | 0.32 | 0.59 | 4.59 |
| int8, plain code | 0.30 | 0.38 | 0.52 | 0.83 | 5.43 |
| int4             | 0.06 | 0.08 | 0.13 | 0.24 |      |
| int4, AVX-VNNI   | 0.10 | 0.13 | 0.22 | 0.39 |      |
| int4, AVX2       | 0.11 | 0.15 | 0.25 | 0.45 |      |
| int4, plain code | 0.29 | 0.37 | 0.54 | 0.89 |      |

Since these tables AVX-512's code sums rows in registers and prefetches into the L1 cache. Products with 16 layers of
16.8M weights take 0.83 of the time in one row, 0.84 (int8) and 0.94 (int4) in eight. A step of 1.2B parameters on one
core, while other programs used the other one, takes 62 ms (one row) and 80 ms (8 rows) in int8, 73 and 100 before, and
51 and 84 ms in int4, 50.5 and 95 before.

AMX multiplies 6 rows or more (int8) and 12 or more (int4). Three layers of the 1.2B shape, 182M weights, on an Intel
Xeon that no other program used, median and least time of seven interleaved runs, in ms. Two threads vary twofold:
presumably its two virtual CPUs are mostly threads of one core, which share the matrix unit, and at times two cores.

| rows                     | 1        | 8         | 16        | 64        | 256       |
|--------------------------|----------|-----------|-----------|-----------|-----------|
| int8, AVX-512            | 15.0, 14 | 26.1, 22  | 40.5, 33  | 103, 95   | 482, 423  |
| int8, AMX                |          | 21.0, 19  | 25.3, 23  | 55.8, 54  | 252, 223  |
| int8, AVX-512, 2 threads | 9.9, 8.1 | 15.1, 15  | 22.8, 19  | 73.0, 61  | 260, 234  |
| int8, AMX, 2 threads     |          | 15.4, 11  | 20.0, 13  | 51.2, 30  | 216, 130  |
| int4, AVX-512            | 10.0, 9  | 14.0, 14  | 25.3, 23  | 92.5, 76  | 371, 327  |
| int4, AMX                |          |           | 23.1, 18  | 59.8, 56  | 247, 222  |
| int4, AVX-512, 2 threads | 3.9, 2.5 | 8.2, 6.3  | 16.1, 13  | 60.8, 40  | 198, 169  |
| int4, AMX, 2 threads     |          |           | 17.5, 11  | 52.0, 31  | 205, 118  |

Sums of a tile are stored while the next ones are multiplied: stored at once they take twice as long. With four groups
of sums at a time, 32 kB for both threads, 8 to 64 rows take 1.4 to 1.8 times as long as with two.

Pages of 2 MB for the weights were tried on the same CPU, one thread. A step of SmolLM2 took 0.94 to 1.01 of its time
(one row) and 0.93 to 1.00 (8 rows), of 1.2B parameters in int4 0.98 to 1.00. Copying 0.4 to 0.6 GB into such pages took
1.3 to 3.8 s, and other programs often left the kernel none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float16, Int, Int8, Shaped

from hydrajax.models.arrays import Array

GROUP = 32  # rows of a tile, whose part of x has a scale of its own
COLUMNS = 64
STEPS = GROUP // 4  # an instruction sums four products
GROUPS = (32, 64, 128)  # inputs that may share a scale


def tile_shape(depth: int, width: int, per_byte: int = 1) -> tuple[int, ...]:
    """Return the shape of a weight ``[depth, width]`` in tiles: ``[tiles of columns, groups, steps, 64, 4]``.

    With two numbers in a byte, the second half of the steps lies in the high bits of the first half.
    """
    return (-(-width // COLUMNS), -(-depth // GROUP), STEPS // per_byte, COLUMNS, 4)


def scale_shape(depth: int, width: int, group: int = GROUP) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``[depth, width]``: ``[tiles of columns, groups, 64]``."""
    return (-(-width // COLUMNS), -(-depth // group), COLUMNS)


def for_tiles(numbers: Shaped[Array, "..."], n_tiles: int, axis: int) -> Shaped[Array, "..."]:
    """Return the scales of groups along ``axis`` as one of each of ``n_tiles`` tiles."""
    n_scales = numbers.shape[axis]
    per_scale = next(size // GROUP for size in GROUPS if -(-n_tiles // (size // GROUP)) == n_scales)
    if per_scale == 1:
        return numbers
    return jax.lax.slice_in_dim(jnp.repeat(numbers, per_scale, axis=axis), 0, n_tiles, axis=axis)


def to_tiles(values: Shaped[np.ndarray, "D F"]) -> Shaped[np.ndarray, "tiles groups 8 64 4"]:
    """Return a matrix in tiles, filled up with zeros."""
    tiles, groups, *_ = shape = tile_shape(*values.shape)
    whole = np.zeros((groups * GROUP, tiles * COLUMNS), values.dtype)
    whole[: values.shape[0], : values.shape[1]] = values
    return np.ascontiguousarray(whole.reshape(groups, STEPS, 4, tiles, COLUMNS).transpose(3, 0, 1, 4, 2)).reshape(shape)


def from_tiles(tiles: Shaped[Array, "tiles groups 8 64 4"], depth: int, width: int) -> Shaped[Array, "D F"]:
    """Return the matrix of `to_tiles`."""
    return tiles.transpose(1, 2, 4, 0, 3).reshape(-1, tiles.shape[0] * COLUMNS)[:depth, :width]


def per_group(values: Shaped[np.ndarray, "groups F"]) -> Shaped[np.ndarray, "tiles groups 64"]:
    """Return a number of each group and column in the tiles' order."""
    groups, width = values.shape
    whole = np.zeros((groups, -(-width // COLUMNS) * COLUMNS), values.dtype)
    whole[:, :width] = values
    return np.ascontiguousarray(whole.reshape(groups, -1, COLUMNS).swapaxes(0, 1))


def select(
    tiles: Int8[Array, "tiles groups 8 64 4"], scales: Float16[Array, "tiles scales 64"], columns: np.ndarray
) -> tuple[Int8[Array, "tiles_ groups 8 64 4"], Float16[Array, "tiles_ scales 64"]]:
    """Return some columns in tiles, and their scales."""
    filled = np.resize(columns, -(-len(columns) // COLUMNS) * COLUMNS)
    tile, place = filled // COLUMNS, filled % COLUMNS
    picked = tiles[tile, :, :, place]  # [n, groups, 8, 4]
    # XLA moves neither a gather's copy nor a transposition out of a loop, but a conversion with both.
    fours = jax.lax.bitcast_convert_type(picked, jnp.int32).reshape(-1, COLUMNS, *picked.shape[1:-1])
    of_columns = scales[tile, :, place].reshape(-1, COLUMNS, scales.shape[1])
    return jax.lax.bitcast_convert_type(fours.transpose(0, 2, 3, 1), jnp.int8), of_columns.swapaxes(1, 2)


def matmul(
    x: Float[Array, "R D"],
    width: int,
    tiles: Shaped[Array, "tiles groups steps 64 4"],
    *scales: Shaped[Array, "tiles scales 64"],
) -> Float[Array, "R F"]:
    """Return ``x @ weight`` in float32; without a gradient.

    Args:
        x: float32.
        width: F.
        tiles: int8, or uint8 with two numbers of 0 to 15 in a byte.
        scales: Float16 or float32, a scale of each group and column (`scale_shape`). Perhaps followed by float16
            numbers that are added to the scaled ones, or by uint8 zeros that are subtracted before.
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

    See `hydrajax.models.kernels.few_rows.matmul_experts`.
    """
    out = jax.ShapeDtypeStruct((experts.size, width), jnp.float32)
    call = jax.ffi.ffi_call("hydrajax_matmul_few_bits_experts", out)
    return call(x, experts.astype(jnp.int32), tiles, *scales)
