"""Operations on a GPU: our Pallas kernels for Triton and cuDNN's attention where they apply, else XLA's operations.

Kernels are imported where they are used: Pallas takes a tenth of the package's import.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.xla import Xla, chosen_tokens

FEW_TOKENS = 16  # at most as many as a step accepts
# XLA's default and the last two.
IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "WHILE")


class Gpu(Xla):
    """The operations of a GPU."""

    def _repeats_row(self, x, dtype, stored):
        """cuBLAS has no matmul of a single 16-bit row with a float32 result: XLA would convert the whole weight."""
        return stored and dtype == jnp.float32 and x != jnp.float32

    def stored_order(self, shape, dtype):
        if trace.on_turing() and dtype == jnp.int8 and len(shape) > 1:
            return (*range(1, len(shape)), 0)  # cuBLAS multiplies int8 where both factors have D as their last axis
        return None

    def tree_kernel(self, queries, n_kv):
        if not trace.has_triton():
            return None
        from hydrajax.ops.gpu import tree_attention

        return tree_attention if tree_attention.fits(*queries.shape[2:], queries.dtype) else None

    def text_kernel(self, queries):
        head_dim, sixteen_bit = queries.shape[3], queries.dtype in (jnp.bfloat16, jnp.float16)
        return attend_text if trace.on_ampere() and sixteen_bit and head_dim % 8 == 0 and head_dim <= 128 else None

    def add_norm(self, x, added, scale, eps):
        if not (trace.has_triton() and x.size == x.shape[-1]):
            return super().add_norm(x, added, scale, eps)
        from hydrajax.ops.gpu import add_norm

        rows = x.reshape(-1), None if added is None else added.reshape(-1)
        total, normed = add_norm.add_norm(*rows, scale, eps)
        return total.reshape(x.shape), normed.reshape(x.shape)

    def append_rows(self, caches, blocks, index, starts):
        """Write tokens; a prompt is written block by block, in a few large writes."""
        _, _, n_tokens, head_dim = blocks[0].shape
        if (index is not None or n_tokens <= FEW_TOKENS) and trace.has_triton():
            from hydrajax.ops.gpu import append_rows

            if append_rows.fits(head_dim):
                return append_rows.append_rows(caches, blocks, chosen_tokens(blocks, index), starts)
        return super().append_rows(caches, blocks, index, starts)

    def expert_kernel(self, dtype, *weights):
        """Return our kernel: `ragged_dot` reads all experts, and a loop over the chosen ones copies their matrices."""
        if not trace.has_triton():
            return None
        from hydrajax.ops.gpu import experts

        return experts if all(w is not None and experts.fits(w, dtype) for w in weights) else None

    def gathers_experts(self, rows):
        """Return True for one row, whose experts two kernels read once. Of several rows each would read its own."""
        return rows == 1

    def _slots_of_block(self):
        if not (trace.has_triton() or (trace.on_ampere() and trace.mesh_in_use() is not None)):
            return 1
        from hydrajax.ops.gpu.tree_attention import SLOTS

        return SLOTS

    def compiler_options(self):
        """Run the loop as one CUDA graph: launching the several hundred small kernels of a step would take longer than
        running them.
        """
        if not (trace.platform().capability and trace.platform().cuda_graphs):
            return None
        options = {"xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS), "xla_gpu_graph_min_graph_size": "1"}
        # XLA would join the keys of cache and tree for a single matmul, which our kernels, of newer GPUs, do not.
        return options | {"xla_gpu_dot_merger_threshold_mb": "0"} if trace.on_turing() else options


def attend_text(queries, keys, values, window: int | None) -> Float[Array, "B T width"]:
    """Attend within a text by cuDNN; ``window`` as in `hydrajax.models.attention.Causal`."""
    by_token = (x.swapaxes(1, 2) for x in (queries, keys, values))
    sizes = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(*by_token, is_causal=True, local_window_size=sizes, implementation="cudnn")
    return out.reshape(*out.shape[:2], -1)
