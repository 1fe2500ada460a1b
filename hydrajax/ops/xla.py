"""Operations in XLA's own, for every platform: the class that a backend's own class overrides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.sharded import shards_tokens

ARGMAX_CHUNK, ARGMAX_SMALLEST = 128, 1024
FEW_ROWS = 64  # of a decode step: our kernels compute no more rows, beyond which XLA is faster


class Xla:
    """The operations of `hydrajax.ops`, whose functions document them, and the kernels and settings of a platform."""

    def contract(self, spec: str, a: Array, b: Array, dtype) -> Array:
        return jnp.einsum(spec, a, b, preferred_element_type=dtype)

    def matmul(self, x, kernel, dtype, stored: bool):
        if dtype == x.dtype and shards_tokens(x):  # the axis of tokens stays one, to be sharded
            return self.contract("btd,df->btf", x, kernel, dtype)
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return self._matmul_rows(flat, kernel, dtype, stored).reshape(*x.shape[:-1], -1)

    def _matmul_rows(self, x, kernel, dtype, stored: bool):
        return self._contract_rows("rd,df->rf", x, kernel, dtype, stored)

    def matmul_transposed(self, x, weight, dtype):
        return self._contract_rows("rd,fd->rf", x, weight, dtype, stored=True)

    def matmul_float32(self, x, kernel):
        return jnp.matmul(x, kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def _contract_rows(self, spec: str, x: Num[Array, "rows D"], weight: Array, dtype, stored: bool) -> Array:
        """Apply `contract` to rows of ``x``; ``r`` in the specification."""
        if len(x) == 1 and self._repeats_row(x.dtype, dtype, stored):
            twice = self.contract(spec, jnp.concatenate([x, x]), weight, dtype)
            return jax.lax.slice_in_dim(twice, 0, 1, axis=spec.partition("->")[2].index("r"))
        return self.contract(spec, x, weight, dtype)

    def _repeats_row(self, x, dtype, stored: bool) -> bool:
        """Return whether a single row of this dtype is multiplied twice, which is faster than once."""
        return False

    def matmul_parts(self, x, kernel, dtype, stored: bool, trained: int | None):
        if shards_tokens(x) and jnp.issubdtype(x.dtype, jnp.floating):
            multiply = functools.partial(self._parts, dtype=dtype, stored=stored)
            return self._with_joint_gradient(multiply, x, kernel, trained)
        return self._parts(x, kernel, dtype, stored)

    def _parts(self, x, kernel, dtype, stored: bool):
        if trace.mesh_in_use() is None:
            return parts_first(self.matmul(x, kernel.reshape(len(kernel), -1), dtype, stored), kernel.shape[1:])
        return self._parts_in_place(x, kernel, dtype, stored)

    def _parts_in_place(self, x, kernel, dtype, stored: bool):
        """Multiply without a reshape of the kernel: on a mesh, one sharded by its last axis would be gathered for it,
        in every step.
        """
        features, flat = kernel.shape[1:], x.reshape(-1, x.shape[-1])
        parts = "kp"[3 - len(features) :]
        out = self._contract_rows(f"rd,d{parts}f->{parts}rf", flat, kernel, dtype, stored)
        return out.reshape(*features[:-1], *x.shape[:-1], features[-1])

    def _with_joint_gradient(self, multiply: Callable, x, kernel, trained: int | None):
        """Return ``multiply(x, kernel)``. The gradient of x, or of its first features, is one matmul with all parts: a
        matmul for each part would write all features again to add them.
        """

        @jax.custom_vjp
        def product(x, kernel):
            return multiply(x, kernel)

        def backward(kept, gradient):
            x, kernel = kept
            parts = "kp"[4 - kernel.ndim :]
            to_x = self.contract(f"{parts}btf,d{parts}f->btd", gradient, kernel[:trained], x.dtype)
            to_x = jnp.pad(to_x, ((0, 0), (0, 0), (0, x.shape[-1] - to_x.shape[-1])))
            return to_x, *jax.vjp(functools.partial(multiply, x), kernel)[1](gradient)

        product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
        return product(x, kernel)

    def split_heads(self, qkv, places):
        return jnp.split(qkv.transpose(2, 0, 1, 3, 4), places, axis=2)

    def stored_order(self, shape: tuple[int, ...], dtype) -> tuple[int, ...] | None:
        return None

    def trained_order(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return None

    def tree_kernel(self, queries: Float[Array, "B n_heads T H"], n_kv: int) -> ModuleType | None:
        """Return the module whose ``attend`` attends from these queries to a cache and a tree; None: XLA does."""
        return None

    def text_kernel(self, queries: Float[Array, "B n_heads T H"]) -> Callable | None:
        """Return ``attend(queries, keys, values, window)`` within a text, which keeps no square of scores; None: XLA
        attends.
        """
        return None

    def text_kernel_with_sinks(self, queries: Float[Array, "B n_heads T H"]) -> Callable | None:
        """Return the same with the heads' sinks as a fifth argument."""
        return None

    def rows_kernel(self, queries: Float[Array, "B n_heads T H"]) -> Callable | None:
        """Return ``attend(queries, segments, sinks, plain)`` for a few queries; None: XLA attends."""
        return None

    def path_kernel(self, n_tokens: int, width: int) -> ModuleType | None:
        """Return the module whose ``walk`` and ``advance`` are a recurrent layer's for this many nodes and features of
        a key; None: XLA's matmuls are.
        """
        return None

    def rotate_halves(self, x, cos, sin):
        # The halves are an axis, whose reversal joins the kernel of its neighbours.
        halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
        return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape)

    def add_norm(self, x, added, scale, eps: float):
        return plain_norm(eps, x, scale, *(() if added is None else (added,)))

    def take_rows(self, table, index):
        return jnp.take(table, index, axis=0, mode="clip")

    def summed_dtype(self, dtype):
        """Return the dtype in which devices sum numbers of this dtype."""
        return dtype

    def argmax(self, logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
        """Return the index of the largest number of each row, int32; ties go to the smallest index.

        XLA's argmax is a scalar loop on a CPU, and its maximum is not: take the argmax of chunks' maxima, and of one
        chunk.
        """
        size = logits.shape[-1]
        if size < ARGMAX_SMALLEST or size % ARGMAX_CHUNK:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
        chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
        inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
        return (chunk * ARGMAX_CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)

    def top_k(self, logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
        """Return the indices of the k largest numbers in descending order, int32; ties go to the smallest index.

        XLA's selection reads a row with one block of a GPU's threads, and sorts whole rows on a TPU. So it gets chunks'
        maxima, and then the k chunks with the largest ones: a number in any other chunk comes after the k maxima.
        """
        size = logits.shape[-1]
        if size % ARGMAX_CHUNK or size < 2 * k * ARGMAX_CHUNK:
            return jax.lax.top_k(logits, k)[1].astype(jnp.int32)
        chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
        best = jnp.sort(jax.lax.top_k(jnp.max(chunks, axis=-1), k)[1], axis=-1)  # in order, for ties
        within = jnp.take_along_axis(chunks, best[..., None], axis=-2)
        places = jax.lax.top_k(within.reshape(*best.shape[:-1], -1), k)[1]
        chunk = jnp.take_along_axis(best, places // ARGMAX_CHUNK, axis=-1)
        return (chunk * ARGMAX_CHUNK + places % ARGMAX_CHUNK).astype(jnp.int32)

    def likeliest(
        self, logits: Float[Array, "*rows V"], k: int
    ) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]] | None:
        """Return `top_k` and its log-probabilities in one kernel, or None without one."""
        return None

    def append_rows(self, caches: Sequence, blocks: Sequence, index, starts) -> Sequence:
        if index is not None:  # by a gather: see openxla/xla#49176
            blocks = [self._tokens(block, index) for block in blocks]
        return [_write_slots(cache, block, starts) for cache, block in zip(caches, blocks, strict=True)]

    def _tokens(self, block: Num[Array, "B kv T _"], index: Int[Array, "B R"]) -> Num[Array, "B kv R _"]:
        return jnp.take_along_axis(block, index[:, None, :, None], axis=2)

    def dropout_mask(self, keep: Bool[Array, "..."], sharding: Callable[[Array], Array] | None) -> Bool[Array, "..."]:
        """Return a mask of elements to keep as a kernel reads it."""
        return keep

    def multiplies_pairs(self, dtype, kernel) -> bool:
        """Return whether CPU kernels multiply tokens of this dtype with their experts' matrices of that dtype."""
        return False

    def expert_kernel(self, dtype, *weights: jax.ShapeDtypeStruct | None) -> ModuleType | None:
        """Return the module whose ``matmul`` multiplies rows of this dtype with experts' weights ``[E, D, F]``; None:
        XLA's operations do.
        """
        return None

    def gathers_experts(self, rows: int) -> bool:
        """Return whether XLA gathers the matrices of each token's experts while it multiplies, without a copy."""
        return False

    def step_rows(self) -> int:
        return 256

    def padded_slots(self, slots: int) -> int:
        """Return the number of cache slots to allocate for ``slots``: a multiple of a kernel's or a tile's rows."""
        return -(-slots // self._slots_of_block()) * self._slots_of_block()

    def _slots_of_block(self) -> int:
        return 1

    def rows_of_token(self, tokens: int) -> int:
        """Return how often to feed a pass's only token."""
        return 1

    def host_calls(self) -> ModuleType | None:
        return None

    def compiler_options(self) -> dict[str, str | bool] | None:
        return None


def with_gradient_of(plain: Callable) -> Callable[[Callable], Callable]:
    """Give a kernel the gradient of ``plain``, which computes the same."""

    def wrap(kernel):
        wrapped = jax.custom_vjp(kernel)
        wrapped.defvjp(lambda *args: (kernel(*args), args), lambda args, slope: jax.vjp(plain, *args)[1](slope))
        return wrapped

    return wrap


def plain_norm(eps: float, x, scale, *added):
    """Return ``x`` plus the summand, if there is one, and its RMSNorm, with statistics in float32."""
    total = sum(added, x)
    wide = total.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale.dtype != x.dtype:  # Gemma's: multiplied in float32
        return total, (normed * scale).astype(x.dtype)
    return total, normed.astype(x.dtype) * scale


def parts_first(product: Num[Array, "*rows F"], features: Iterable[int]) -> Num[Array, "*parts *rows f"]:
    """Return a fused matmul's result with the parts, all features but the last, as leading axes."""
    rows, parts = product.ndim - 1, len(features) - 1
    split = product.reshape(*product.shape[:-1], *features)
    return jnp.moveaxis(split, range(rows, rows + parts), range(parts))


def chosen_tokens(blocks: Sequence[Num[Array, "B kv T _"]], index: Int[Array, "B R"] | None) -> Int[Array, "B R"]:
    """Return the tokens to append: ``index``, or all tokens of the blocks."""
    batch, _, n_tokens, _ = blocks[0].shape
    return np.broadcast_to(np.arange(n_tokens, dtype=np.int32), (batch, n_tokens)) if index is None else index


def _write_slots(
    slots: Num[Array, "B kv S H"], rows: Num[Array, "B kv R H"], starts: Int[Array, " B"]
) -> Num[Array, "B kv S H"]:
    """Write ``rows`` into ``slots`` from slot ``starts[b]`` of each sequence on.

    A batch of one is a plain slice update. The batched form becomes a scatter, which is slower on every backend.
    """
    if slots.shape[0] == 1:
        return jax.lax.dynamic_update_slice(slots, rows, (0, 0, starts[0], 0))
    update = jax.vmap(lambda s, r, at: jax.lax.dynamic_update_slice(s, r, (0, at, 0)))
    return update(slots, rows, starts)
