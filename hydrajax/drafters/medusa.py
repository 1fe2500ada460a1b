"""Medusa heads: independent guesses from the last hidden state (medusa 2.1.1)."""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.drafters.drafter import last_observed
from hydrajax.drafters.heads import Head
from hydrajax.models.ranking import top_tokens


@dataclass(frozen=True)
class MedusaHeads:
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

    @property
    def depth(self) -> int:
        return self.n_heads

    def head(self) -> Head:
        return Head(
            None, self.n_layers, self.share_blocks, self.lm_head_bias, self.width, self.vocab_size, dtype=self.dtype
        )

    def init(self, rng, base):
        return init_heads([self.head()] * self.n_heads, rng, base)

    def init_state(self, batch, slots):
        return jnp.zeros((batch, self.width), self.dtype)

    def observe(self, params, state, features, tokens, counts, base):
        return last_observed(features, counts)

    def propose(self, params, state, root, tree, base):
        candidates = [root[:, None]]
        head = self.head()
        for k, level in enumerate(tree.levels):
            logits = head.apply({"params": params[f"head_{k}"]}, state)
            candidates.append(top_tokens(logits, level.width)[:, level.ranks])
        return jnp.concatenate(candidates, axis=1)

    def teacher_forced(self, params, features, tokens, base):
        head = self.head()
        return jnp.stack([head.apply({"params": params[f"head_{k}"]}, features) for k in range(self.n_heads)])


def init_heads(heads: list[Head], rng, base) -> dict:
    """Parameters ``{"head_0": ...}``, every lm head starting as a copy of the base's."""
    params = {}
    for k, head in enumerate(heads):
        conditioned = head.path_length is not None
        example = jnp.zeros((1, head.width * (1 + conditioned)), head.dtype)
        path = jnp.zeros((1, head.width * (head.path_length or 0)), head.dtype)
        params[f"head_{k}"] = nn.unbox(head.init(jax.random.fold_in(rng, k), example, path)["params"])
        params[f"head_{k}"]["lm_kernel"] = base.head_kernel().astype(head.dtype)
    return params
