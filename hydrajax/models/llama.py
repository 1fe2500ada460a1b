"""The frozen base model: a LLaMA-family decoder as a pure Flax module. Families differ in their configuration."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.models.adapter import Adapter, LowRank
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import Mask, capped, rope_table, windowed
from hydrajax.models.base_model import BEFORE_FINAL_NORM, Forward
from hydrajax.models.cache import KVCache, PendingKVCache, init_cache
from hydrajax.models.layers import DecoderLayer, RMSNorm, scaled
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.per_layer import PerLayerEmbedding
from hydrajax.models.recurrence import order_of
from hydrajax.models.recurrent_cache import RecurrentCache
from hydrajax.models.weights import Quantized, declare_embedding, declare_kernel, embedded, project
from hydrajax.ops.sharded import by_token


class Llama(nn.Module):
    """LLaMA: RMSNorm, rotary grouped-query attention, SwiGLU, tied or untied lm head, and variants (`LlamaConfig`).

    Parameters and computation share ``dtype``; norms, softmax, rotary angles and logits are float32.

    Attributes:
        dtype: Of parameters and computation.
        quantize: How the matmuls' weights are stored (`hydrajax.models.weights.Quantized`); also the embedding's if it
            is the lm head too and the type stores it.
        adapter: Adds low-rank weights, in the computation's dtype.
        remat: Keep only a layer's input for the gradient and recompute the rest.
        kv_cache: The type of keys and values (`hydrajax.models.kv_vectors.KV_CACHES`); None is ``dtype``.
    """

    config: LlamaConfig
    dtype: DType = jnp.float32
    quantize: str | None = None
    adapter: Adapter | None = None
    remat: bool = False
    kv_cache: str | None = None

    def setup(self):
        c = self.config
        self.embedding = declare_embedding(self, c.vocab_size, c.width, quantize=c.tied_lm_head)
        if c.per_layer_width:
            self.per_layer = PerLayerEmbedding(c, self.dtype, self.quantize)
        self.layers = [self._layer(kind) for kind in c.kinds]
        offset = c.norm_offset and c.final_norm_offset
        self.norm = RMSNorm(c.norm_eps, self.dtype, offset, c.norm_scales != "none")
        self.embedding_norm = RMSNorm(c.norm_eps, self.dtype, scaled=False)
        if not c.tied_lm_head:
            self.lm_head = declare_kernel(self, "lm_head", (c.width, c.vocab_size), ("width", "vocab"))

    @nn.nowrap
    def _layer(self, kind: LayerKind, **settings) -> DecoderLayer:
        layer, config = nn.remat(DecoderLayer) if self.remat else DecoderLayer, self.config
        of_kind = config.of_kind(kind.parameters)
        return layer(of_kind, self.dtype, self.quantize, self.adapter, self.kv_cache, **settings)

    @nn.nowrap
    def _calls(self, x: Array) -> list[Callable]:
        """Return a function for each layer. A program traces and lowers one layer for all of the same parameters,
        which XLA inlines again.
        """
        if self.is_initializing() or self.has_rng("dropout") or not isinstance(x, jax.core.Tracer):
            return list(self.layers)
        params = self.variables["params"]

        def traced_once(kind: LayerKind) -> Callable:
            layer = self._layer(kind, parent=None)

            @jax.jit
            def decoder_layer(params, *inputs, **more):
                return layer.apply({"params": params}, *inputs, **more)

            return decoder_layer

        kinds = [kind.parameters for kind in self.config.kinds]
        of_each = {kind: traced_once(kind) for kind in dict.fromkeys(kinds)}
        return [partial(of_each[kind], params[f"layers_{i}"]) for i, kind in enumerate(kinds)]

    def embed(self, tokens: Int[Array, "*rows"], normed: bool = True) -> Float[Array, "*rows D"]:
        """Return the input embeddings E(x), which Hydra heads read (hydra section 3), as the layers read them;
        without ``normed`` before their norm.
        """
        rows = embedded(self.embedding, tokens, self.dtype)
        if normed and self.config.embedding_norm:
            rows = self.embedding_norm(rows)
        return scaled(rows, self.config.embedding_scale)

    def logits(
        self,
        hidden: Float[Array, "*rows D"],
        tokens: Int[np.ndarray, " V_"] | Int[Array, "*rows V_"] | None = None,
        plain: bool = False,
    ) -> Float[Array, "*rows V_"]:
        """Return float32 next-token logits of all tokens, or of these; see `hydrajax.models.base_model.BaseModel`."""
        logits = self._products(hidden, tokens)
        if plain:
            return logits
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        return capped(logits, self.config.logits_softcap)

    @nn.nowrap
    def _products(self, hidden: Array, tokens: np.ndarray | Array | None) -> Array:
        """Return the matmul with the lm head, float32."""
        head = self._head()
        if tokens is not None and tokens.ndim > 1:  # of each row its own
            rows = self._head_rows(head, tokens).astype(self.dtype)
            return ops.contract("...d,...md->...m", hidden, rows, jnp.float32)
        if isinstance(head, Quantized):
            return project(hidden, head if tokens is None else head.select(tokens, self.dtype), jnp.float32)
        if self.config.tied_lm_head:
            rows = self.embedding if tokens is None else self.embedding[tokens]
            return ops.matmul_transposed(hidden, rows, jnp.float32)
        kernel = head if tokens is None else self._head_kernel()[:, tokens]
        return project(hidden, kernel, jnp.float32)

    @nn.nowrap
    def _head(self) -> Array | Quantized | LowRank:
        return self.embedding if self.config.tied_lm_head else self.lm_head

    @nn.nowrap
    def _head_rows(self, head: Array | Quantized | LowRank, tokens: Array) -> Float[Array, "*rows D"]:
        if isinstance(head, Quantized):
            return head.columns(tokens)
        if self.config.tied_lm_head:
            return ops.take_rows(head, tokens)
        return jnp.moveaxis(jnp.take(self._head_kernel(), tokens, axis=1), 0, -1)

    def head_kernel(self, tokens: Int[np.ndarray, " V_"] | None = None) -> Float[Array, "D V_"]:
        """Return the lm head of all tokens, or of these, as one float array, divided as logits are; without their
        cap.
        """
        whole = tokens is None
        kernel = self._head_kernel() if whole else self._head_rows(self._head(), tokens).astype(self.dtype).T
        return kernel if self.config.logits_divisor == 1.0 else kernel / self.config.logits_divisor

    @nn.nowrap
    def _head_kernel(self) -> Array:
        if self.config.tied_lm_head:
            quantized = isinstance(self.embedding, Quantized)
            return self.embedding.dequantized().astype(self.dtype) if quantized else self.embedding.T
        kernel, added = self.lm_head, None
        if isinstance(kernel, LowRank):
            kernel, added = kernel.kernel, kernel.delta()
        kernel = kernel.dequantized().astype(self.dtype) if isinstance(kernel, Quantized) else kernel
        return kernel if added is None else kernel + added

    @nn.nowrap
    def init_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty cache for this many sequences and tokens."""
        return init_cache(self.config, batch, slots, self.dtype, self.kv_cache)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        block_mask: Mask,
        cache: KVCache | PendingKVCache | None = None,
        aux_hidden_layers: tuple[int, ...] = (0,),
    ) -> Forward:
        """Run T tokens per sequence through the model; see `hydrajax.models.base_model.BaseModel`."""
        rows = ops.here().rows_of_token(tokens.size)  # more than 1 on a TPU, which repeats a pass's only token
        if rows > 1 and isinstance(cache, KVCache) and not self.config.any_experts:
            repeated = (jnp.broadcast_to(x, (1, rows)) for x in (tokens, positions))
            found = self._run(*repeated, np.eye(rows, dtype=bool), cache, aux_hidden_layers)
            block = jax.tree.map(lambda x: x[:, :, :1], found.block)
            return Forward(found.hidden[:, :1], found.aux_hidden_states[:, :1], block)
        return self._run(tokens, positions, block_mask, cache, aux_hidden_layers)

    @nn.nowrap
    def _run(self, tokens, positions, block_mask, cache, aux_hidden_layers) -> Forward:
        embeddings = self.embed(tokens)
        per_layer = self.per_layer(tokens, embeddings) if self.config.per_layer_width else None
        x = by_token(embeddings)
        kinds = {
            kind: (
                rope_table(self.config.of_kind(kind), positions),
                *windowed(block_mask, positions, kind.sliding_window),
            )
            if kind.recurrent is None
            else (None, order_of(block_mask, positions), None)
            for kind in dict.fromkeys(kind.attention for kind in self.config.kinds)
        }
        inputs, block, added = [], [], None
        layers = zip(self._calls(x), self.config.kinds, self.config.kv_layers, strict=True)
        for i, (layer, kind, source) in enumerate(layers):
            rope, mask, first_seen = kinds[kind.attention]
            inputs.append(x if added is None else x + added)
            own = {}
            if kind.shared_kv:
                own["shared"] = block[source]
            if per_layer is not None:
                own["per_layer"] = per_layer[:, :, i]
            if kind.recurrent is None:
                past = () if cache is None else cache.segments(source, first_seen)
            elif cache is None:
                past = RecurrentCache.empty(kind.recurrent, len(tokens), self.dtype)
            else:
                past = cache.layers[i]
            x, added, key_value = layer(x, added, rope, mask, past, **own)
            block.append(key_value)
        last, hidden = self.norm.of_sum(x, added)
        named = {0: hidden, BEFORE_FINAL_NORM: last}
        wanted = [named[place] if place in named else inputs[-place] for place in aux_hidden_layers]
        aux_hidden_states = wanted[0] if len(wanted) == 1 else jnp.concatenate(wanted, axis=-1)
        return Forward(hidden, aux_hidden_states, tuple(block))
