"""Amphista (amphista 3): heads that predict all tokens in one pass and attend to each other.

Staged adaptation layers, causal decoder layers with their own keys and values, read at position i the base's hidden
state and the embedding of the token that *follows*, i + 1. The first heads read the first stage's output, the last
heads the last stage's. Each head's MLP produces the input of the auto-embedding block: the K heads as a sequence of
length K, with learnt positions, each attending to all. Every head has its own lm head.

The paper leaves some details open, and there is no released code. Here fc has a bias and starts by passing the hidden
state through, a head's MLP is Medusa's residual block, and the auto-embedding block, in the paper a "Transformer
encoder", is a LLaMA layer without mask and rotary embedding. A fresh draft therefore predicts nearly what the base
predicts.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import following_tokens, last_observed
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.medusa import AtOnce
from hydrajax.drafters.settings import HeadSettings, at_least
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, causal_mask, rope_table
from hydrajax.models.cache import KVCache, append, init_cache
from hydrajax.models.layers import DecoderLayer
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import row_layout
from hydrajax.models.weights import declare, project


class AmphistaState(NamedTuple):
    """The state of Amphista.

    Attributes:
        cache: One layer per adaptation layer, for positions that the base has processed.
        adapted: ``[B, D]`` each stage's output at the last of these positions, which the heads read.
    """

    cache: KVCache
    adapted: tuple[Float[Array, "B D"], ...]


class AdaptationLayer(nn.Module):
    """One stage: SAL(fc([h_i; e_{i+1}])) (amphista 3.1, equation 1); without ``reads_token`` SAL(h_i), without fc."""

    config: LlamaConfig
    dtype: DType
    reads_token: bool

    @nn.compact
    def __call__(self, hidden, embeddings, positions, block_mask, past=()):
        """Return outputs ``[B, T, D]`` at T positions, and their keys and values."""
        x = hidden
        if self.reads_token:
            width, axes = hidden.shape[-1], ("width", "mlp")
            kernel = declare(self, "fc", (2 * width, width), axes, _hidden_state_passes)
            bias = declare(self, "fc_bias", (width,), axes[1:], nn.initializers.zeros)
            x = project(jnp.concatenate([hidden, embeddings], axis=-1), kernel) + bias
        layer = DecoderLayer(self.config, self.dtype, name="layer")
        x, added, block = layer(x, None, rope_table(self.config, positions), block_mask, past)
        return x + added, block


def _hidden_state_passes(rng, shape, dtype):
    del rng
    return jnp.eye(*shape, dtype=dtype)


class AutoEmbedding(nn.Module):
    """Unmasked self-attention among the heads of a position (amphista 3.2, equations 4, 5)."""

    config: LlamaConfig
    dtype: DType
    n_layers: int
    position_encoding: bool

    @nn.compact
    def __call__(self, x: Float[Array, "rows K D"]) -> Float[Array, "rows K D"]:
        num_draft_heads, width = x.shape[1:]
        if self.position_encoding:
            x = x + declare(self, "positions", (num_draft_heads, width), (None, "width"), nn.initializers.normal(0.02))
        added, everything = None, np.ones((num_draft_heads, num_draft_heads), bool)
        for i in range(self.n_layers):
            x, added, _ = DecoderLayer(self.config, self.dtype, name=f"layer_{i}")(x, added, None, everything)
        return x if added is None else x + added


@dataclass(frozen=True)
class AmphistaSettings(HeadSettings):
    """Settings of Amphista heads; see `AmphistaHeads`."""

    adaptation_layers: int = 2
    auto_embedding_layers: int = 1
    position_encoding: bool = True
    reads_token: bool = True
    mlp_width: int | None = None

    def __post_init__(self):
        super().__post_init__()
        at_least("draft.adaptation_layers", self.adaptation_layers, 0)
        at_least("draft.auto_embedding_layers", self.auto_embedding_layers, 0)
        at_least("draft.mlp_width", self.mlp_width, 1)


@dataclass(frozen=True)
class AmphistaHeads(AtOnce):
    """K heads that are not sequential.

    Attributes:
        config: Configuration of the adaptation and auto-embedding layers, with the base's width and vocabulary.
        n_layers: Residual blocks of each head's MLP.
        adaptation_layers: Stages, S; head k reads stage S * k // K. Ablations: 1, one stage for all heads; 0, the
            base's hidden state and no token.
        auto_embedding_layers: 2 is Amphista-α (A.2.4); 0 is an ablation with independent heads.
        position_encoding: Add learnt positions to the heads in the auto-embedding block.
        reads_token: The adaptation layers read the token that follows.
        mlp_width: Width of the MLPs of all these layers; None for the base's.
    """

    num_draft_heads: int
    config: LlamaConfig
    n_layers: int = 1
    adaptation_layers: int = 2
    auto_embedding_layers: int = 1
    position_encoding: bool = True
    reads_token: bool = True
    mlp_width: int | None = None
    dtype: DType = jnp.float32
    small_lm_head: LmHead | None = None
    share_blocks: ClassVar[bool] = False
    hidden_state_offset: ClassVar[int] = 0
    dropout: ClassVar[float] = 0.0
    prefix: ClassVar[None] = None
    Settings = AmphistaSettings

    def __post_init__(self):
        if not 0 <= self.adaptation_layers <= self.num_draft_heads:
            most = self.num_draft_heads
            raise HydrajaxError(
                f"adaptation_layers: got {self.adaptation_layers}, expected 0 to num_draft_heads, {most}"
            )

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return heads with layers like the base's."""
        s = settings or AmphistaSettings()
        return cls(
            s.num_draft_heads, base.plain_layer, s.n_layers, s.adaptation_layers, s.auto_embedding_layers,
            s.position_encoding,
            s.reads_token, s.mlp_width, jnp.dtype(dtype), s.small_lm_head(base, target_counts),
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def lm_head(self) -> LmHead:
        return self.small_lm_head or LmHead()

    @property
    def layer_config(self) -> LlamaConfig:
        """Configuration of one layer."""
        return self.config if self.mlp_width is None else self.config.replace(mlp_width=self.mlp_width)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        if self.adaptation_layers:
            layers = self.layer_config.replace(n_layers=self.adaptation_layers)
            cache = init_cache(layers, batch, slots, self.dtype)
        else:
            cache = KVCache((), jnp.zeros(batch, jnp.int32))
        nothing = jnp.zeros((batch, self.width), self.dtype)
        return AmphistaState(cache, (nothing,) * max(self.adaptation_layers, 1))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """Run the adaptation layers over these tokens, each with the token that follows it."""
        cache, n_tokens = state.cache, tokens.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(n_tokens)
        past = [cache.segments(s) for s in range(self.adaptation_layers)]
        following = following_tokens(tokens, counts, bonus_token)
        outputs, block = self._adapt(params, aux_hidden_states, following, positions, causal_mask(n_tokens), base, past)
        if block:
            cache = append(cache, block, counts, after=outputs[-1][:, 0, 0])
        else:
            cache = cache._replace(lengths=cache.lengths + counts)
        return AmphistaState(cache, tuple(last_observed(output, counts) for output in outputs))

    def propose(self, params, state, root, tree, base, draw=None):
        """Fill all levels in one pass; the adaptation layers have already read the root."""
        hidden = self._heads_together(params, [x[:, None] for x in state.adapted])
        return self.filled(params, hidden, root, tree, base, draw)

    # --- training -----------------------------------------------------------------------------------------------------

    def init_boxed(self, rng: Array, base) -> Any:
        """Return fresh parameters; every lm head starts as a copy of the base's."""
        params, vector = super().init_boxed(rng, base), jnp.zeros((1, 1, self.width), self.dtype)
        keys = jax.random.split(jax.random.fold_in(rng, self.num_draft_heads), self.adaptation_layers + 1)
        for s in range(self.adaptation_layers):
            example = vector, vector, jnp.zeros((1, 1), jnp.int32), np.ones((1, 1), bool)
            params[f"adaptation_{s}"] = dict(self._adaptation.init(keys[s], *example)["params"])
        if self.auto_embedding_layers:
            heads = jnp.zeros((1, self.num_draft_heads, self.width), self.dtype)
            params["auto_embedding"] = dict(self._auto_embedding.init(keys[-1], heads)["params"])
        return params

    def teacher_hidden(self, params, aux_hidden_states, tokens, base, rng=None, positions=None, mask=None):
        """Return the inputs of the lm heads at position t given the true token t + 1; the last position must be
        masked.
        """
        if positions is None:
            positions, mask = row_layout(tokens)
        adapted, _ = self._adapt(params, aux_hidden_states, jnp.roll(tokens, -1, axis=1), positions, mask, base)
        return self._heads_together(params, adapted)

    # --- the network --------------------------------------------------------------------------------------------------

    @property
    def _adaptation(self) -> AdaptationLayer:
        return AdaptationLayer(self.layer_config, self.dtype, self.reads_token)

    @property
    def _auto_embedding(self) -> AutoEmbedding:
        return AutoEmbedding(self.layer_config, self.dtype, self.auto_embedding_layers, self.position_encoding)

    def _adapt(
        self,
        params,
        aux_hidden_states: Float[Array, "B T D"],
        following: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask,
        base,
        past: list[tuple[KVSegment, ...]] | None = None,
    ) -> tuple[list[Float[Array, "B T D"]], tuple]:
        """Return the output of every stage at T positions, and their keys and values by stage.

        Args:
            following: The token after each position.
            past: Each stage's segments of earlier positions.
        """
        hidden, outputs, block = aux_hidden_states.astype(self.dtype), [], []
        embeddings = base.embed(following).astype(self.dtype) if self.reads_token else None
        for s in range(self.adaptation_layers):
            hidden, keys_values = self._adaptation.apply(
                {"params": params[f"adaptation_{s}"]}, hidden, embeddings, positions, mask, past[s] if past else ()
            )
            outputs.append(hidden)
            block.append(keys_values)
        return outputs or [hidden], tuple(block)

    def _heads_together(self, params, adapted: list[Float[Array, "B T D"]]) -> tuple[Float[Array, "B T D"], ...]:
        """Return what the lm head of each head reads at T positions, from the stages' outputs there."""
        stages = [self.adaptation_layers * k // self.num_draft_heads for k in range(self.num_draft_heads)]
        hidden = [self.apply_head(params, k, adapted[stage], method="hidden") for k, stage in enumerate(stages)]
        if not self.auto_embedding_layers:
            return tuple(hidden)
        batch, n_places, width = hidden[0].shape
        rows = jnp.stack(hidden, axis=2).reshape(batch * n_places, self.num_draft_heads, width)
        rows = self._auto_embedding.apply({"params": params["auto_embedding"]}, rows)
        rows = rows.reshape(batch, n_places, self.num_draft_heads, width)
        return tuple(rows[:, :, k] for k in range(self.num_draft_heads))


KIND = DrafterKind("Amphista", AmphistaHeads)
