"""Every choice that depends on the backend, each with the figure that justifies it; for products see `products`.

The rest of the package calls these functions and does not depend on the backend. A new kernel for a backend belongs
here, behind the function that it replaces, with its measurement. GPU kernels are imported where they are used: Pallas
takes a tenth of the package's import.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from hydrajax.models import platforms, products
from hydrajax.models.arrays import Array
from hydrajax.models.kernels import few_rows as kernels
from hydrajax.models.per_device import DATA, MODEL, axis_over, mesh_in_use, on_each_device, take_divided
from hydrajax.models.sequence_parallel import by_token, divides_tokens


def attends_few_rows(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether our own CPU kernel attends from these queries."""
    n_tokens, head_dim = queries.shape[2:]
    fits = head_dim % kernels.LANES == 0 and head_dim <= kernels.LONGEST_HEAD
    return fits and products.few_rows(n_tokens, queries.dtype)


def tree_kernel(queries: Float[Array, "B n_heads T H"], n_kv: int) -> ModuleType | None:
    """Return the module whose ``attend`` attends from these queries to a cache and a tree; None: XLA's operations do.

    XLA's own programs move far more bytes (`experiments/results/gpu_program`, `experiments/results/tpu_program`).
    """
    _, n_heads, n_tokens, head_dim = queries.shape
    if platforms.has_triton():
        from hydrajax.models.kernels import tree_attention

        return tree_attention if tree_attention.fits(n_tokens, head_dim, queries.dtype) else None
    if platforms.has_mosaic():
        from hydrajax.models.kernels import tree_attention_tpu

        lines = n_heads // n_kv * n_tokens
        return tree_attention_tpu if tree_attention_tpu.fits(lines, n_tokens, head_dim, queries.dtype) else None
    return None


def attends_text(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether a library attends within a text: it stores no square of scores and compiles at once."""
    if platforms.on_tpu():
        from hydrajax.models.kernels import text_attention_tpu

        return text_attention_tpu.fits(queries) and platforms.has_mosaic()
    head_dim = queries.shape[3]
    sixteen_bit = queries.dtype in (jnp.bfloat16, jnp.float16)
    return platforms.on_ampere() and sixteen_bit and head_dim % 8 == 0 and head_dim <= 128


def attend_text(queries, keys, values, window: int | None) -> Float[Array, "B T width"]:
    """Compute `hydrajax.models.attention.attend` within a text by cuDNN, or on a TPU by splash attention; ``window`` as
    in `Causal`.
    """
    if platforms.on_tpu():
        from hydrajax.models.kernels import text_attention_tpu

        return text_attention_tpu.attend(queries, keys, values, window)
    by_token = (x.swapaxes(1, 2) for x in (queries, keys, values))
    sizes = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(*by_token, is_causal=True, local_window_size=sizes, implementation="cudnn")
    return out.reshape(*out.shape[:2], -1)


def rotate_halves(
    x: Float[Array, "*rows H"], cos: Float[Array, "*#rows 1 half"], sin: Float[Array, "*#rows 2 half"]
) -> Float[Array, "*rows H"]:
    """Return ``x * cos + y * sin`` in float32, where y is x with the two halves of its last axis exchanged.

    On CPUs and GPUs the halves are an axis, whose reversal joins the kernel of its neighbours. A TPU would store them
    in tiles that are a quarter full, so it multiplies by a permutation: exact, as each sum has one term, and faster
    than shifts of lanes.
    """
    wide = x.astype(jnp.float32)
    if platforms.on_tpu():
        cos, sin = (jnp.broadcast_to(t, (*t.shape[:-2], 2, t.shape[-1])) for t in (cos, sin))
        cos, sin = (t.reshape(*t.shape[:-2], -1) for t in (cos, sin))
        exchange = np.roll(np.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        exchanged = jnp.matmul(x, exchange, precision=precision, preferred_element_type=jnp.float32)
        return wide * cos + exchanged * sin
    halves = wide.reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape)


def add_norm(
    x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Return ``(sum, sum / rms(sum) * scale)`` of ``x + added``, or of ``x`` alone; statistics in float32."""
    few = x.size <= kernels.MOST_ROWS * x.shape[-1]  # kernels have no other norms
    if x.ndim == 3 and few:  # the residual stream, which every device of a mesh has; heads are divided
        rows = P(axis_over(DATA, len(x)))
        return on_each_device(partial(_add_norm, eps=eps), (rows, rows, P()), rows, x, added, scale)
    x, added = by_token(x), None if added is None else by_token(added)
    total, normed = _add_norm(x, added, scale, eps)
    return by_token(total), by_token(normed)


def _add_norm(x, added, scale, eps: float):
    if platforms.has_triton() and x.size == x.shape[-1]:
        from hydrajax.models.kernels import add_norm as norm_kernel

        rows = x.reshape(-1), None if added is None else added.reshape(-1)
        total, normed = norm_kernel.add_norm(*rows, scale, eps)
        return total.reshape(x.shape), normed.reshape(x.shape)

    def plain(x, scale, *added):
        total = sum(added, x)
        wide = total.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        if scale.dtype != x.dtype:  # Gemma's: multiplied in float32
            return total, (normed * scale).astype(x.dtype)
        return total, normed.astype(x.dtype) * scale

    summands = (x,) if added is None else (x, added)
    if products.few_rows(x.size // x.shape[-1], x.dtype) and scale.dtype == x.dtype:
        first, *second = (y.reshape(-1, x.shape[-1]) for y in summands)
        total, normed = kernels.add_norm(plain, eps, first, scale, *second)
        return total.reshape(x.shape), normed.reshape(x.shape)
    return plain(x, scale, *summands[1:])


def step_rows() -> int:
    """Return the rows (sequences times nodes) that a speculative step of several sequences should have.

    On a CPU each row costs. Other devices wait for the weights with up to some hundred rows (`hydrajax roofline`).
    """
    return 10 if platforms.on_cpu() else 256


def whole_slots(slots: int) -> int:
    """Return the number of slots to allocate for ``slots``: GPU kernels read blocks, and a TPU stores whole tiles.

    A TPU would keep a cache of another number in another order of axes, and lay it out anew before and after each loop.
    """
    block = 1
    if platforms.has_triton() or (platforms.on_ampere() and mesh_in_use() is not None):
        from hydrajax.models.kernels.tree_attention import SLOTS as block
    elif platforms.on_tpu():
        block = TPU_TILE_ROWS
    return -(-slots // block) * block


TPU_TILE_ROWS = 16  # of bfloat16; a multiple of those of float32


def rows_of_token(tokens: int) -> int:
    """Return how often to feed a pass's only token: on a TPU as often as a tile has rows.

    A single row would be copied into another layout before and after most kernels, and XLA multiplies it slowly
    (`products.matmul`). Several devices would exchange all rows.
    """
    return TPU_TILE_ROWS if tokens == 1 and platforms.on_tpu() and platforms.on_one_device() else 1


def take_rows(table: Float[Array, "V D"], index: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Return rows of an embedding; indices outside it are clipped.

    XLA's CPU gather from bfloat16 first widens the whole table.
    """

    def plain(table, index):
        return jnp.take(table, index, axis=0, mode="clip")

    @kernels.with_gradient_of(plain)
    def copied(table, index):
        rows = jnp.clip(index.reshape(1, -1), 0, len(table) - 1)
        room = jnp.zeros((1, 1, rows.size, table.shape[1]), table.dtype)
        (out,) = kernels.append_rows([room], [table[None, None]], rows, jnp.zeros(1, jnp.int32))
        return out.reshape(*index.shape, table.shape[1])

    widens = table.dtype == jnp.bfloat16 and index.size
    look_up = copied if widens and platforms.has_cpu_kernels() else plain
    return take_divided(look_up, table, index, scattered=divides_tokens(index[..., None]))


# XLA's CPU argmax is a scalar loop, its maximum is not, so the argmax is taken over the maxima of chunks and then
# within one chunk.
ARGMAX_CHUNK, ARGMAX_SMALLEST = 128, 1024


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the index of the largest number of each row, int32; ties go to the smallest index.

    A TPU's own argmax is faster than that of chunks. The barrier keeps it out of the lm head's product, whose tiles it
    would make smaller.
    """
    size = logits.shape[-1]
    if platforms.on_tpu():
        return jnp.argmax(jax.lax.optimization_barrier(logits), axis=-1).astype(jnp.int32)
    if size < ARGMAX_SMALLEST or size % ARGMAX_CHUNK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    return (chunk * ARGMAX_CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def top_k(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the indices of the k largest numbers in descending order, int32; ties go to the smallest index.

    XLA's selection for GPUs reads a row with one block of threads, and for TPUs it sorts whole rows. Here it gets
    chunks' maxima, and then the k chunks with the largest ones. All k best are in these: a number in any other chunk
    comes after the k maxima.
    """
    size = logits.shape[-1]
    if platforms.on_cpu() or size % ARGMAX_CHUNK or size < 2 * k * ARGMAX_CHUNK:
        return jax.lax.top_k(logits, k)[1].astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    best = jnp.sort(jax.lax.top_k(jnp.max(chunks, axis=-1), k)[1], axis=-1)  # in order, for ties
    within = jnp.take_along_axis(chunks, best[..., None], axis=-2)
    places = jax.lax.top_k(within.reshape(*best.shape[:-1], -1), k)[1]
    chunk = jnp.take_along_axis(best, places // ARGMAX_CHUNK, axis=-1)
    return (chunk * ARGMAX_CHUNK + places % ARGMAX_CHUNK).astype(jnp.int32)


FEW_TOKENS = 16  # at most as many as a step accepts


def append_rows(
    caches: Sequence[Num[Array, "B kv S _"]],
    blocks: Sequence[Num[Array, "B kv T _"]],
    index: Int[Array, "B R"] | None,
    starts: Int[Array, " B"],
) -> Sequence[Num[Array, "B kv S _"]]:
    """Write the tokens ``index[b]`` of the blocks, or all of them, into ``caches`` from slot ``starts[b]`` on, in
    place.

    A prompt is written block by block on every backend: a few large writes. Each device of a mesh writes its part.
    """
    rows, heads = axis_over(DATA, len(starts)), axis_over(MODEL, caches[0].shape[1])
    parts, of_rows = P(rows, heads), P(rows)
    return on_each_device(
        _append_rows, (parts, parts, of_rows, of_rows), parts, list(caches), list(blocks), index, starts
    )


def _append_rows(caches, blocks, index, starts):
    batch, _, n_tokens, head_dim = blocks[0].shape
    few = index is not None or n_tokens <= FEW_TOKENS
    chosen = np.broadcast_to(np.arange(n_tokens, dtype=np.int32), (batch, n_tokens)) if index is None else index
    if few and platforms.has_triton():
        from hydrajax.models.kernels import append_rows as append_kernel

        if append_kernel.fits(head_dim):
            return append_kernel.append_rows(caches, blocks, chosen, starts)
    if platforms.has_cpu_kernels():
        return kernels.append_rows(caches, blocks, chosen, starts)
    if index is not None:  # by a gather: see openxla/xla#49176
        blocks = [_rows_of(block, index) for block in blocks]
    return [_write_slots(cache, block, starts) for cache, block in zip(caches, blocks, strict=True)]


def _rows_of(block: Num[Array, "B kv T _"], index: Int[Array, "B R"]) -> Num[Array, "B kv R _"]:
    """Return some tokens of a block.

    For a TPU's gather XLA would copy the block of several sequences, 4 MB each for 8 x 64 nodes of a 7B. A product with
    ones and zeros reads it in place; it is exact, as each sum has one term.
    """
    if not (platforms.on_tpu() and jnp.issubdtype(block.dtype, jnp.floating)):
        return jnp.take_along_axis(block, index[:, None, :, None], axis=2)
    chosen = jax.nn.one_hot(index, block.shape[2], dtype=block.dtype)
    precision = jax.lax.Precision.HIGHEST if block.dtype == jnp.float32 else None
    return jnp.einsum("brt,bktd->bkrd", chosen, block, precision=precision)


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


# XLA's default and the last two.
IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "WHILE")


def host_calls() -> ModuleType | None:
    """Return the module whose ``call_host`` calls Python within a program; None: programs return to Python instead.

    The start of a program takes time for each of its arrays.
    """
    if not (platforms.has_cpu_kernels() and platforms.platform().devices == 1):
        return None
    from hydrajax.models.kernels import call_host

    return call_host


TPU_VECTOR_MEMORY = "xla_tpu_scoped_vmem_limit_kib"


def compiler_options() -> dict[str, str | bool] | None:
    """Return the compiler options of a decode loop for `jax.jit`.

    On a GPU the whole loop becomes one CUDA graph: most of the several hundred kernels of a step move less than a
    megabyte, and launching them one by one would take longer than running them. HYDRAJAX_CUDA_GRAPHS=0 disables it.

    On a TPU a product's kernel gets 32 MB of vector memory in place of 16, for larger tiles of the weight. With more,
    less is left to fetch the next weights into, which is most of what several devices gain: their programs keep 16. A
    limit in LIBTPU_INIT_ARGS has precedence.
    """
    if platforms.on_tpu():
        given = TPU_VECTOR_MEMORY in os.environ.get("LIBTPU_INIT_ARGS", "")
        return None if given or platforms.platform().devices > 1 else {TPU_VECTOR_MEMORY: "32768"}
    if not platforms.platform().capability or os.environ.get("HYDRAJAX_CUDA_GRAPHS") == "0":
        return None
    options = {"xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS), "xla_gpu_graph_min_graph_size": "1"}
    # XLA would join the keys of cache and tree for a single product: 36 MB per layer of a 7B, with 64 nodes and 2048
    # tokens. Our kernels, which newer GPUs have, read both.
    return options | {"xla_gpu_dot_merger_threshold_mb": "0"} if platforms.on_turing() else options
