"""Medusa heads: independent guesses from the last hidden state (medusa 2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from hydrajax.drafters.heads import Head, HeadStack
from hydrajax.models.ranking import sampled_tokens, top_tokens


@dataclass(frozen=True)
class MedusaHeads(HeadStack):
    """Head k maps h_t to the distribution of token t + 2 + k: W2 (SiLU(W1 h) + h), more blocks if ``n_layers`` > 1.

    ``lm_head_bias=True`` gives the *ungrounded* heads of the released Hydra code. State: the last hidden state
    ``[B, D]``. Methods: `hydrajax.drafters.drafter.Drafter`.
    """

    n_heads: int
    width: int
    vocab_size: int
    n_layers: int = 1
    share_blocks: bool = True
    lm_head_bias: bool = False
    hidden_state_offset: int = 0
    dtype: jnp.dtype = jnp.float32
    dropout: float = 0.0

    def head(self, k: int) -> Head:
        return Head(
            None,
            self.n_layers,
            self.share_blocks,
            self.lm_head_bias,
            self.width,
            self.vocab_size,
            dtype=self.dtype,
            dropout=self.dropout,
        )

    def propose(self, params, state, root, tree, base):
        candidates = [root[:, None]]
        for k, level in enumerate(tree.levels):
            logits = self.head(k).apply({"params": params[f"head_{k}"]}, state)
            candidates.append(top_tokens(logits, level.width)[:, level.ranks])
        return jnp.concatenate(candidates, axis=1)

    def sample(self, params, state, root, tree, base, keys, temperature):
        """Every parent of a level draws its own children from the same distribution."""
        candidates, drawn_from = [root[:, None]], []
        for k, level in enumerate(tree.levels):
            logits = self.head(k).apply({"params": params[f"head_{k}"]}, state) / temperature
            logits = jnp.broadcast_to(logits[:, None], (len(root), len(level.parents), self.vocab_size))
            drawn = sampled_tokens(keys[:, k], logits, level.width)
            candidates.append(drawn[:, level.parent_slot, level.ranks])
            drawn_from.append(logits)
        return jnp.concatenate(candidates, axis=1), jnp.concatenate(drawn_from, axis=1)

    def teacher_inputs(self, features, tokens, base):
        return [(features.astype(self.dtype),)] * self.n_heads
