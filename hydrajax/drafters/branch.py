"""One more branch of a proposal: a chain of tokens that something else than the drafter found.

The chain shares nodes of the tree as far as these hold its tokens and continues in nodes of its own, so no token is fed
twice.
"""

import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.drafters.drafter import Proposal
from hydrajax.models.arrays import Array
from hydrajax.trees.built_trees import with_chain
from hydrajax.trees.topology import Topology, take


def with_branch(proposal: Proposal, chain: Int[Array, "B n"], nodes: int) -> Proposal:
    """Return the proposal with a chain of tokens as one more branch.

    If the drafter drew its candidates, the branch's own nodes are given, last among their siblings.

    Args:
        chain: int32 ``[B, n]`` tokens after the root, -1 where there are none; n is at least the depth of the tree plus
            ``nodes``.
        nodes: Nodes of the branch's own. They hold the tokens after the last node that it shares with the tree.
    """
    last = last_shared(proposal.tokens, proposal.tree, chain)
    rest = proposal.tree.at(proposal.tree.depths, last)[:, None] + jnp.arange(nodes)
    added = jnp.take_along_axis(chain, rest, axis=1)
    tokens = jnp.concatenate([proposal.tokens, added], axis=1)
    return Proposal(tokens, with_chain(proposal.tree, last, nodes), proposal.log_q)


def last_shared(tokens: Int[Array, "B N"], tree: Topology, chain: Int[Array, "B n"]) -> Int[Array, " B"]:
    """Return the deepest node of each tree whose path holds the beginning of the chain."""
    # [B, N]: the chain's token at each node's depth; the root is always shared.
    depths = jnp.broadcast_to(tree.depths, tokens.shape)
    same = (tokens == take(chain, jnp.maximum(depths - 1, 0))) & (tokens >= 0) | (depths == 0)
    shared = jnp.all(same[:, None, :] | ~tree.mask, axis=2)
    return jnp.argmax(jnp.where(shared, depths, -1), axis=1).astype(jnp.int32)
