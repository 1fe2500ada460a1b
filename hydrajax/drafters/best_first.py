"""Trees out of the distributions of one pass, which do not depend on each other's tokens.

The likelihood of a path is then a product of marginals, so the best paths follow from the K best tokens of each depth.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Proposal
from hydrajax.models.arrays import Array
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.dynamic import BestFirstTree


class Nodes(NamedTuple):
    """Nodes of a tree without its root, in order.

    Attributes:
        parents: int32 ``[B, n]``, 0 for the root, i + 1 for node i; -1 for a node that does not exist.
        depths: int32 ``[B, n]`` from 1.
        ranks: int32 ``[B, n]`` rank of each token among those of its depth.
        scores: float32 ``[B, n]`` natural log-likelihood of the path; -inf for a node that does not exist.
    """

    parents: Int[Array, "B n"]
    depths: Int[Array, "B n"]
    ranks: Int[Array, "B n"]
    scores: Float[Array, "B n"]


def best_first(
    tree: BestFirstTree, root: Int[Array, " B"], logits: Float[Array, "B D V_"] | ChosenLogits, lm_head: LmHead
) -> Proposal:
    """Fill a tree with the most likely paths under independent positions.

    Args:
        tree: ``best-N`` or ``fanout-N-K``, of depth at most D.
        logits: Logits of the tokens at depth 1 .. D.
    """
    logits = logits[:, : tree.depth]
    tokens, log_p = lm_head.likeliest(logits, min(tree.most_children, logits.shape[-1]))
    nodes = (fan_out if tree.top_k else best_nodes)(log_p, tree.size - 1)
    chosen = tokens[jnp.arange(len(root))[:, None], jnp.maximum(nodes.depths - 1, 0), nodes.ranks]
    chosen = jnp.where(nodes.parents < 0, -1, chosen)  # no rule accepts -1
    parents = jnp.pad(nodes.parents, ((0, 0), (1, 0)), constant_values=-1)
    topology = from_parents(parents, tree.depth, tree.most_children)
    proposal = Proposal(jnp.concatenate([root[:, None], chosen], axis=1), topology)
    return proposal._replace(log_p=jnp.pad(nodes.scores, ((0, 0), (1, 0)))) if tree.estimates else proposal


def best_nodes(log_p: Float[Array, "B D K"], n: int) -> Nodes:
    """Return the n nodes with the highest scores, best first (DDTree, arXiv 2604.12989, algorithm 1).

    DDTree pops them one by one from a heap. Here each level is one top-k, which finds the same nodes: a node among the
    n best is among the n best of its level, and its parent is likelier. A level with p parents of known order needs
    only the pairs of parent i and rank j with (i + 1)(j + 1) <= n, since all of (0 .. i, 0 .. j) are likelier.

    Args:
        log_p: Natural log-probabilities of the K best tokens of each depth, descending.
        n: Number of nodes; more than D levels have are marked as missing.
    """
    batch, depth, width = log_p.shape
    level = jnp.zeros((batch, 1))
    parents, ranks, scores, depths, first = [], [], [], [], 0
    for d in range(depth):
        above = level.shape[1]
        pairs = [(i, j) for i in range(above) for j in range(min(width, n // (i + 1)))]
        i, j = np.array(pairs, np.int32).T
        level, best = jax.lax.top_k(level[:, i] + log_p[:, d, j], min(n, len(pairs)))
        parents.append(first - above + jnp.asarray(i)[best] if d else jnp.full(best.shape, -1))
        ranks.append(jnp.asarray(j)[best])
        scores.append(level)
        depths += [d + 1] * level.shape[1]
        first += level.shape[1]
    parents, ranks, scores = (jnp.concatenate(x, axis=1) for x in (parents, ranks, scores))
    # Ties go to the first, so a parent comes before its children.
    scores, order = jax.lax.top_k(scores, min(n, first))
    parents, ranks = jnp.take_along_axis(parents, order, axis=1), jnp.take_along_axis(ranks, order, axis=1)
    number = 1 + jnp.argmax(parents[:, :, None] == order[:, None, :], axis=2)
    nodes = Nodes(jnp.where(parents < 0, 0, number), jnp.asarray(depths)[order], ranks, scores)
    return _padded(Nodes(*(x.astype(jnp.int32) for x in nodes[:3]), scores), n)


def fan_out(log_p: Float[Array, "B D K"], n: int) -> Nodes:
    """Return n nodes from expanding the best node into all K children, again and again (JetSpec's ``accum_logp``).

    The nodes are expanded in the order of `best_nodes`, as a node is never likelier than its parent. The last expansion
    keeps the children that fit.

    Args:
        log_p: Natural log-probabilities of the K best tokens of each depth, descending.
        n: Number of nodes; more than D levels have are marked as missing.
    """
    batch, depth, width = log_p.shape
    expansions = -(-n // width)
    root = Nodes(*(jnp.zeros((batch, 1), jnp.int32) for _ in range(3)), jnp.zeros((batch, 1)))
    inner = root
    if depth > 1 and expansions > 1:  # nodes of the last depth have no children
        best = best_nodes(log_p[:, :-1], expansions - 1)
        inner = Nodes(*(jnp.concatenate(pair, axis=1) for pair in zip(root, best, strict=True)))
    exists = jnp.repeat(inner.parents >= 0, width, axis=1)
    depths = jnp.repeat(inner.depths, width, axis=1) + 1
    ranks = jnp.tile(jnp.arange(width, dtype=jnp.int32), (batch, inner.parents.shape[1]))
    scores = jnp.repeat(inner.scores, width, axis=1) + log_p[jnp.arange(batch)[:, None], depths - 1, ranks]
    # Node number of each expanded one: its parent's children begin at 1 + K * (the parent's place).
    number = (1 + jnp.maximum(inner.parents, 0) * width + inner.ranks).at[:, 0].set(0)
    parents = jnp.where(exists, jnp.repeat(number, width, axis=1), -1)
    nodes = Nodes(parents, depths, ranks, jnp.where(exists, scores, -jnp.inf))
    return _padded(Nodes(*(x[:, :n] for x in nodes)), n)


def _padded(nodes: Nodes, n: int) -> Nodes:
    """Return n nodes, the last of which may not exist."""
    missing = ((0, 0), (0, n - nodes.parents.shape[1]))
    fills = (-1, 0, 0, -jnp.inf)
    return Nodes(*(jnp.pad(x, missing, constant_values=fill) for x, fill in zip(nodes, fills, strict=True)))
