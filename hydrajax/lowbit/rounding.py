"""Round a kernel on the host to 8 or 4 bits, in groups of inputs with a scale each, and rows of x to two digits."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float16, Int8

from hydrajax.errors import HydrajaxError
from hydrajax.lowbit.kernels import tile_layout
from hydrajax.models.arrays import Array

DIGIT = 254  # steps of the second digit in one of the first
ROWS = 256  # rows of a kernel rounded at once, a multiple of every group


def in_groups(kernel: np.ndarray, quantise: Callable, size: int = tile_layout.GROUP) -> list[np.ndarray]:
    """Quantise a kernel's groups of inputs, in blocks: a float32 copy of a whole one would be the host's peak.

    ``quantise`` takes ``[n, size, F]`` and returns numbers of this shape, and scales and the like ``[n, F]``.
    """
    flat, blocks = kernel.reshape(len(kernel), -1), []
    for at in range(0, len(flat), ROWS):
        rows = flat[at : at + ROWS].astype(np.float32)
        if not np.abs(rows).max() < np.finfo(np.float16).max:
            raise HydrajaxError("quantize: got a weight that is not finite, expected finite numbers within float16")
        rows = np.pad(rows, [(0, -len(rows) % size), (0, 0)], mode="edge")
        values, *numbers = quantise(rows.reshape(-1, size, rows.shape[1]))
        blocks.append((values.reshape(rows.shape), *numbers))
    values, *numbers = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return [values[: len(kernel)], *numbers]


def eight_bits(groups: Float[np.ndarray, "n size F"]):
    """Return numbers of -127 to 127 and their scale; the largest of each group becomes 127."""
    scale = (np.abs(groups).max(axis=1) / 127).astype(np.float16)
    return np.clip(steps_of(groups, scale), -127, 127).astype(np.int8), scale


def four_bits(groups: Float[np.ndarray, "n size F"]):
    """Return numbers of 0 to 15 with a scale and an offset that keep the least and the largest of each group."""
    least, largest = groups.min(axis=1), groups.max(axis=1)
    scale, offset = ((largest - least) / 15).astype(np.float16), least.astype(np.float16)
    steps = steps_of(groups - offset[:, None].astype(np.float32), scale)
    return np.clip(steps, 0, 15).astype(np.uint8), scale, offset


def steps_of(groups: Float[np.ndarray, "n size F"], scale: Float16[np.ndarray, "n F"]) -> Float[np.ndarray, "n size F"]:
    """Return numbers in whole steps."""
    step = scale[:, None].astype(np.float32)
    return np.rint(groups / np.where(step > 0, step, 1))


def digits(x: Float[Array, "R D"]) -> tuple[Int8[Array, "R D"], Int8[Array, "R D"], Float[Array, "R 1"]]:
    """Return two digits and a scale of each row, for products of integers: ``x = (first + second / 254) * scale``, to
    1 / 64,516 of its largest number.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / 127
    first = jnp.rint(x / scale)
    second = jnp.rint((x / scale - first) * DIGIT)
    return first.astype(jnp.int8), second.astype(jnp.int8), scale
