"""The Hydra++ prefix layer (hydra 3.1): a decoder layer over the base's hidden states, in front of the draft heads."""

from dataclasses import dataclass
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.drafters.drafter import last_observed
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import causal_mask, rope_table, windowed
from hydrajax.models.cache import KVCache, append, init_cache
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LlamaConfig


class PrefixLayer(nn.Module):
    """A one-layer LLaMA without embedding: decoder layer, then its own final norm."""

    config: LlamaConfig
    dtype: DType

    @nn.compact
    def __call__(self, aux_hidden_states, positions, block_mask, cache: KVCache | None = None):
        """Return refined hidden states ``[B, T, D]`` and the layer's keys and values for the T tokens."""
        layer = DecoderLayer(self.config, self.dtype, name="layer")
        rope = rope_table(self.config, positions)
        block_mask, first_seen = windowed(block_mask, positions, self.config.sliding_window)
        past = () if cache is None else cache.segments(0, first_seen)
        x, added, block = layer(aux_hidden_states.astype(self.dtype), None, rope, block_mask, past)
        return RMSNorm(self.config.norm_eps, self.dtype, name="norm").of_sum(x, added)[1], (block,)


class PrefixState(NamedTuple):
    """The prefix layer's own cache, of accepted tokens only, and its output ``[B, D]`` at the last of them."""

    cache: KVCache
    hidden: Float[Array, "B D"]


@dataclass(frozen=True)
class Prefix:
    """The prefix layer of draft heads, which read its output in place of h_t; Hydra++ is Hydra with one.

    The layer runs once per decode step, over the root and the accepted tokens at their true positions, so its cache
    never holds a rejected token.

    Attributes:
        config: The base's.
        window: Number of tokens that the layer attends to, itself included; None for all, as in the paper. Beyond the
            length of its training rows the layer's predictions degrade; a window of that length prevents this.
    """

    config: LlamaConfig
    window: int | None = None

    @property
    def layer_config(self) -> LlamaConfig:
        return self.config.plain_layer.replace(sliding_window=self.window)

    def layer(self, dtype: DType) -> PrefixLayer:
        return PrefixLayer(self.layer_config, dtype)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch: int, slots: int, dtype: DType) -> PrefixState:
        cache = init_cache(self.layer_config, batch, slots, dtype)
        return PrefixState(cache, jnp.zeros((batch, self.config.width), dtype))

    def advance(
        self,
        params,
        state: PrefixState,
        aux_hidden_states: Float[Array, "B T D"],
        counts: Int[Array, " B"],
        dtype: DType,
    ) -> PrefixState:
        """Run the layer over the first ``counts[b]`` of T more tokens."""
        cache, n_tokens = state.cache, aux_hidden_states.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(n_tokens)
        refined, block = self.layer(dtype).apply(
            {"params": params}, aux_hidden_states, positions, causal_mask(n_tokens), cache
        )
        hidden = last_observed(refined, counts)
        return PrefixState(append(cache, block, counts, after=refined[:, 0, 0]), hidden)

    # --- training -----------------------------------------------------------------------------------------------------

    def init_boxed(self, rng: Array, dtype: DType):
        """Return fresh parameters with their logical axes."""
        example = jnp.zeros((1, 1, self.config.width), dtype)
        position = jnp.zeros((1, 1), jnp.int32)
        return self.layer(dtype).init(rng, example, position, np.ones((1, 1), bool))["params"]

    def refine_rows(
        self, params, aux_hidden_states, tokens, dtype: DType, positions=None, mask=None
    ) -> Float[Array, "B T D"]:
        """Run the layer over whole rows without a cache; see `TeacherForced.teacher_hidden`."""
        if positions is None:
            from hydrajax.models.packed_forward import row_layout  # for training alone

            positions, mask = row_layout(tokens)
        return self.layer(dtype).apply({"params": params}, aux_hidden_states, positions, mask)[0]
