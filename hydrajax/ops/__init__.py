"""The operations of models and drafters that backends compute in different ways, behind one table of backends.

Callers do not depend on the backend. `hydrajax.ops.xla.Xla` computes everything in XLA's own operations. The class of a
backend overrides what it does better: a new kernel goes there, behind the method that it replaces. The measurements are
in docs/performance.md, docs/gpu.md and docs/tpu.md. On a mesh, the functions here run an operation on each device's
part of the arrays (`hydrajax.ops.sharded`).
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.sharded import (
    DATA,
    MODEL,
    axis_over,
    by_token,
    on_each_device,
    over_vocabulary,
    shards_tokens,
    take_sharded,
)
from hydrajax.ops.xla import FEW_ROWS, Xla, parts_first

__all__ = ["parts_first"]  # and the functions below

BACKENDS = {
    "cpu": "hydrajax.ops.cpu.backend:Cpu",
    "gpu": "hydrajax.ops.gpu.backend:Gpu",
    "tpu": "hydrajax.ops.tpu.backend:Tpu",
}  # by JAX's name; `Xla` for every other platform


def here() -> Xla:
    """Return the backend that programs are traced for, with its settings and kernels."""
    return _backend(trace.platform().name)


@functools.cache
def _backend(name: str) -> Xla:
    return pkgutil.resolve_name(BACKENDS[name])() if name in BACKENDS else Xla()


def contract(spec: str, a: Array, b: Array, dtype) -> Array:
    """Return ``einsum(spec, a, b)``, accumulated and returned in ``dtype``.

    Under `jax.default_matmul_precision` ("bfloat16"), float32 inputs (and float32 gradients in the backward pass) are
    rounded to bfloat16 and accumulated in float32.
    """
    return here().contract(spec, a, b, dtype)


def matmul(x: Num[Array, "*rows D"], kernel: Num[Array, "D F"], dtype, *, stored: bool = True) -> Num[Array, "*rows F"]:
    """Return ``x @ kernel``, accumulated and returned in ``dtype``.

    Args:
        x: Rows.
        kernel: The weight.
        dtype: Of the result and the accumulation.
        stored: The kernel lies in memory as it is (it is not dequantised on the way).
    """
    return here().matmul(x, kernel, dtype, stored)


def matmul_transposed(x: Float[Array, "*rows D"], weight: Float[Array, "F D"], dtype) -> Float[Array, "*rows F"]:
    """Return ``x @ weight.T``, accumulated and returned in ``dtype``: an embedding that is also the lm head."""
    return here().matmul_transposed(x.reshape(-1, x.shape[-1]), weight, dtype).reshape(*x.shape[:-1], -1)


def matmul_float32(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"]) -> Float[Array, "*rows F"]:
    """Return ``x @ kernel`` in float32 without rounding the inputs: the scores of a router, which decide.

    An accelerator would round float32 inputs to TF32 or bfloat16.
    """
    wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return here().matmul_float32(wide, kernel).reshape(*x.shape[:-1], -1)


def matmul_parts(
    x: Num[Array, "*rows D"],
    kernel: Num[Array, " D *parts F"],
    dtype,
    *,
    stored: bool = True,
    trained: int | None = None,
) -> Num[Array, "*parts *rows F"]:
    """Return `matmul` of a fused kernel, part by part.

    ``trained``: the number of features of ``x``, from the first on, that need a gradient; None: all.
    """
    return here().matmul_parts(x, kernel, dtype, stored, trained)


def split_heads(qkv: Num[Array, "kv parts B T H"], sizes: Sequence[int]) -> list[Num[Array, "B kv part T H"]]:
    """Return the heads of a fused matmul in parts of these sizes."""
    return here().split_heads(qkv, np.cumsum(sizes)[:-1])


def stored_order(shape: tuple[int, ...], dtype, axes: Iterable[str | None] | None = None) -> tuple[int, ...] | None:
    """Return the order of a weight's axes in memory, outermost first, for `jax.experimental.layout`; None: JAX's own.

    Kernels of experts, by the logical names ``axes``, have a leading axis, which stays the outermost: each expert's is
    one stretch of memory.
    """
    if next(iter(axes or ()), None) == "experts":
        order = stored_order(shape[1:], dtype)
        return None if order is None else (0, *(axis + 1 for axis in order))
    return here().stored_order(shape, dtype)


def trained_order(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return `stored_order` of a fused kernel that is trained."""
    return here().trained_order(shape)


def rotate_halves(
    x: Float[Array, "*rows H"], cos: Float[Array, "*#rows 2 half"], sin: Float[Array, "*#rows 2 half"]
) -> Float[Array, "*rows H"]:
    """Return ``x * cos + y * sin`` in float32, where y is x with the two halves of its last axis exchanged."""
    return here().rotate_halves(x, cos, sin)


def add_norm(
    x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Return ``(sum, sum / rms(sum) * scale)`` of ``x + added``, or of ``x`` alone; statistics in float32."""
    norm = functools.partial(here().add_norm, eps=eps)
    few = x.size <= FEW_ROWS * x.shape[-1]  # kernels have no other norms
    if x.ndim == 3 and few:  # the residual stream, which every device of a mesh has; heads are sharded
        rows = P(axis_over(DATA, len(x)))
        return on_each_device(norm, (rows, rows, P()), rows, x, added, scale)
    x, added = by_token(x), None if added is None else by_token(added)
    total, normed = norm(x, added, scale)
    return by_token(total), by_token(normed)


def take_rows(table: Float[Array, "V D"], index: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Return rows of an embedding; indices outside it are clipped."""
    return take_sharded(here().take_rows, table, index, here().summed_dtype, scattered=shards_tokens(index[..., None]))


def append_rows(
    caches: Sequence[Num[Array, "B kv S _"]],
    blocks: Sequence[Num[Array, "B kv T _"]],
    index: Int[Array, "B R"] | None,
    starts: Int[Array, " B"],
) -> Sequence[Num[Array, "B kv S _"]]:
    """Write the tokens ``index[b]`` of the blocks, or all of them, into ``caches`` from slot ``starts[b]`` on, in
    place. Each device of a mesh writes its part.
    """
    rows, heads = axis_over(DATA, len(starts)), axis_over(MODEL, caches[0].shape[1])
    parts, of_rows = P(rows, heads), P(rows)
    specs = parts, parts, of_rows, of_rows
    return on_each_device(here().append_rows, specs, parts, list(caches), list(blocks), index, starts)


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the argmax over the vocabulary, int32; ties go to the smallest id."""
    return top_tokens(logits, 1)[..., 0]


def top_tokens(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the k best tokens in descending order, int32; ties go to the smallest id."""
    return over_vocabulary(_top, logits, k)


def _top(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    if k == 1:
        return here().argmax(logits)[..., None]
    # The barrier keeps XLA from moving a caller's slice into the selection: its CPU compiler would then sort the whole
    # vocabulary.
    return jax.lax.optimization_barrier(here().top_k(logits, k))


def log_probability(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the natural log-probability of a token, float32."""
    return log_probabilities(logits, tokens[..., None])[..., 0]


def log_probabilities(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Return the natural log-probabilities of some tokens, float32, at most 0."""
    # From differences to the largest logit, so that small log-probabilities keep their digits.
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))


def likeliest_tokens(logits: Float[Array, "*rows V"], k: int) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Return `top_tokens` and their `log_probabilities`."""
    found = here().likeliest(logits, k)
    if found is not None:
        return found
    tokens = top_tokens(logits, k)
    return tokens, log_probabilities(logits, tokens)


def sampled_tokens(keys: Array, logits: Float[Array, "B *n V"], k: int) -> Int[Array, "B *n k"]:
    """Draw k tokens without replacement, in order, int32; each sequence from its own key ``[B]``.

    The k largest logits with Gumbel noise are such a draw (Kool et al. 2019).
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return top_tokens(logits + noise, k)


def over_rows(number: float | Array, like: Float[Array, "B ..."]) -> Array:
    """Return a number, or one per sequence ``[B]``, in a shape that broadcasts against ``like``, float32."""
    number = jnp.asarray(number, jnp.float32)
    return number.reshape(-1, *(1,) * (like.ndim - 1)) if number.ndim else number


def drop(
    x: Float[Array, "*rows D"], rate: float, rng: Array | None, sharding: Callable[[Array], Array] | None = None
) -> Float[Array, "*rows D"]:
    """Apply inverted dropout, which keeps every element's expectation; without a key, return ``x`` as it is.

    Args:
        x: The activations.
        rate: The share of elements to drop.
        rng: The key, on which alone the mask depends.
        sharding: How devices share ``x`` (`hydrajax.ops.sharded`); None: each has all of it.
    """
    x = x if sharding is None else sharding(x)
    if rng is None or rate == 0:
        return x
    keep = here().dropout_mask(jax.random.bernoulli(rng, 1 - rate, x.shape), sharding)
    dropped = jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
    return dropped if sharding is None else sharding(dropped)


def step_rows() -> int:
    """Return the rows (sequences times nodes) that a speculative step of several sequences should have.

    On a CPU each row costs. Other devices wait for the weights with up to some hundred rows (`hydrajax roofline`).
    """
    return here().step_rows()


def host_calls() -> ModuleType | None:
    """Return the module whose ``call_host`` calls Python within a program; None: programs return to Python instead.

    The start of a program takes time for each of its arrays.
    """
    return here().host_calls()


def compiler_options() -> dict[str, str | bool] | None:
    """Return the compiler options of a decode loop for `jax.jit`."""
    return here().compiler_options()
