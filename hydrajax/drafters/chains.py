"""Chains of tokens that continue a text, from places where its last tokens occurred before, and how likely they are.

Prompt lookup finds such places in the text itself, the suffix corpus in past outputs. Nothing about them is learnt:
the estimate of acceptance comes from the length of the match and from how many matches agree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.drafter import Proposal
from hydrajax.models.arrays import Array
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import at_rows

NO_TOKEN = -1  # no match continues here


class Chains(NamedTuple):
    """M chains of up to K tokens after the root of each sequence.

    Attributes:
        tokens: int32 ``[B, M, K]``, `NO_TOKEN` from the end of a chain on.
        log_p: float32 ``[B, M, K]`` natural logarithm of the estimated probability that the base accepts the chain up
            to each token; it never rises along a chain, and is -inf where there is no token.
    """

    tokens: Int[Array, "B M K"]
    log_p: Float[Array, "B M K"]

    def expected(self) -> Float[Array, "B M"]:
        """Return the expected number of accepted tokens of each chain."""
        return jnp.sum(jnp.exp(self.log_p), axis=2)

    def best(self) -> Int[Array, "B K"]:
        """Return the tokens of the chain with the most expected tokens."""
        return at_rows(self.tokens, jnp.argmax(self.expected(), axis=1))


@runtime_checkable
class Source(Protocol):
    """Finds chains. A frozen dataclass, like a drafter; its state has a leading batch axis."""

    @property
    def matches(self) -> int:
        """M, the number of chains."""

    def init_state(self, batch: int, slots: int) -> Any: ...

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base) -> Any:
        """Read text (`hydrajax.drafters.drafter.Drafter.begin`)."""

    def rewind(self, state: Any, lengths: Int[Array, " B"]) -> Any: ...

    def chains(self, params: Any, state: Any, root: Int[Array, " B"], depth: int) -> Chains:
        """Return chains of at most ``depth`` tokens after ``root``."""


def joined(found: Sequence[Chains]) -> Chains:
    """Return the chains of several sources."""
    return Chains(*(jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True)))


def estimated(
    tokens: Int[Array, "B M K"], lengths: Int[Array, "B M"], survival: Sequence[float], doubt: float
) -> Chains:
    """Estimate the acceptance of what followed M matches.

    A chain whose match has n tokens is right in its next token with probability s(n), given that all matches agree;
    each accepted token makes the match one longer. Where matches disagree, they vote, and a match weighs ``doubt``
    times less for each token that it is shorter than the longest one. The estimate for a chain up to a token is the
    share of the votes for these tokens, times the product of s.

    Args:
        tokens: int32 ``[B, M, K]``, negative from the end of a chain on.
        lengths: int32 ``[B, M]`` length of each match; 0 for none.
        survival: s(1), s(2) ...; the last holds for longer matches too.
        doubt: Between 0 and 1.
    """
    depth = tokens.shape[2]
    exists = leading(tokens >= 0) & (lengths > 0)[:, :, None]
    same = prefixes_agree(tokens, exists)
    longest = jnp.max(lengths, axis=1, keepdims=True)
    weight = jnp.where(lengths > 0, jnp.float32(doubt) ** (longest - lengths).astype(jnp.float32), 0)
    votes = jnp.sum(jnp.where(same, weight[:, None, :, None], 0), axis=2)
    share = votes / jnp.maximum(jnp.sum(weight, axis=1), 1e-6)[:, None, None]
    table = np.cumsum(np.log(np.array([*survival, *[survival[-1]] * depth], np.float64)))
    table = np.concatenate([[0.0], table]).astype(np.float32)  # [n]: the log of s(1) ... s(n)
    start = jnp.clip(lengths, 1, len(survival))[:, :, None]
    right = jnp.asarray(table)[start + np.arange(depth)] - jnp.asarray(table)[start - 1]
    log_p = jnp.where(exists, jnp.log(jnp.maximum(share, 1e-30)) + right, -jnp.inf)
    so_far = np.tri(depth, dtype=bool)
    log_p = jnp.min(jnp.where(so_far, jnp.minimum(log_p, 0)[:, :, None], 0), axis=3)  # faster than a cumulative minimum
    return Chains(jnp.where(exists, tokens, NO_TOKEN), log_p)


def prefixes_agree(tokens: Int[Array, "B M K"], exists: Bool[Array, "B M K"]) -> Bool[Array, "B M M K"]:
    """Return whether chain i has the tokens of chain j up to each of them."""
    same = (tokens[:, :, None] == tokens[:, None]) & exists[:, :, None] & exists[:, None]
    return leading(same)


def leading(true: Bool[Array, "*n K"]) -> Bool[Array, "*n K"]:
    """Return which elements are true and have no false one before them, along the last axis."""
    place = np.arange(true.shape[-1])
    # On a CPU a cumulative sum takes ten times as long.
    return place < jnp.min(jnp.where(true, true.shape[-1], place), axis=-1, keepdims=True)


def by_rank(
    root: Int[Array, " B"], tokens: Int[Array, "B 1 M K"], found: Bool[Array, "B 1 M"], tree: TreeTopology
) -> Proposal:
    """Fill a static tree: rank r among a node's children is the r-th distinct token of the chains that hold its path.

    Args:
        tokens: int32 ``[B, 1, M, K]``, best chain first; K is at least the tree's depth.
        found: bool ``[B, 1, M]`` whether there is such a chain.
    """
    nodes, agreeing = [root[:, None]], found  # [B, nodes, M]: chains that hold the path to a node
    above = np.zeros(1, np.int32)  # the nodes of the level before
    for d, level in enumerate(tree.levels):
        following = tokens[:, :, :, d]
        agreeing, above = agreeing[:, np.searchsorted(above, level.parents)], level.children
        rank = ranks_of_matches(following, agreeing)  # [B, parents, M]
        holds = agreeing[:, level.parent_slot] & (rank[:, level.parent_slot] == level.ranks[:, None])
        first = jnp.argmax(holds, axis=-1)
        token = jnp.take_along_axis(jnp.broadcast_to(following, holds.shape), first[..., None], axis=-1)[..., 0]
        nodes.append(jnp.where(jnp.any(holds, axis=-1), token, NO_TOKEN))
        agreeing = holds
    return Proposal(jnp.concatenate(nodes, axis=1), tree.topology)


def ranks_of_matches(following: Int[Array, "*#n M"], agreeing: Bool[Array, "*#n M"]) -> Int[Array, "*#n M"]:
    """Return the rank of each match's next token among the distinct ones of the agreeing matches; the best match has
    0.
    """
    n_matches = following.shape[-1]
    same = following[..., :, None] == following[..., None, :]
    earlier = jnp.tri(n_matches, k=-1, dtype=bool)
    is_first = agreeing & ~jnp.any(same & earlier & agreeing[..., None, :], axis=-1)
    before = jnp.sum(earlier & is_first[..., None, :], axis=-1)  # different tokens before each match
    of_its_first = same & is_first[..., None, :]
    return jnp.sum(jnp.where(of_its_first, before[..., None, :], 0), axis=-1)
