"""Filling a static tree level by level, whatever makes the guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.drafters.lm_head import LmHead
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import over_rows
from hydrajax.trees.tree import Level, TreeTopology

# guess(carry, k, level, tokens) -> carry, float32 logits [B, P, V'] of what follows each of the level's P parents, or
# [B, 1, V'] where one guess serves them all. tokens: int32 [B, n], of all nodes above the level. carry: whatever the
# drafter wants to have at hand at the next level.
Guess = Callable[[Any, int, Level, Int[Array, "B n"]], tuple[Any, Float[Array, "B P V_"]]]


def fill(
    tree: TreeTopology,
    root: Int[Array, " B"],
    guess: Guess,
    carry: Any,
    lm_head: LmHead,
    vocab_size: int,
    draw: Draw | None = None,
) -> Proposal:
    """The tree with the best guesses, or with ``draw`` with drawn ones: one ranking per level, at its widest rank.

    carry: handed to the first ``guess``, at the root's level 0.
    """
    tokens, drawn_from = root[:, None], []
    for k, level in enumerate(tree.levels):
        carry, logits = guess(carry, k, level, tokens)
        if draw is None:
            guesses = lm_head.top(logits, level.width)
        else:
            # Every parent draws its own children, also where all have one distribution.
            logits = logits / over_rows(draw.temperature, logits)
            logits = jnp.broadcast_to(logits, (len(root), len(level.parents), logits.shape[-1]))
            guesses = lm_head.sampled(draw.keys[:, k], logits, level.width)
            drawn_from.append(lm_head.over_all_tokens(logits, vocab_size))
        # Medusa heads guess once for all parents of a level.
        slot = level.parent_slot if guesses.shape[1] > 1 else np.zeros_like(level.parent_slot)
        tokens = jnp.concatenate([tokens, guesses[:, slot, level.ranks]], axis=1)
    return Proposal(tokens, tree.topology, jnp.concatenate(drawn_from, axis=1) if drawn_from else None)
