"""The gated delta layer in place of attention (arXiv 2412.06464; Qwen3-Next, OLMo hybrid)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.models.arrays import Array, DType
from hydrajax.models.recurrence import Order, Tokens, convolve, heads_of, run, square_sum, stored
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache
from hydrajax.models.recurrent_settings import GatedDelta
from hydrajax.models.weights import declare, declare_kernel, project, project_parts

L2_EPS = 1e-6  # of the norms of queries and keys


class GatedDeltaLayer(nn.Module):
    """Queries, keys and values from a short convolution, a state per value head, and a gated norm.

    The gates of decay and strength stay in float: they decide, and are small. Kernels keep the key head as an axis of
    its own, with its query, its key, and its values and gates side by side, so that they can be sharded by heads.
    """

    settings: GatedDelta
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it; an adapter does not reach states

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], order: Order, past: RecurrentCache
    ) -> tuple[Float[Array, "B T D"], RecurrentCache | PathNodes]:
        """Return what the layer adds, and what its cache takes in of these tokens."""
        s, (batch, n_tokens, width), normal = self.settings, x.shape, nn.initializers.normal(0.02)
        values = s.values_per_key * s.value_dim
        channels, by_head = s.inputs_shape[-1], ("kv_heads", None)
        kernel = declare_kernel(self, "inputs", (width, s.key_heads, channels + values), ("width", *by_head))
        gates = declare(self, "gates", (width, s.key_heads, 2 * s.values_per_key), ("width", *by_head), normal)
        conv = declare(self, "conv", (s.key_heads, channels, s.kernel), (*by_head, None), normal)
        heads = (s.key_heads, s.values_per_key)
        log_rate = declare(self, "log_rate", heads, by_head, nn.initializers.zeros)
        step_bias = declare(self, "step_bias", heads, by_head, nn.initializers.ones)
        scale = declare(self, "norm_scale", (s.value_dim,), (None,), nn.initializers.ones)
        out_kernel = declare_kernel(self, "output", (s.value_heads * s.value_dim, width), ("heads", "width"))

        inputs, gate = jnp.split(jnp.moveaxis(project_parts(x, kernel), 0, 1), [channels], axis=-1)
        mixed = jax.nn.silu(convolve(inputs, past.inputs, conv, order))
        queries, keys, values = jnp.split(mixed.astype(jnp.float32), [s.key_dim, 2 * s.key_dim], axis=-1)
        beta, step = jnp.split(jnp.moveaxis(project_parts(x, gates), 0, 1), 2, axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + step_bias[:, None])
        tokens = Tokens(
            _unit(queries) * s.key_dim**-0.5,
            _unit(keys),
            heads_of(values, s.values_per_key),
            jnp.moveaxis(-jnp.exp(log_rate.astype(jnp.float32))[:, None] * step, -1, 2),
            jnp.moveaxis(s.most_beta * jax.nn.sigmoid(beta).astype(jnp.float32), -1, 2),
        )
        outputs, kept = run(tokens, order, past.state)
        outputs = outputs.astype(self.dtype).astype(jnp.float32)
        normed = outputs * jax.lax.rsqrt(square_sum(outputs) / s.value_dim + s.norm_eps)
        gate = jax.nn.silu(heads_of(gate, s.values_per_key).astype(jnp.float32))
        normed = ((scale * normed.astype(self.dtype)) * gate).astype(self.dtype)
        normed = jnp.moveaxis(normed, 3, 1).reshape(batch, n_tokens, -1)
        return project(normed, out_kernel), stored(inputs, past, order, kept)


def _unit(x: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Return vectors of length 1."""
    return x * jax.lax.rsqrt(square_sum(x) + L2_EPS)
