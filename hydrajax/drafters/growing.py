"""Grow a dynamic tree from the logits of a drafter (EAGLE-2, Li et al. 2024)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.clusters import over_all
from hydrajax.drafters.draft_lm_head import LmHead, Mask
from hydrajax.drafters.drafter import Beam, Draw, Guess, Proposal
from hydrajax.models.arrays import Array
from hydrajax.ops import over_rows
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import take

# Estimated probability that a drawn token is accepted, and what certainty of the draft adds. Of the values tried
# (docs/trees.md) these gave the longest steps.
ACCEPTED, WHEN_SURE = 0.5, 0.4


def grow(
    tree: DynamicTree,
    root: Int[Array, " B"],
    guess: Guess,
    carry: Any,
    lm_head: LmHead,
    vocab_size: int,
    draw: Draw | None = None,
) -> tuple[Proposal, Any]:
    """Grow each sequence's tree from the candidates that are most likely under the draft.

    Level by level the ``top_k`` most likely candidates of the last level are expanded into ``top_k`` each. Which
    candidates are expanded and which become nodes are separate choices. Candidates are numbered by level, by their
    parent's rank in the beam and by their own rank, and nodes keep this order. A candidate's likelihood is that of its
    whole path, so it is never likelier than its parent; it comes after its parent, and ties go to the first, so a
    node's parent is a node.

    Without ``draw`` the candidates are the best guesses, and their likelihoods at temperature 1 decide both choices.
    With ``draw`` the children c_1, c_2 ... of a node v are drawn from q(. | v) without replacement, and likelihoods are
    estimated probabilities of acceptance (`_prospects`). These decide what is expanded, but not what becomes a node: a
    token kept for being likely would occur more often than under q, which rejection sampling relies on. So places are
    chosen instead of tokens. The place of c_r is worth as much as it is likely to be tried, which depends on v and
    c_1 ... c_{r-1}, not on its token. The N - 1 most valuable places form the tree.

    Rejection sampling stays exact because a token is never likelier than its place is worth. Its descendants and later
    siblings are therefore never worth more than the place, and in a beam they displace only candidates that are not
    likelier, whose children are not worth more either. Whatever is worth more than a place is thus independent of the
    token drawn there, and so is the place's membership in the tree: given that it is in, its token is still a draw from
    what q leaves after the earlier siblings. (Ties are no exception: everything the token can change has a higher
    number.)

    Args:
        guess: Returns the logits after the nodes of a beam.

    Returns:
        The proposal, whose ``scratch`` is int32 ``[B, N]``: each node's index among the expanded ones (the root, then
        the beams in order), -1 for nodes that were not expanded; and the last carry.
    """
    k, batch = tree.top_k, len(root)
    beam = Beam(0, root[:, None], root[:, None, None], jnp.zeros((batch, 1), jnp.int32))
    likelihood = jnp.zeros((batch, 1))
    tokens, worths, drawn_from, n_candidates = [], [], [], 0  # of the candidates, level by level
    expanded = [jnp.full((batch, 1), -1, jnp.int32)]  # the candidate above each k of them; -1 is the root
    for depth in range(tree.expansions + 1):
        carry, logits = guess(carry, beam)
        mask = Mask.after(beam.paths, lm_head)
        logits = mask.over(logits)
        if draw is None:
            children, log_p = mask.keep_likely(*lm_head.likeliest(logits, k))
            scored = worth = likelihood[:, :, None] + log_p
        else:
            logits = over_all(logits)
            logits = logits / over_rows(draw.temperature, logits)
            logits = jnp.broadcast_to(logits, (*likelihood.shape, logits.shape[-1]))
            children, log_p = mask.keep_likely(*lm_head.drawn(_keys_of_level(draw, depth), logits, k))
            drawn_from.append(logits)
            looked_at, accepted = _prospects(log_p)
            worth = jnp.where(children < 0, -jnp.inf, likelihood[:, :, None] + looked_at)
            scored = worth + accepted
        children = jnp.broadcast_to(children, scored.shape).reshape(batch, -1)
        scored = scored.reshape(batch, -1)
        tokens.append(children)
        worths.append(worth.reshape(batch, -1))
        if depth < tree.expansions:
            likelihood, best = jax.lax.top_k(scored, k)
            expanded.append(n_candidates + best)
            above = jnp.take_along_axis(beam.paths, best[:, :, None] // k, axis=1)
            chosen = jnp.take_along_axis(children, best, axis=1)
            beam = Beam(depth + 1, chosen, jnp.concatenate([above, chosen[:, :, None]], axis=2), best // k)
        n_candidates += scored.shape[1]
    worth = jnp.concatenate(worths, axis=1)
    nodes = jnp.sort(jax.lax.top_k(worth, tree.size - 1)[1], axis=1)
    expanded = jnp.concatenate(expanded, axis=1)
    parent = jnp.take_along_axis(expanded, nodes // k, axis=1)
    # A candidate's node is 1 + the number of chosen candidates before it; the root's is 0.
    number = jnp.where(parent < 0, 0, 1 + jnp.sum(nodes[:, None, :] < parent[:, :, None], axis=2))
    parents = jnp.pad(number.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=-1)
    chosen = jnp.take_along_axis(jnp.concatenate(tokens, axis=1), nodes, axis=1)
    topology = from_parents(parents, tree.depth, most_children=min(k, tree.size - 1))
    candidate = jnp.pad(nodes, ((0, 0), (1, 0)), constant_values=-1)
    is_expanded = candidate[:, :, None] == expanded[:, None, :]
    place = jnp.argmax(is_expanded, axis=2).astype(jnp.int32)
    log_q = None
    if drawn_from:
        # A node that was not expanded has no children, so any distribution will do.
        log_q = lm_head.over_all_tokens(take(jnp.concatenate(drawn_from, axis=1), place), vocab_size)
    place = jnp.where(jnp.any(is_expanded, axis=2), place, -1)
    proposal = Proposal(jnp.concatenate([root[:, None], chosen], axis=1), topology, log_q, place)
    if tree.estimates and draw is None:
        proposal = proposal._replace(log_p=jnp.pad(jnp.take_along_axis(worth, nodes, axis=1), ((0, 0), (1, 0))))
    return proposal, carry


def _keys_of_level(draw: Draw, depth: int) -> Array:
    """Return keys ``[B]`` that no other step uses: of the position after the root, which this step emits in any case.

    The shape of the tree, and with it the accepted length, depends on all draws, also those below the accepted path. A
    next step that reused their keys would not draw independently. (In a static tree they decide nothing, so
    `hydrajax.drafters.filling.fill` uses the keys of the positions themselves.)
    """
    return jax.vmap(jax.random.fold_in, (0, None))(draw.keys[:, 0], depth)


def _prospects(log_p: Float[Array, "*rows k"]) -> tuple[Float[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Return log-probabilities that each drawn token is tried, given its parent, and then that it is accepted.

    Rejection sampling accepts many tokens of a good draft even if it is unsure: the estimate is `ACCEPTED` for all
    tokens, more the likelier q is to draw them, up to `ACCEPTED` + `WHEN_SURE`. The estimate affects the quality of
    the tree and never exactness. But the probability of being tried must not depend on the token itself, not even by
    rounding, nor rise from one sibling to the next, and parallel sums may fall by a bit.
    """
    drawn = jnp.cumsum(jnp.exp(log_p), axis=-1)[..., :-1]
    first = [(0, 0)] * (log_p.ndim - 1) + [(1, 0)]
    left = jnp.pad(1 - drawn, first, constant_values=1.0)
    share = jnp.clip(jnp.exp(log_p) / jnp.maximum(left, 1e-6), 0, 1)
    accepted = ACCEPTED + WHEN_SURE * share
    looked_at = jnp.pad(jnp.cumsum(jnp.log(1 - accepted), axis=-1)[..., :-1], first)
    return jax.lax.cummin(looked_at, axis=looked_at.ndim - 1), jnp.log(accepted)
