"""TPU kernels: products of a few rows with weights of 8 and 4 bits, which leave memory as they are.

XLA's own products of 64 rows widen int8 on the vector unit, and write int4 with a scale per group out in 16 bits. Here
a program passes over blocks of inputs for some outputs, and Pallas fetches the next block meanwhile.

- int8: the matrix unit multiplies integers. x is split into two digits (`hydrajax.lowbit.rounding.digits`), whose sums
  are added at the last block.
- int4: numbers are scaled on the vector unit. Byte j of all groups is one block of the product, so that scales need
  not be repeated. The offsets are a product of their own, with the sums of x's groups.

Compiled for described TPUs and compared with NumPy in Pallas's simulation of a TPU; they have not run on a TPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float16, Int8, UInt8

from hydrajax.lowbit.rounding import DIGIT, digits
from hydrajax.models.arrays import Array

NAMES = {name: f"hydrajax_matmul_{name}_tpu" for name in ("int8", "int4")} | {"digits": "hydrajax_digits_tpu"}
ROWS, MOST_ROWS = 32, 128  # of a tile of int8, and of x
LANES, HALF = 128, 16
COLUMNS = 256  # of int4 at a time: more do not fit into the registers, of fewer the last products delay the next ones
SIGNS, HIGH = -0x77777778, -0x0F0F0F10  # 0x88888888 and 0xF0F0F0F0: of each number the first bit, and all of the second
BLOCK = 2 * 2**20  # bytes of a block of weights
DEPTH = 4096  # inputs of a block at most


def fits(rows: int, depth: int, width: int, dtype) -> bool:
    """Return whether the kernels multiply this many rows of x with parts of this width."""
    known = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32)
    return known and 0 < rows <= MOST_ROWS and depth % LANES == 0 and width % LANES == 0


def divisor(size: int, unit: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is a multiple of ``unit`` and at most ``most``, or ``size``."""
    fitting = [n for n in range(unit, min(size, most) + 1, unit) if size % n == 0]
    return fitting[-1] if fitting else size


def matmul_int8(
    x: Float[Array, "R D"], values: Int8[Array, "parts D F"], scale: Float[Array, "parts F"], dtype, *, interpret=False
) -> Float[Array, "parts R F"]:
    """Return the products of x with each part of a kernel ``values * scale``."""
    rows, (parts, depth, width) = len(x), values.shape
    padded = -(-rows // ROWS) * ROWS
    x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    pairs, largest = pl.pallas_call(
        _digits,
        grid=(padded // ROWS,),
        in_specs=[pl.BlockSpec((ROWS, depth), lambda tile: (tile, 0))],
        out_specs=[
            pl.BlockSpec((2, ROWS, depth), lambda tile: (0, tile, 0)),
            pl.BlockSpec((ROWS, 1), lambda tile: (tile, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct((2, padded, depth), jnp.int8), jax.ShapeDtypeStruct((padded, 1), jnp.float32)],
        interpret=interpret,
        name=NAMES["digits"],
    )(x)
    inputs = divisor(depth, LANES, DEPTH)
    columns = divisor(width, LANES, max(LANES, BLOCK // inputs))
    together = divisor(parts, 1, max(1, BLOCK // (inputs * columns)))
    out = pl.pallas_call(
        functools.partial(_int8, rows=padded),
        grid=(parts // together, width // columns, depth // inputs),
        in_specs=[
            pl.BlockSpec((2 * padded, inputs), lambda part, column, turn: (0, turn)),
            pl.BlockSpec((together, inputs, columns), lambda part, column, turn: (part, turn, column)),
            pl.BlockSpec((padded, 1), lambda part, column, turn: (0, 0)),
            pl.BlockSpec((together, 1, columns), lambda part, column, turn: (part, 0, column)),
        ],
        out_specs=pl.BlockSpec((together, padded, columns), lambda part, column, turn: (part, 0, column)),
        out_shape=jax.ShapeDtypeStruct((parts, padded, width), dtype),
        scratch_shapes=[pltpu.VMEM((together, 2 * padded, columns), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=NAMES["int8"],
    )(pairs.reshape(2 * padded, depth), values, largest, scale[:, None])
    return out[:, :rows]


def _digits(x, pairs, scale):
    """Write x's two digits and the scale of each row."""
    pairs[0], pairs[1], scale[...] = digits(x[...])


def _int8(pairs, values, of_row, of_column, out, sums, *, rows: int):
    turn = pl.program_id(2)

    @pl.when(turn == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    x = pairs[...]
    for part in range(values.shape[0]):
        sums[part] += jax.lax.dot_general(x, values[part], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)

    @pl.when(turn == pl.num_programs(2) - 1)
    def _():
        total = sums[...].astype(jnp.float32)
        total = total[:, :rows] + total[:, rows:] * (1 / DIGIT)
        out[...] = (total * of_row[...] * of_column[...]).astype(out.dtype)


def matmul_int4(
    x: Float[Array, "R D"],
    values: UInt8[Array, "parts 16 groups F"],
    scale: Float16[Array, "parts groups F"],
    offset: Float16[Array, "parts groups F"],
    dtype,
    *,
    interpret=False,
) -> Float[Array, "parts R F"]:
    """Return the products of x with each part of a kernel."""
    (rows, _), (parts, _, groups, width) = x.shape, values.shape
    padded = -(-rows // 16) * 16
    # [2 * 16, rows, groups]: input j of all groups. Behind it the sums of the groups.
    by_place = jnp.moveaxis(jnp.pad(x, ((0, padded - rows), (0, 0))).reshape(padded, groups, 2 * HALF), 2, 0)
    sums = jnp.sum(by_place.astype(jnp.float32), axis=0, keepdims=True)
    columns = divisor(width, LANES, max(LANES, BLOCK // (HALF * groups)))
    together = divisor(parts, 1, max(1, BLOCK // (HALF * groups * columns)))
    numbers = pl.BlockSpec((together, groups, columns), lambda part, column: (part, 0, column))
    bits = (jax.lax.bitcast_convert_type(part, jnp.int16) for part in (scale, offset))  # a TPU has no float16
    out = pl.pallas_call(
        _int4,
        grid=(parts // together, width // columns),
        in_specs=[
            pl.BlockSpec((2 * HALF, padded, groups), lambda part, column: (0, 0, 0)),
            pl.BlockSpec((1, padded, groups), lambda part, column: (0, 0, 0)),
            pl.BlockSpec((together, HALF, groups, columns), lambda part, column: (part, 0, 0, column)),
            numbers,
            numbers,
        ],
        out_specs=pl.BlockSpec((together, padded, columns), lambda part, column: (part, 0, column)),
        out_shape=jax.ShapeDtypeStruct((parts, padded, width), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=NAMES["int4"],
    )(by_place, sums, values, *bits)
    return out[:, :rows]


def _int4(x, sums, values, scale, offset, out):
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    parts, width = values.shape[0], values.shape[3]
    columns = COLUMNS if width % COLUMNS == 0 else LANES
    shares = width // columns

    def of_columns(number, _):
        """Multiply with some columns, whose scales stay in registers."""
        part, at = number // shares, pl.ds(pl.multiple_of(number % shares * columns, LANES), columns)
        step = _of_float16(scale[part, :, at])
        sixteenth = step * (1 / 16)

        def add(j, total):
            # Four bytes at a time: 16 (number - 8) of both numbers as signed bytes. The offset makes up for the 8.
            pairs = pltpu.bitcast(values[part, j, :, at], jnp.int32) ^ SIGNS
            for half, fours in enumerate(((pairs << 4) & HIGH, pairs & HIGH)):
                number = pltpu.bitcast(fours, jnp.int8).astype(jnp.int32).astype(jnp.float32)
                total += product(x[j + half * HALF], (number * sixteenth).astype(x.dtype), precision=precision)
            return total

        # Once per group, so that a float32 product costs little.
        least = _of_float16(offset[part, :, at]) + 8 * step
        total = product(sums[0], least, precision=jax.lax.Precision.HIGHEST)
        out[part, :, at] = jax.lax.fori_loop(0, HALF, add, total, unroll=True).astype(out.dtype)
        return 0

    jax.lax.fori_loop(0, parts * shares, of_columns, 0)


def _of_float16(bits: Array) -> Float[Array, "..."]:
    """Return float16 numbers, given as their bits in int16, in float32; exact, also below the normal ones."""
    wide = bits.astype(jnp.int32)
    exponent = (wide >> 10) & 31
    mantissa = (wide & 1023) | jnp.where(exponent > 0, 1024, 0)
    power = jax.lax.bitcast_convert_type((jnp.maximum(exponent, 1) + (127 - 25)) << 23, jnp.float32)
    size = mantissa.astype(jnp.float32) * power
    return jnp.where(wide < 0, -size, size)


_int8.__name__, _int4.__name__, _digits.__name__ = NAMES["int8"], NAMES["int4"], NAMES["digits"]
# jax 0.11 names a kernel by its function
