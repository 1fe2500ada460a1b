"""Hydra heads: sequentially dependent guesses (hydra section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from hydrajax.drafters.heads import Head, HeadStack
from hydrajax.models.ranking import sampled_tokens, top_tokens


@dataclass(frozen=True)
class HydraHeads(HeadStack):
    """Head k sees [h_t, E(x_{t+1}), E(x̂_{t+2}) ... E(x̂_{t+1+k})], so it knows the tokens before it on its path.

    ``n_layers`` 1 is Hydra, 4 (with a prefix layer, `hydrajax.drafters.prefix`) is Hydra++ (hydra 3.1). State: the
    last hidden state ``[B, D]``. Methods: `hydrajax.drafters.drafter.Drafter`.
    """

    n_heads: int
    width: int
    vocab_size: int
    n_layers: int = 1
    share_blocks: bool = True
    hidden_state_offset: int = 0
    dtype: jnp.dtype = jnp.float32
    dropout: float = 0.0

    def head(self, k: int) -> Head:
        return Head(
            k,
            self.n_layers,
            self.share_blocks,
            lm_head_bias=True,
            width=self.width,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            dropout=self.dropout,
        )

    def propose(self, params, state, root, tree, base):
        return self._fill(params, state, root, tree, base, lambda k, logits, width: top_tokens(logits, width))

    def sample(self, params, state, root, tree, base, keys, temperature):
        drawn_from = []

        def draw(k, logits, width):
            drawn_from.append(logits / temperature)
            return sampled_tokens(keys[:, k], drawn_from[-1], width)

        candidates = self._fill(params, state, root, tree, base, draw)
        return candidates, jnp.concatenate(drawn_from, axis=1)

    def _fill(self, params, state, root, tree, base, rank):
        """Level by level: one head call for all parents of a level, one ``rank(k, logits, width)`` at its widest."""
        batch = root.shape[0]
        candidates = root[:, None]
        shared = jnp.concatenate([state, base.embed(root).astype(self.dtype)], axis=-1)[:, None]
        for k, level in enumerate(tree.levels):
            # Nodes are ordered by depth, so the candidates so far hold every path down to this level's parents.
            path = base.embed(candidates[:, level.paths[:, 1:]]).astype(self.dtype)
            path = path.reshape(batch, len(level.parents), -1)
            logits = self.head(k).apply({"params": params[f"head_{k}"]}, shared, path)
            guesses = rank(k, logits, level.width)[:, level.parent_slot, level.ranks]
            candidates = jnp.concatenate([candidates, guesses], axis=1)
        return candidates

    def teacher_inputs(self, features, tokens, base):
        """Head k at position t reads the true tokens t+1 ... t+1+k; the last k+1 positions wrap and must be masked."""
        embeddings = base.embed(tokens).astype(self.dtype)
        shifted = [jnp.roll(embeddings, -(k + 1), axis=1) for k in range(self.n_heads)]
        shared = jnp.concatenate([features.astype(self.dtype), shifted[0]], axis=-1)
        return [(shared, jnp.concatenate(shifted[1 : k + 1], axis=-1) if k else None) for k in range(self.n_heads)]
