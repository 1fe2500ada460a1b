"""Measure the rates of the present device."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hydrajax.bench.device_memory import copy_bandwidth
from hydrajax.bench.roofline.devices import Device, Rates
from hydrajax.bench.rounds import medians, seconds
from hydrajax.models.attention import KVSegment, attend
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import project

CPU_ROWS = (1, 2, 4, 8, 16, 64, 256)  # the rate differs by number of rows
ACCELERATOR_ROWS = (*CPU_ROWS, 1024, 4096)
MAX_BYTES = 512 * 2**20  # of weights, and of keys and values: more than any cache has
MIN_SECONDS = 0.05  # per timed call, much longer than dispatch and a scheduler's time slice


class Meter:
    """Measures the present device on as many matrices of a model's shape as a step reads, up to 512 MB.

    The weights of a small model are thus read from the device's cache, as in a step. Compiled once, so that `measure`
    can be called with every timing: the rates of a shared machine change within minutes.

    Args:
        weight_bytes: bytes of weights that a step reads.
    """

    def __init__(self, config: LlamaConfig, dtype, weight_bytes: int, slots: int, repeats: int = 5):
        self.dtype, self.repeats = jnp.dtype(dtype), repeats
        on_cpu = jax.default_backend() == "cpu"
        self.copy_megabytes = 256 if on_cpu else 1024
        width, mlp_width = config.width, config.mlp_width
        heads, slot_shape = config.n_kv_heads, (1, config.n_kv_heads, slots, config.head_dim)
        weights = _pairs((width, mlp_width), (mlp_width, width), dtype, weight_bytes)
        numbers = max(math.prod(slot_shape), slots * sum(heads * features for heads, features in config.kv_shapes))
        cache_bytes = 2 * numbers * self.dtype.itemsize
        caches = _pairs(slot_shape, slot_shape, dtype, cache_bytes)
        self._loops = {}
        for rows in CPU_ROWS if on_cpu else ACCELERATOR_ROWS:
            self._loops["weights", rows] = _Loop(_through_weights, (rows, width), weights)
            self._loops["attention", rows] = _Loop(_through_caches, (1, heads, rows, config.head_dim), caches)

    def measure(self) -> Device:
        """Return the medians of interleaved timings.

        The bandwidth is the larger of a copy's and of a one-row product's, which hardly does more than read weights.
        """
        found = medians(self._loops, self.repeats)
        rates: dict[str, Rates] = {"weights": (), "attention": ()}
        for (kind, rows), loop in self._loops.items():
            rates[kind] += ((rows, loop.flops / found[kind, rows]),)
        read = rates["weights"][0][1] / 2 * self.dtype.itemsize  # two operations per weight
        bandwidth = max(copy_bandwidth(self.copy_megabytes), read)
        return Device(
            "here", max(rate for _, rate in rates["weights"]), bandwidth, rates["weights"], rates["attention"]
        )


def _through_weights(x: Float[Array, "rows D"], weights: Sequence[tuple[Array, Array]]) -> Float[Array, "rows D"]:
    for up, down in weights:
        x = project(project(x, up), down)
    return x


def _through_caches(
    x: Float[Array, "1 kv rows H"], caches: Sequence[tuple[Array, Array]]
) -> Float[Array, "1 kv rows H"]:
    for keys, values in caches:
        out = attend(x, [KVSegment(keys, values, np.ones((x.shape[2], keys.shape[2]), bool))])
        x = out.reshape(1, x.shape[2], *x.shape[1::2]).swapaxes(1, 2)
    return x


class _Loop:
    """Passes of ``x`` through pairs of matrices, in one compiled loop of at least `MIN_SECONDS`."""

    def __init__(self, one_pass: Callable, shape: tuple[int, ...], pairs: Sequence[tuple[Array, Array]]):
        first = pairs[0][0]
        self.flops = len(pairs) * 4.0 * math.prod(first.shape) * shape[-2]  # two products with every pair
        self._data = _random(shape, first.dtype), pairs
        with jax.default_matmul_precision("highest"):  # as in the decode step
            loop = jax.jit(lambda n, x, pairs: jax.lax.fori_loop(0, n, lambda _, x: one_pass(x, pairs), x))
            self._loop = loop.lower(1, *self._data).compile()
        self._passes = 1
        self()
        self._passes = max(1, math.ceil(MIN_SECONDS / self()))

    def __call__(self, number: int = 0) -> float:
        """Return the seconds per pass."""
        return seconds(self._loop, self._passes, *self._data) / self._passes


def _pairs(first: tuple[int, ...], second: tuple[int, ...], dtype, wanted_bytes: int) -> list[tuple[Array, Array]]:
    """Pairs of matrices of these shapes with about ``wanted_bytes`` in total, at most `MAX_BYTES`.

    All have the same numbers in separate buffers.
    """
    pair = _random(first, dtype), _random(second, dtype)
    many = max(1, round(min(wanted_bytes, MAX_BYTES) / sum(matrix.nbytes for matrix in pair)))
    return [(jnp.copy(pair[0]), jnp.copy(pair[1])) for _ in range(many)]


def _random(shape: tuple[int, ...], dtype) -> Array:
    """Random numbers (zeros can run faster), scaled so that repeated products neither overflow nor vanish."""
    return jax.random.normal(jax.random.key(0), shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)
