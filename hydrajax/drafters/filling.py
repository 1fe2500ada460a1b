"""Fill a tree level by level from the logits of a drafter."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.drafters.clusters import over_all
from hydrajax.drafters.draft_lm_head import LmHead, Mask
from hydrajax.drafters.drafter import Beam, Draw, Guess, Proposal
from hydrajax.models.arrays import Array
from hydrajax.ops import over_rows
from hydrajax.trees.dynamic import CandidateTree, DynamicTree


def fill(
    tree: CandidateTree,
    root: Int[Array, " B"],
    guess: Guess,
    carry: Any,
    lm_head: LmHead,
    vocab_size: int,
    draw: Draw | None = None,
) -> tuple[Proposal, Any]:
    """Fill a tree with the best guesses, or by drawing if ``draw`` is given.

    A static tree takes one top-k per level, at its widest rank; a dynamic one is grown. Under a grammar, every level is
    filled with allowed tokens (`hydrajax.drafters.draft_lm_head`).

    Args:
        guess: Returns the logits after the nodes of a beam (`hydrajax.drafters.drafter.Guess`).
        carry: Passed to the first ``guess``, at the root's level 0.
        draw: How to draw; None for the best guesses.

    Returns:
        The proposal and the last carry.
    """
    if isinstance(tree, DynamicTree):
        from hydrajax.drafters.growing import grow

        return grow(tree.beams(), root, guess, carry, lm_head, vocab_size, draw)
    tokens, drawn_from, before = root[:, None], [], np.full(1, -1)
    estimates = jnp.zeros((len(root), 1)) if tree.estimates and draw is None else None
    for k, level in enumerate(tree.levels):
        parents = np.searchsorted(before, tree.parents[level.parents])
        # Nodes are ordered by depth, so the tokens so far hold every path down to this level's parents.
        paths = tokens[:, level.paths]
        carry, logits = guess(carry, Beam(k, tokens[:, level.parents], paths, parents))
        before = level.parents
        mask = Mask.after(paths, lm_head)
        logits = mask.over(logits)
        if estimates is not None:
            guesses, log_p = mask.keep_likely(*lm_head.likeliest(logits, level.width))
        elif draw is None:
            guesses = mask.keep(lm_head.top(logits, level.width))
        else:
            # Every parent draws its own children, also if all share one distribution.
            logits = over_all(logits)
            logits = logits / over_rows(draw.temperature, logits)
            logits = jnp.broadcast_to(logits, (len(root), len(level.parents), logits.shape[-1]))
            guesses = mask.keep(lm_head.sampled(draw.keys[:, k], logits, level.width))
            drawn_from.append(lm_head.over_all_tokens(logits, vocab_size))
        # Medusa heads predict once for all parents of a level.
        slot = level.parent_slot if guesses.shape[1] > 1 else np.zeros_like(level.parent_slot)
        tokens = jnp.concatenate([tokens, guesses[:, slot, level.ranks]], axis=1)
        if estimates is not None:
            above = estimates[:, tree.parents[level.children]]
            estimates = jnp.concatenate([estimates, above + log_p[:, slot, level.ranks]], axis=1)
    log_q = jnp.concatenate(drawn_from, axis=1) if drawn_from else None
    return Proposal(tokens, tree.topology, log_q, log_p=estimates), carry
