"""Growing a tree where the draft is sure, whatever makes the guesses (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.drafter import Proposal
from hydrajax.drafters.lm_head import LmHead
from hydrajax.models.arrays import Array
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import from_parents


class Beam(NamedTuple):
    """The n nodes whose children are guessed next, the likeliest first; at depth 0 the root alone.

    depth:   of all of them. paths: int32 ``[B, n, depth + 1]`` the tokens from the root down to each.
    parents: int32 ``[B, n]`` which node of the beam before each is a child of.
    """

    depth: int
    paths: Int[Array, "B n depth"]
    parents: Int[Array, "B n"]

    @property
    def tokens(self) -> Int[Array, "B n"]:
        return self.paths[:, :, -1]


# guess(carry, beam) -> carry, float32 logits [B, n, V'] of what follows each node of the beam, or [B, 1, V'] where one
# guess serves them all. carry: whatever the drafter wants to have at hand at the next level.
Guess = Callable[[Any, Beam], tuple[Any, Float[Array, "B n V_"]]]


def grow(tree: DynamicTree, root: Int[Array, " B"], guess: Guess, carry: Any, lm_head: LmHead) -> Proposal:
    """The tree of each row: of all candidates those whose whole path is the likeliest in the draft's eyes.

    Level by level the ``top_k`` likeliest candidates of the last level are expanded into ``top_k`` each; what is
    expanded and what becomes a node are two questions. Candidates are numbered level by level, in a level by their
    parent's rank in the beam and then by their own, and nodes keep this order. Likelihoods are at temperature 1. A
    candidate is never likelier than its parent and comes after it, and of equals the first is taken, so that a node's
    parent is a node.
    """
    k, batch = tree.top_k, len(root)
    beam, likelihood = Beam(0, root[:, None, None], jnp.zeros((batch, 1), jnp.int32)), jnp.zeros((batch, 1))
    tokens, scores, n_candidates = [], [], 0  # of the candidates, level by level
    parents = [jnp.full((batch, 1), -1, jnp.int32)]  # the candidate that each k of them are children of; -1 is the root
    for depth in range(tree.expansions + 1):
        carry, logits = guess(carry, beam)
        children, log_p = lm_head.likeliest(logits, k)
        scored = (likelihood[:, :, None] + log_p).reshape(batch, -1)
        children = jnp.broadcast_to(children, (batch, likelihood.shape[1], k)).reshape(batch, -1)
        tokens.append(children)
        scores.append(scored)
        if depth < tree.expansions:
            likelihood, best = jax.lax.top_k(scored, k)
            parents.append(n_candidates + best)
            above = jnp.take_along_axis(beam.paths, best[:, :, None] // k, axis=1)
            chosen = jnp.take_along_axis(children, best, axis=1)
            beam = Beam(depth + 1, jnp.concatenate([above, chosen[:, :, None]], axis=2), best // k)
        n_candidates += scored.shape[1]
    nodes = jnp.sort(jax.lax.top_k(jnp.concatenate(scores, axis=1), tree.size - 1)[1], axis=1)
    parent = jnp.take_along_axis(jnp.concatenate(parents, axis=1), nodes // k, axis=1)
    # A candidate's node is 1 + the number of chosen candidates before it; the root's is 0.
    number = jnp.where(parent < 0, 0, 1 + jnp.sum(nodes[:, None, :] < parent[:, :, None], axis=2))
    parents = jnp.pad(number.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=-1)
    chosen = jnp.take_along_axis(jnp.concatenate(tokens, axis=1), nodes, axis=1)
    topology = from_parents(parents, tree.depth, most_children=min(k, tree.size - 1))
    return Proposal(jnp.concatenate([root[:, None], chosen], axis=1), topology)
