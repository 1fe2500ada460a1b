"""The parts of a LLaMA decoder layer: RMSNorm, attention, SwiGLU.

The base model, the Hydra++ prefix layer and EAGLE use the same layer. A layer never writes a cache: it returns the
keys and values of the tokens fed now (the block), and the decode step writes only the accepted ones.
"""

from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax import ops
from hydrajax.models.adapter import Adapter
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, attend, rotate
from hydrajax.models.kv_vectors import KeyValue, rounded
from hydrajax.models.latent_settings import LATENT_NORM_EPS
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache
from hydrajax.models.recurrent_settings import GatedDelta, Mamba2, Recurrent, ShortConv
from hydrajax.models.weights import declare, declare_kernel, project, project_parts
from hydrajax.ops.sharded import all_tokens, summed_by_token


def _gated(activation: Callable) -> Callable:
    return lambda gate, up: activation(gate) * up


# What an MLP computes of its first matmul's parts, a gate and a value, or a value alone.
ACTIVATIONS = {
    "silu": _gated(jax.nn.silu),
    "gelu_tanh": _gated(partial(jax.nn.gelu, approximate=True)),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class RMSNorm(nn.Module):
    """x / rms(x) * scale, with statistics in float32; with ``offset`` times 1 + scale, in float32. Without ``scaled``
    there is no scale.
    """

    eps: float
    dtype: DType
    offset: bool = False
    scaled: bool = True

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.of_sum(x, None)[1]

    @nn.compact
    def of_sum(
        self, x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None
    ) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
        """Return ``x + added``, or ``x`` without a summand, and its norm."""
        if not self.scaled:
            return ops.add_norm(x, added, jnp.ones(x.shape[-1], self.dtype), self.eps)
        start = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = declare(self, "scale", (x.shape[-1],), ("width",), start)
        if self.offset:
            scale = 1 + scale.astype(jnp.float32)
        return ops.add_norm(x, added, scale, self.eps)


class DecoderLayer(nn.Module):
    """One LLaMA layer over T tokens, which attend to each other through ``block_mask`` and to ``past``
    segments.

    Query, key and value projections are one matmul, and so are gate and up: a decode step is bound by the bytes of the
    weights and, on a GPU, by the number of kernels. The fused kernel keeps the key-value head as its own axis so that
    it can be sharded by heads. For the same reason the layer returns its contribution to the residual stream
    separately: the next norm adds the two. Norms, scales and the activation are those of the config.

    ``kv_cache`` names the type of keys and values (`hydrajax.models.kv_vectors.KV_CACHES`); None is ``dtype``.
    """

    config: LlamaConfig
    dtype: DType
    quantize: str | None = None
    adapter: Adapter | None = None
    kv_cache: str | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        added: Float[Array, "B T D"] | None,
        rope,
        block_mask,
        past: Sequence[KVSegment] | RecurrentCache = (),
        attends_from: Float[Array, "B T E"] | None = None,
        only_keys_values: bool = False,
        shared: KeyValue | None = None,
        per_layer: Float[Array, "B T p"] | None = None,
    ) -> tuple[
        Float[Array, "B T D"] | None, Float[Array, "B T D"] | None, KeyValue | RecurrentCache | PathNodes | None
    ]:
        """Return two arrays whose sum is the output, the second perhaps None, and the T tokens' keys and values (None
        with ``shared_kv``), or what a state takes in.

        Args:
            added: What the previous layer added to it; None for nothing.
            rope: `rope_table` of the tokens' positions; None without rotary embedding.
            block_mask: The ``visible`` of the tokens' own `KVSegment`; for a recurrent layer, their order
                (`hydrajax.models.recurrence.Order`).
            past: Earlier segments; for a recurrent layer, its cache.
            attends_from: The input of the queries, keys and values in place of the norm of the layer's input, which
                then has no norm of its own (EAGLE's layers).
            only_keys_values: Compute nothing but keys and values, from ``attends_from``; the parameters must exist.
            shared: With ``shared_kv``, the tokens' keys and values in the layer that has them; None where ``past`` is
                all that the tokens attend to.
            per_layer: The tokens' embeddings of this layer (`hydrajax.models.per_layer`).
        """
        c = self.config
        width, parts = x.shape[-1], 1 if c.activation == "relu2" else 2
        has_mlp = c.mlp and (c.experts is None or c.experts.with_mlp)
        if has_mlp:
            gate_up_kernel = declare_kernel(self, "gate_up", (width, parts, c.mlp_width), ("width", None, "mlp"))
            down_kernel = declare_kernel(self, "down", (c.mlp_width, width), ("mlp", "width"))

        norm, out_norm = (
            partial(RMSNorm, eps, self.dtype, c.norm_offset, c.norm_scales != "none")
            for eps in (c.norm_eps, c.norm_eps if c.out_norm_eps is None else c.out_norm_eps)
        )
        if attends_from is None and c.norms != "after":
            x, attends_from = norm(name="attention_norm").of_sum(x, added)
        else:
            x = x if added is None else x + added
            attends_from = x if attends_from is None else attends_from
        if c.recurrent is not None:
            mixer = recurrent_layer(c.recurrent)
            mixed, kept = mixer(c.recurrent, self.dtype, self.quantize, name="recurrent")(
                all_tokens(attends_from), block_mask, past
            )
            mixed = summed_by_token(mixed)
        elif c.latent is not None:
            from hydrajax.models.latent_attention import LatentAttention

            latent_norm = partial(RMSNorm, LATENT_NORM_EPS, self.dtype)
            attention = LatentAttention(c, latent_norm, self.dtype, self.quantize, self.kv_cache, name="latent")
            mixed, kept = attention(all_tokens(attends_from), rope, block_mask, past)
            mixed = summed_by_token(mixed)
        else:
            mixed, kept = self._attention(attends_from, width, rope, block_mask, past, only_keys_values, shared)
            if only_keys_values:
                return None, None, kept
        if c.norms != "before":
            mixed = out_norm(name="attention_out_norm")(mixed)
        mixed = scaled(mixed, c.residual_scale)
        if not c.mlp:
            return x, mixed, kept

        if c.norms == "after":
            x = normed = x + mixed
        else:
            x, normed = norm(name="mlp_norm").of_sum(x, mixed)
        activation = ACTIVATIONS[c.activation]
        normed, out = all_tokens(normed), None
        if has_mlp:
            out = summed_by_token(project(activation(*project_parts(normed, gate_up_kernel)), down_kernel))
        if c.experts is not None:
            from hydrajax.models.experts import ExpertMLP

            experts = ExpertMLP(c.experts, activation, parts, self.dtype, self.quantize, name="experts")
            if has_mlp:  # both read the residual stream, through norms of their own
                read, routed_by = (all_tokens(norm(name=name)(x)) for name in ("experts_norm", "router_norm"))
                routed = norm(name="experts_out_norm")(summed_by_token(experts(read, routed_by)))
                out = norm(name="mlp_alone_out_norm")(out) + routed
            else:
                out = summed_by_token(experts(normed))
        if c.norms != "before":
            out = out_norm(name="mlp_out_norm")(out)
        out = scaled(out, c.residual_scale)
        if per_layer is not None:
            x, out = x + out, self._of_per_layer(x + out, per_layer, activation)
        if c.layer_scale:
            scale = declare(self, "layer_scale", (1,), (None,), nn.initializers.ones)
            x, out = (x + out) * scale, None
        return x, out, kept

    @nn.nowrap
    def _of_per_layer(self, x, per_layer: Float[Array, "B T p"], activation: Callable) -> Float[Array, "B T D"]:
        """Return what the tokens' embeddings of this layer add, gated by its output."""
        c, width = self.config, x.shape[-1]
        gate = declare_kernel(self, "per_layer_gate", (width, c.per_layer_width), ("width", None))
        out = declare_kernel(self, "per_layer_out", (c.per_layer_width, width), (None, "width"))
        added = project(activation(project(x, gate), per_layer), out)
        return RMSNorm(c.norm_eps, self.dtype, c.norm_offset, name="per_layer_norm")(added)

    @nn.nowrap
    def _attention(self, x, width: int, rope, block_mask, past, only_keys_values: bool, shared: KeyValue | None):
        """Return what attention adds, before its norm, and the tokens' keys and values."""
        c, (batch, n_tokens, read_width) = self.config, x.shape
        # Of a key-value head: its queries, perhaps a gate for each of them, its key and its value.
        gates = c.queries_per_kv if c.attention_gate else 0
        own = () if c.shared_kv else (1,) if c.values_are_keys else (1, 1)
        per_head, head_axes = (c.n_kv_heads, c.queries_per_kv + gates + len(own), c.head_dim), ("kv_heads", None, None)
        qkv_kernel = declare_kernel(self, "qkv", (read_width, *per_head), ("width", *head_axes))
        out_kernel = declare_kernel(self, "out", (c.n_heads * c.head_dim, width), ("heads", "width"))
        norm = partial(RMSNorm, c.norm_eps, self.dtype, c.norm_offset, c.norm_scales == "all")
        x = all_tokens(x)
        qkv = project_parts(x, qkv_kernel)  # [kv, queries + key + value, B, T, H]
        if c.qkv_bias:
            qkv = qkv + declare(self, "qkv_bias", per_head, head_axes, nn.initializers.zeros)[:, :, None, None]
        queries, *parts = ops.split_heads(qkv, (c.queries_per_kv, *([gates] if gates else ()), *own))
        queries = queries.reshape(batch, c.n_heads, n_tokens, c.head_dim)
        gate = parts.pop(0) if gates else None

        def placed(x: Array, name: str) -> Array:
            if c.norm_after_rope and rope is not None:
                x = rotate(x, rope)
            if c.qk_norm:
                x = norm(name=name)(x)
            elif c.qk_norm_all_heads:
                x = _norm_all_heads(norm(name=name), x)
            return x if c.norm_after_rope or rope is None else rotate(x, rope)

        queries = placed(queries, "query_norm")
        if rope is not None and rope[2] is not None:
            queries = queries * rope[2].astype(queries.dtype)
        if c.shared_kv:
            kept, block = None, shared
        else:
            keys, values = placed(parts[0][:, :, 0], "key_norm"), parts[-1][:, :, 0]
            if c.value_norm:
                values = RMSNorm(c.norm_eps, self.dtype, scaled=False)(values)
            if self.kv_cache is not None:
                keys, values = rounded(keys, self.kv_cache), rounded(values, self.kv_cache)
            kept = block = (keys, values)
        if only_keys_values:
            return None, kept
        if c.attention_scale is not None:  # attention multiplies by head_dim ** -0.5
            queries = scaled(queries, c.attention_scale * c.head_dim**0.5)
        sinks = None
        if c.attention_sinks:
            sinks = declare(self, "sinks", (c.n_heads,), ("heads",), nn.initializers.zeros)
        segments = past if block is None else [KVSegment(*block, block_mask), *past]
        attended = attend(queries, segments, c.attention_softcap, sinks)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(
                gate.reshape(batch, c.n_heads, n_tokens, c.head_dim).swapaxes(1, 2).reshape(attended.shape)
            )
        if c.head_gate:
            kernel = declare(
                self, "head_gate", (read_width, c.n_heads), ("width", "heads"), nn.initializers.normal(0.02)
            )
            by_head = attended.reshape(batch, n_tokens, c.n_heads, c.head_dim)
            attended = (by_head * jax.nn.sigmoid(project(x, kernel))[..., None]).reshape(attended.shape)
        out = summed_by_token(project(attended, out_kernel))
        if c.out_bias:
            out = out + declare(self, "out_bias", (width,), ("width",), nn.initializers.zeros)
        return out, kept


def recurrent_layer(settings: Recurrent) -> type[nn.Module]:
    """Return the module of a layer with these settings, imported when it is needed."""
    from hydrajax.models.gated_delta import GatedDeltaLayer
    from hydrajax.models.mamba2 import Mamba2Layer
    from hydrajax.models.short_conv import ShortConvLayer

    return {GatedDelta: GatedDeltaLayer, Mamba2: Mamba2Layer, ShortConv: ShortConvLayer}[type(settings)]


def scaled(x: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Return ``x * scale`` in x's dtype."""
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def _norm_all_heads(norm: RMSNorm, x: Float[Array, "B h T H"]) -> Float[Array, "B h T H"]:
    """Norm the features of all heads together."""
    batch, n_heads, n_tokens, head_dim = x.shape
    rows = x.swapaxes(1, 2).reshape(batch, n_tokens, n_heads * head_dim)
    return norm(rows).reshape(batch, n_tokens, n_heads, head_dim).swapaxes(1, 2)
