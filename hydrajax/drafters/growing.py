"""Growing a tree where the draft is sure, whatever makes the guesses (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import over_rows
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import from_parents, take

# How much of what is drawn is taken to be accepted, whatever it is, and how much more the surer the draft is of it. Of
# the values tried (docs/trees.md) these gave the longest steps.
ACCEPTED, WHEN_SURE = 0.5, 0.4


class Beam(NamedTuple):
    """The n nodes whose children are guessed next, all of one depth: at depth 0 the root alone. Of a tree that is grown
    they are those to be expanded, the likeliest first; of a static one those that have children, in node order.

    tokens:  int32 ``[B, n]``. paths: int32 ``[B, n, depth + 1]`` the tokens from the root down to each.
    parents: int32 ``[B, n]`` which node of the beam before each is a child of; NumPy ``[n]`` where that is the same for
             all rows.
    """

    depth: int
    tokens: Int[Array, "B n"]
    paths: Int[Array, "B n depth"]
    parents: Int[Array, "*B n"]


# guess(carry, beam) -> carry, float32 logits [B, n, V'] of what follows each node of the beam, or [B, 1, V'] where one
# guess serves them all. carry: whatever the drafter wants to have at hand at the next level.
Guess = Callable[[Any, Beam], tuple[Any, Float[Array, "B n V_"]]]


def grow(
    tree: DynamicTree,
    root: Int[Array, " B"],
    guess: Guess,
    carry: Any,
    lm_head: LmHead,
    vocab_size: int,
    draw: Draw | None = None,
) -> tuple[Proposal, Any]:
    """The tree of each row, of all candidates those that are the likeliest in the draft's eyes, and the last carry.

    Level by level the ``top_k`` likeliest candidates of the last level are expanded into ``top_k`` each; what is
    expanded and what becomes a node are two questions. Candidates are numbered level by level, in a level by their
    parent's rank in the beam and then by their own, and nodes keep this order. A candidate's likelihood is that of its
    whole path. A candidate is never likelier than its parent and comes after it, and of equals the first is taken, so
    that a node's parent is a node.

    The proposal's ``scratch`` is int32 ``[B, N]``: where each node stands among those that were expanded, the root and
    then the beams one after the other; -1 for a node that was not.

    Without ``draw`` the candidates are the best guesses, and their likelihoods, at temperature 1, decide on both
    questions. With ``draw`` the children c_1, c_2 ... of a node v are drawn from q(. | v), without replacement, and
    likelihoods are those of being accepted, as far as the draft can say (`_prospects`). They decide what is expanded,
    but not what becomes a node: kept for being likely, a token would be met more often than q says, and rejection
    sampling rests on what q says. So places are chosen and not tokens. The place of c_r is worth as much as it is
    likely to be looked at, which depends on v and c_1 ... c_{r-1}, whatever token it holds. The N - 1 places that are
    worth most make the tree.

    Why that leaves rejection sampling exact: a token is never likelier than its place is worth, so its descendants and
    later siblings are never worth more than the place, and in a beam they and it displace only what is not likelier,
    whose children are not worth more either. What is worth more than a place is thus the same whatever token is drawn
    there, and so is whether the place is in the tree: given that it is, its token is still a draw from what q leaves
    after the earlier siblings. (Equals are no exception: all that the token could change has a higher number.)
    """
    k, batch = tree.top_k, len(root)
    beam = Beam(0, root[:, None], root[:, None, None], jnp.zeros((batch, 1), jnp.int32))
    likelihood = jnp.zeros((batch, 1))
    tokens, worths, drawn_from, n_candidates = [], [], [], 0  # of the candidates, level by level
    expanded = [jnp.full((batch, 1), -1, jnp.int32)]  # the candidate above each k of them; -1 is the root
    for depth in range(tree.expansions + 1):
        carry, logits = guess(carry, beam)
        if draw is None:
            children, log_p = lm_head.likeliest(logits, k)
            scored = worth = likelihood[:, :, None] + log_p
        else:
            logits = logits / over_rows(draw.temperature, logits)
            logits = jnp.broadcast_to(logits, (*likelihood.shape, logits.shape[-1]))
            children, log_p = lm_head.drawn(_keys_of_level(draw, depth), logits, k)
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
    nodes = jnp.sort(jax.lax.top_k(jnp.concatenate(worths, axis=1), tree.size - 1)[1], axis=1)
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
        # Of a node that was not expanded, and so has no children, any will do.
        log_q = lm_head.over_all_tokens(take(jnp.concatenate(drawn_from, axis=1), place), vocab_size)
    place = jnp.where(jnp.any(is_expanded, axis=2), place, -1)
    return Proposal(jnp.concatenate([root[:, None], chosen], axis=1), topology, log_q, place), carry


def _keys_of_level(draw: Draw, depth: int) -> Array:
    """Keys ``[B]`` that no other step draws with: of the place after the root, which the step emits in any case.

    The shape of the tree, and with it how far the step gets, depends on all draws, those below the accepted path among
    them. A next step that used their keys once more would not draw afresh. (In a static tree they decide nothing, so
    `hydrajax.drafters.filling.fill` takes the keys of the places themselves.)
    """
    return jax.vmap(jax.random.fold_in, (0, None))(draw.keys[:, 0], depth)


def _prospects(log_p: Float[Array, "*rows k"]) -> tuple[Float[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Logarithms of how likely each drawn token is to be looked at, after its parent, and then to be accepted.

    Rejection sampling accepts much of what a good draft says, also where the draft is not sure: it is taken to accept
    `ACCEPTED` of all tokens, and more the likelier q is to draw them, up to `ACCEPTED` + `WHEN_SURE`. What is taken
    decides how good a tree is and never how exact. But a prospect to be looked at must not depend on the token itself,
    not even by rounding, nor rise from one sibling to the next, and sums made in parallel may fall by a bit.
    """
    drawn = jnp.cumsum(jnp.exp(log_p), axis=-1)[..., :-1]
    first = [(0, 0)] * (log_p.ndim - 1) + [(1, 0)]
    left = jnp.pad(1 - drawn, first, constant_values=1.0)
    share = jnp.clip(jnp.exp(log_p) / jnp.maximum(left, 1e-6), 0, 1)
    accepted = ACCEPTED + WHEN_SURE * share
    looked_at = jnp.pad(jnp.cumsum(jnp.log(1 - accepted), axis=-1)[..., :-1], first)
    return jax.lax.cummin(looked_at, axis=looked_at.ndim - 1), jnp.log(accepted)
