"""Traversal verification judges a sampled tree from its leaves up; on a chain it is block verification."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import VerifyResult, ending_at
from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.decoding.rejection import BASE, CHILDREN, RejectionSampling, fold
from hydrajax.decoding.sampling import sample
from hydrajax.drafters.drafter import Proposal
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.trees.dynamic import static
from hydrajax.trees.topology import at_rows, take


class _At(NamedTuple):
    """The place of the traversal in each tree.

    ``left[b, d]`` is alpha p of the path's node of depth d after the rejections so far. It sums to ``alpha[b, d]``.
    """

    node: Int[Array, " B"]
    depth: Int[Array, " B"]
    child: Int[Array, " B"]  # the child of ``node`` to judge
    rejected: Bool[Array, " B"]  # all nodes below this child were rejected, and now the child
    ended: Bool[Array, " B"]  # ``node`` was accepted
    alpha: Float[Array, "B path"]
    left: Float[Array, "B path V"]


@parameters_as_arrays
@dataclass(frozen=True)
class TraversalVerification(RejectionSampling):
    """Traversal verification of candidates drawn from q: accept paths, not tokens (Weng et al. 2025, arXiv 2505.12398).

    A node is judged after all nodes below it. alpha is the probability that it or one of them is accepted: 1 at the
    root, min(1, alpha p(x) / q(x)) at a child with token x, with its parent's alpha, p and q. A leaf is accepted with
    probability alpha. When a child and all nodes below it are rejected, its parent's p becomes
    norm(max(0, alpha p - q)), alpha becomes S / (S + 1 - alpha) with S = sum(max(0, alpha p - q)), and q loses the
    token. After its last child a node is accepted with probability alpha; the bonus token is drawn from its last p. The
    output has the base's distribution, as with `RejectionSampling`.

    Proof, also for trees whose nodes depend on draws. Take the tree without its last node x, the last child of v. If
    everything below v is rejected, v is accepted with probability alpha, and the next token drawn from p. With x, which
    is drawn from q, v or x is accepted instead: the probability that the next token is y remains min(alpha p(y), q(y))
    + max(0, alpha p(y) - q(y)) = alpha p(y), and that of rejecting v remains 1 - alpha. Nothing else depends on x. So
    the node changes the distribution for no draws of the others, and neither do all nodes, removed one by one down to
    the root, if the draws before it decide whether a node exists. They do so in a dynamic tree in the order of its
    places' worth (`hydrajax.drafters.growing.grow`), and for given nodes, whose q is entirely on their token.

    Rejected draws influence the output, so no other step may draw with their keys: all keys come from the key of the
    position after the root, which this step emits in any case.
    """

    def draw(self, keys):
        draw = super().draw(keys)
        of_levels = [fold(draw.keys[..., 0], depth) for depth in range(keys.shape[-1])]
        return draw._replace(keys=jnp.stack(of_levels, axis=-1))

    def accept(self, verify_result, keys):
        tree, key = verify_result.proposal.tree, keys[:, 0]
        if not tree.depth:
            return super().accept(verify_result, keys)
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (tree.size,)))(fold(key, CHILDREN))
        root = jnp.zeros_like(verify_result.proposal.tokens[:, 0])
        child, p = _first(*_children(verify_result.proposal, root)), self._probabilities(verify_result.at(root, root))
        alpha = jnp.ones((len(root), tree.depth + 1))
        left = jnp.zeros((*alpha.shape, p.shape[-1])).at[:, 0].set(p)
        start = _At(root, root, child, jnp.zeros(root.shape, bool), child == 0, alpha, left)
        judge = partial(self._judge, verify_result, uniform)
        end = jax.lax.while_loop(lambda at: ~jnp.all(at.ended), judge, start)
        bonus_token = sample(fold(key, BASE), jnp.log(at_rows(end.left, end.depth)))
        return ending_at(end.node, tree, bonus_token)

    def _judge(self, verify_result: VerifyResult, uniform: Float[Array, "B N"], at: _At) -> _At:
        """Descend to a child, or reject it; after the last child accept the node, or return to its parent.

        Args:
            verify_result: The proposal and the base's logits.
            uniform: A random number for each node.
            at: The place so far.
        """
        proposal, node, child = verify_result.proposal, at.node, at.child
        left, alpha = at_rows(at.left, at.depth), at_rows(at.alpha, at.depth)
        siblings, exist = _children(proposal, node)
        later = exist & (siblings > child[:, None])
        q = _drawn_from(proposal, siblings, child, left.shape[-1])
        token = at_rows(proposal.tokens, child)
        here, drawn = at_rows(left, token), at_rows(q, token)
        below = _first(*_children(proposal, child))
        alpha_below = jnp.where(here < drawn, here / drawn, here > 0)
        # A node that cannot be accepted is rejected now, as are all nodes below it.
        at_once = (below == 0) | (alpha_below == 0)
        rejected = ~at.ended & (at.rejected | at_once & (at_rows(uniform, child) >= alpha_below))
        descends = ~at.ended & ~rejected

        rest = jnp.maximum(left - q, 0)
        total = jnp.sum(rest, axis=-1)
        probability = total + (1 - alpha)  # of this rejection
        possible = rejected & (probability > 0)  # else rounded
        left = jnp.where(possible[:, None], rest / probability[:, None], left)
        alpha = jnp.where(possible, total / probability, alpha)
        p = jax.lax.cond(
            jnp.any(descends),
            lambda: self._probabilities(verify_result.at(child, at.depth + 1)),
            lambda: jnp.zeros_like(left),
        )
        left = jnp.where(descends[:, None], alpha_below[:, None] * p, left)
        alpha = jnp.where(descends, alpha_below, alpha)

        was_last = rejected & ~jnp.any(later, axis=1)
        accepted = was_last & (at_rows(uniform, node) < alpha)
        returns = was_last & ~accepted
        written = jnp.arange(len(node)), at.depth + descends
        return _At(
            node=jnp.where(descends, child, jnp.where(returns, proposal.tree.at(proposal.tree.parents, node), node)),
            depth=at.depth + descends - returns,
            child=jnp.where(descends, below, jnp.where(returns, node, _first(siblings, later))),
            rejected=returns,
            ended=at.ended | accepted | (descends & (below == 0)),
            alpha=at.alpha.at[written].set(alpha),
            left=at.left.at[written].set(left),
        )


@parameters_as_arrays
@dataclass(frozen=True)
class BlockVerification(TraversalVerification):
    """Block verification of a chain (Sun et al. 2024, arXiv 2403.10444): `TraversalVerification`, for chains.

    No rule that keeps p accepts more tokens of a chain on average, for any p and q (proven there).
    """

    def check(self, tree):
        chain = f"{type(self).__name__}, which judges chains alone"
        if static(tree, chain).max_rank > 0:
            raise HydrajaxError(f"tree: got {tree.max_rank + 1} siblings, expected chain-K for {chain}")


def _children(proposal: Proposal, node: Int[Array, " B"]) -> tuple[Int[Array, "B C"], Bool[Array, "B C"]]:
    """Return the children of one node per sequence, and which of them exist and hold a token."""
    children = proposal.tree.at(proposal.tree.children, node)
    return children, (children > 0) & (take(proposal.tokens, jnp.maximum(children, 0)) >= 0)


def _first(children: Int[Array, "B C"], which: Bool[Array, "B C"]) -> Int[Array, " B"]:
    """Return the first of these children; 0 stands for no child."""
    return jnp.where(jnp.any(which, axis=1), at_rows(children, jnp.argmax(which, axis=1)), 0)


def _drawn_from(
    proposal: Proposal, siblings: Int[Array, "B C"], child: Int[Array, " B"], vocab: int
) -> Float[Array, "B V"]:
    """Return q without the siblings before a child; entirely on the child's token if it was given."""
    tree, tokens, log_q = proposal.tree, proposal.tokens, proposal.log_q
    itself = jnp.arange(vocab) == at_rows(tokens, child)[:, None]
    if log_q is None:
        return itself.astype(jnp.float32)
    drawn = take(tokens, siblings)
    gone = jnp.where((siblings > 0) & (siblings < child[:, None]) & (drawn >= 0), drawn, vocab)
    slot = jnp.minimum(tree.at(tree.parent_slot, siblings[:, 0]), log_q.shape[1] - 1)
    left = at_rows(log_q, slot).at[jnp.arange(len(slot))[:, None], gone].set(-jnp.inf, mode="drop")
    q = jax.nn.softmax(left, axis=-1)
    if tree.inner.shape[-1] == log_q.shape[1]:
        return q
    was_given = tree.at(tree.parent_slot, child) >= log_q.shape[1]
    return jnp.where(was_given[:, None], itself, q)
