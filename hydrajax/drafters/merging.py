"""One tree out of a drafter's tree and chains of tokens: the nodes that are most likely to be accepted."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.drafters.chains import NO_TOKEN, Chains, prefixes_agree
from hydrajax.drafters.drafter import Proposal
from hydrajax.models.arrays import Array
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.topology import Topology, take

# log-probability that a token of a drafter without estimates is accepted
UNKNOWN = float(np.log(0.6))


def merged(proposal: Proposal, chains: Chains, size: int, depth: int) -> Proposal:
    """Return the tree of the ``size`` most likely nodes of a tree and of chains, with equal paths merged.

    A path that several of them contain has the largest of its estimates. Estimates never rise along a path, and
    candidates are numbered by parents first, so the parent of a chosen node is chosen: of equal estimates the first
    is taken. The nodes that are kept of the drafter's tree keep their order.

    Args:
        proposal: A tree of best guesses, and `Proposal.log_p` or, without it, `UNKNOWN` per level.
        chains: M chains of K tokens.
        size: Nodes of the result, root included. If there are fewer candidates, the last nodes do not exist: they
            have no token and no parent.
        depth: Depth of the result, at least those of tree and chains.
    """
    tokens, tree = proposal.tokens, proposal.tree
    batch, n_own = tokens.shape
    _, m, k = chains.tokens.shape
    depths = jnp.broadcast_to(tree.depths, tokens.shape)
    score = path_scores(proposal, depths)
    on_tree = _along_tree(chains.tokens, tokens, depths, tree)  # [B, M, N]: chain m passes through node n
    at_depth = jnp.maximum(depths - 1, 0)[:, None]
    passing = jnp.take_along_axis(chains.log_p, jnp.broadcast_to(at_depth, on_tree.shape), axis=2)
    passing = jnp.where(on_tree, passing, -jnp.inf)
    score = jnp.where(depths > 0, jnp.maximum(score, jnp.max(passing, axis=1)), score)
    # [B, M, K]: the first candidate with the same path as each token of each chain
    here = on_tree[:, :, None] & (depths[:, None, None] == np.arange(1, k + 1)[:, None])
    exists = chains.tokens >= 0
    same = prefixes_agree(chains.tokens, exists)
    first = jnp.min(jnp.where(same, np.arange(m)[:, None], m), axis=2)
    node = jnp.max(jnp.where(here, np.arange(n_own), -1), axis=3)
    in_tree = node >= 0
    number = jnp.where(in_tree, node, n_own + np.arange(k) * m + first)
    best = jnp.max(jnp.where(same, chains.log_p[:, None], -jnp.inf), axis=2)
    own = exists & ~in_tree & (first == np.arange(m)[:, None])
    above = jnp.pad(number[:, :, :-1], ((0, 0), (0, 0), (1, 0)))

    def by_level(of_chains):
        return jnp.swapaxes(of_chains, 1, 2).reshape(batch, -1)

    score = jnp.concatenate([score, by_level(jnp.where(own, best, -jnp.inf))], axis=1)
    parents = jnp.concatenate([jnp.broadcast_to(tree.parents, tokens.shape), by_level(above)], axis=1)
    tokens = jnp.concatenate([tokens, by_level(chains.tokens)], axis=1)
    missing = max(size - score.shape[1], 0)
    score = jnp.pad(score, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    parents, tokens = (jnp.pad(x, ((0, 0), (0, missing))) for x in (parents, tokens))
    chosen = jnp.sort(jax.lax.top_k(score, size)[1], axis=1)
    is_node = jnp.take_along_axis(score, chosen, axis=1) > -jnp.inf
    parent = jnp.take_along_axis(parents, chosen, axis=1)
    number = jnp.sum(chosen[:, None] < parent[:, :, None], axis=2, dtype=jnp.int32)
    number = jnp.where(is_node & (chosen > 0), number, -1)
    tokens = jnp.where(is_node, jnp.take_along_axis(tokens, chosen, axis=1), NO_TOKEN)
    most_children = min(tree.children.shape[-1] + m, size - 1)
    return Proposal(tokens, from_parents(number, depth, most_children))


def path_scores(proposal: Proposal, depths: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """Return the estimate for the path to each node; -inf if the path has a node without a token."""
    score = UNKNOWN * depths if proposal.log_p is None else proposal.log_p
    score = jnp.where(proposal.tokens >= 0, jnp.minimum(score, 0), -jnp.inf)
    mask = jnp.broadcast_to(proposal.tree.mask, (*depths.shape, depths.shape[1]))
    return jnp.min(jnp.where(mask, score[:, None], 0), axis=2)


def _along_tree(chains: Int[Array, "B M K"], tokens: Int[Array, "B N"], depths: Int[Array, "B N"], tree: Topology):
    """Return whether each chain begins with the path to each node; all do with the root's."""
    place = jnp.minimum(depths - 1, chains.shape[2] - 1)
    reached = depths <= chains.shape[2]
    there = jnp.moveaxis(take(jnp.moveaxis(chains, 2, 1), jnp.maximum(place, 0)), 1, 2)
    equal = (there == tokens[:, None]) & (tokens >= 0)[:, None] & reached[:, None] | (depths == 0)[:, None]
    mask = jnp.broadcast_to(tree.mask, (*tokens.shape, tokens.shape[1]))
    # As a product of counts: XLA would write [B, M, N, N] for the comparison.
    wrong = jnp.einsum("bmj,bij->bmi", (~equal).astype(jnp.float32), mask.astype(jnp.float32))
    return wrong == 0
