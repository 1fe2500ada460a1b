"""The Hydra++ prefix layer: one decoder layer over the base's hidden states, in front of any heads (hydra 3.1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.costs import DecoderLayers
from hydrajax.drafters.heads import Trained
from hydrajax.drafters.lm_head import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import DType
from hydrajax.models.attention import causal_mask, rope_table, windowed
from hydrajax.models.cache import KVCache, append, init_cache
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.rows import row_layout


class PrefixLayer(nn.Module):
    """A one-layer LLaMA without embedding: decoder layer, then its own final norm."""

    config: LlamaConfig
    dtype: DType

    @nn.compact
    def __call__(self, features, positions, block_mask, cache: KVCache | None = None):
        """Refined features ``[B, T, D]`` and the layer's keys and values for the T tokens."""
        layer = DecoderLayer(self.config, self.dtype, name="layer")
        rope = rope_table(self.config, positions)
        block_mask, first_seen = windowed(block_mask, positions, self.config.sliding_window)
        past = () if cache is None else cache.parts(0, first_seen)
        x, added, block = layer(features.astype(self.dtype), None, rope, block_mask, past)
        return RMSNorm(self.config.norm_eps, self.dtype, name="norm").of_sum(x, added)[1], (block,)


class PrefixState(NamedTuple):
    """The prefix layer's own cache (committed tokens only) and the state of the heads behind it."""

    cache: KVCache
    heads: Any


@dataclass(frozen=True)
class WithPrefix(Trained):
    """``heads`` reading the prefix layer's output in place of h_t; Hydra++ is ``WithPrefix(HydraHeads(...))``.

    The layer runs once per decode step, over the root and the accepted tokens at their true positions, so its cache
    never holds a rejected token. Methods: `hydrajax.drafters.drafter.Trainable`.

    config: the base's. window: the tokens that the layer sees, itself included, or None for all, as in the paper.
    Behind a longer context than the rows it was trained on it guesses worse and worse; a window of their length keeps
    it where it was.
    """

    heads: Any
    config: LlamaConfig
    window: int | None = None

    @property
    def depth(self) -> int:
        return self.heads.depth

    @property
    def n_heads(self) -> int:
        return self.heads.n_heads

    @property
    def reads(self) -> tuple[int, ...]:
        return self.heads.reads

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.heads.vocabulary

    @property
    def draws(self) -> bool:
        return self.heads.draws

    @property
    def grows(self) -> bool:
        return self.heads.grows

    @property
    def default_tree(self) -> str:
        return self.heads.default_tree

    @property
    def layer(self) -> PrefixLayer:
        return PrefixLayer(self.config.plain_layer.replace(sliding_window=self.window), self.heads.dtype)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        cache = init_cache(self.layer.config, batch, slots, self.heads.dtype)
        return PrefixState(cache, self.heads.init_state(batch, slots))

    def advance(self, params, state, features, tokens, counts, next_root, base):
        cache = state.cache
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        refined, block = self.layer.apply(
            {"params": params["prefix"]}, features, positions, causal_mask(tokens.shape[1]), cache
        )
        heads = self.heads.advance(params["heads"], state.heads, refined, tokens, counts, next_root, base)
        return PrefixState(append(cache, block, counts, after=refined[:, 0, 0]), heads)

    def propose(self, params, state, root, tree, base, draw=None):
        return self.heads.propose(params["heads"], state.heads, root, tree, base, draw)

    # --- costs --------------------------------------------------------------------------------------------------------

    def propose_costs(self, tree, batch, slots):
        return self.heads.propose_costs(tree, batch, slots)

    def observe_costs(self, batch, tokens, slots):
        return [DecoderLayers("prefix", self.layer.config, batch, tokens, slots)]

    def teacher_costs(self, length):
        return [DecoderLayers("prefix", self.layer.config, 1, length), *self.heads.teacher_costs(length)]

    # --- training -----------------------------------------------------------------------------------------------------

    def init_boxed(self, rng, base):
        example = jnp.zeros((1, 1, self.config.width), self.heads.dtype)
        position = jnp.zeros((1, 1), jnp.int32)
        layer_params = self.layer.init(jax.random.fold_in(rng, 1), example, position, np.ones((1, 1), bool))["params"]
        return {"prefix": layer_params, "heads": self.heads.init_boxed(jax.random.fold_in(rng, 2), base)}

    def teacher_hidden(self, params, features, tokens, base, rng=None, positions=None, mask=None):
        if positions is None:
            positions, mask = row_layout(tokens)
        refined, _ = self.layer.apply({"params": params["prefix"]}, features, positions, mask)
        return self.heads.teacher_hidden(params["heads"], refined, tokens, base, rng, positions, mask)

    def head_logits(self, params, k, hidden, base, rng=None):
        return self.heads.head_logits(params["heads"], k, hidden, base, rng)

    def trained_on(self, found):
        if not isinstance(found, WithPrefix) or found.config != self.config:
            raise HydrajaxError(f"the heads are {found}, the settings ask for {self}")
        return dataclasses.replace(self, heads=self.heads.trained_on(found.heads))


def heads_of(drafter):
    """The heads, out from behind a prefix layer."""
    return drafter.heads if isinstance(drafter, WithPrefix) else drafter


def window_of(drafter) -> int | None:
    """Of the prefix layer, None for all tokens or where there is no such layer."""
    return drafter.window if isinstance(drafter, WithPrefix) else None


def replace_in_heads(drafter, **changes):
    """`dataclasses.replace`, of the heads behind a prefix layer."""
    changed = dataclasses.replace(heads_of(drafter), **changes)
    return dataclasses.replace(drafter, heads=changed) if isinstance(drafter, WithPrefix) else changed
