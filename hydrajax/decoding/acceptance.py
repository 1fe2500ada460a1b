"""Acceptance rules choose which path of a verified tree is accepted and which bonus token follows it.

`Greedy` and `hydrajax.decoding.typical.Typical` judge the whole tree at once.
`hydrajax.decoding.sampling.ExactSampling` and `hydrajax.decoding.rejection.RejectionSampling` draw from the base's
distribution node by node from the root down, so they evaluate only the nodes they reach. A rule reads the base's
logits, processors included, through `VerifyResult`.

A rule is a frozen dataclass of sampling parameters and a pytree of them (`hydrajax.decoding.parameters`): in a decode
state they are arrays with one entry per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.decoding.processing import NodeContext, TokenCounts, process
from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.models.arrays import Array
from hydrajax.ops import best_token
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.topology import Topology, at_rows, take


class Acceptance(NamedTuple):
    """The verdict of a rule.

    Attributes:
        path: int32 ``[B, K+1]`` nodes from the root to the last accepted one, which repeats beyond its depth.
        accept_length: int32 ``[B]`` accepted draft tokens (root not counted).
        bonus_token: int32 ``[B]`` the base's token after the path.
    """

    path: Int[Array, "B path"]
    accept_length: Int[Array, " B"]
    bonus_token: Int[Array, " B"]


class VerifyResult(NamedTuple):
    """A proposal and the base's logits at its nodes.

    Attributes:
        logits: float32 ``[B, N, V]``, before any processor.
        proposal: The candidate tree.
        processors: The logits processors of the batch.
        counts: Token counts of the text before the root, None if no processor reads them.
    """

    logits: Float[Array, "B N V"]
    proposal: Proposal
    processors: Sequence[Any] = ()
    counts: TokenCounts | None = None

    def at(self, node: Int[Array, " B"], depth: Int[Array, "*B"]) -> Float[Array, "B V"]:
        """Return the processed logits at one node per sequence; ``depth`` is the node's, a number or ``[B]``."""
        here = at_rows(self.logits, node)
        if not self.processors:
            return here
        counts = self.counts
        if counts is not None:
            path = self.proposal.tree.at(self.proposal.tree.paths, node)
            tokens = jnp.take_along_axis(self.proposal.tokens, path, axis=1)
            counts = counts.with_output(tokens, jnp.broadcast_to(depth + 1, node.shape))
        return process(self.processors, here, NodeContext(node, counts))

    def at_inner(self) -> Float[Array, "B P V"]:
        """Return the processed logits at the nodes that may have children, computed node by node."""
        tree = self.proposal.tree
        if not self.processors:
            return take(self.logits, tree.inner)
        inner = jnp.broadcast_to(tree.inner, (len(self.logits), tree.inner.shape[-1]))

        def one(node):
            return self.at(node, tree.at(tree.depths, node))

        return jnp.moveaxis(jax.lax.map(one, inner.T), 0, 1)

    def unprocessed(self) -> Bool[Array, ""]:
        """Return whether no processor changes anything, on the device."""
        active = jnp.asarray(False)
        for processor in self.processors:
            active |= processor.active()
        return ~active


@runtime_checkable
class AcceptanceRule(Protocol):
    """An acceptance rule: a frozen dataclass of parameters that all have defaults, under
    `hydrajax.decoding.parameters.parameters_as_arrays`. Its name in `hydrajax.plugins` makes it an argument of
    `generate`, ``--rule`` and a server, and its fields keywords and fields of JSON.

    Random keys belong to positions of a sequence's output (`hydrajax.decoding.random_keys.position_keys`), so a
    sequence draws the same tokens in every batch.

    Attributes:
        needs_draws: The drafter must draw its candidates (`draw` does not return None).
        draws: Random keys decide, so a seed is needed.
        same_output: The output equals that of decoding without a draft by `baseline`, token for token. Other rules
            keep a distribution at most.
    """

    needs_draws: ClassVar[bool]
    draws: ClassVar[bool]
    same_output: ClassVar[bool]

    def check(self, tree: CandidateTree) -> None:
        """Raise `HydrajaxError` for a tree that the rule cannot judge."""

    def baseline(self) -> AcceptanceRule:
        """Return the rule that has the same meaning without a draft."""

    def draw(self, keys: Array) -> Draw | None:
        """Return how the drafter must draw its candidates, or None for its best guesses.

        ``keys[b, d]`` is for the tokens after depth d.
        """

    def first_root(self, logits: Float[Array, "B V"], keys: Array) -> Int[Array, " B"]:
        """Return the first token from the processed logits of the last prompt token and one key per sequence."""

    def accept(self, verify_result: VerifyResult, keys: Array) -> Acceptance:
        """Judge the tree; ``keys`` as for `draw`."""


class JudgesBestGuesses:
    """Base of rules that accept any candidates, however they were chosen."""

    needs_draws: ClassVar[bool] = False

    def check(self, tree):
        pass

    def draw(self, keys):
        return None


@parameters_as_arrays
@dataclass(frozen=True)
class Greedy(JudgesBestGuesses):
    """Accept a node if it equals the argmax at its parent: the output is the base's own greedy output.

    Hydra section 6 (greedy decoding), medusa 2.3.1 at temperature 0. With processors, the argmax is that of the
    processed logits, and the tree is judged node by node because each node has its own text before it.
    """

    draws: ClassVar[bool] = False
    same_output: ClassVar[bool] = True

    def baseline(self):
        return self

    def first_root(self, logits, keys):
        return best_token(logits)

    def accept(self, verify_result, keys):
        if verify_result.processors:
            return walk(verify_result.proposal, lambda node, depth: best_token(verify_result.at(node, depth)))
        tokens, tree = verify_result.proposal.tokens, verify_result.proposal.tree
        chosen = best_token(verify_result.logits)
        agrees = tokens[:, 1:] == take(chosen, tree.parents[..., 1:])
        last = deepest(accepted_nodes(agrees, tree), tree)
        return ending_at(last, tree, jnp.take_along_axis(chosen, last[:, None], axis=1)[:, 0])


# --- parts that rules share -------------------------------------------------------------------------------------------


class _Walk(NamedTuple):
    node: Int[Array, " B"]
    token: Int[Array, " B"]  # the base's choice there
    ended: Bool[Array, " B"]
    depth: Int[Array, ""]


def walk(proposal: Proposal, choose: Callable[[Int[Array, " B"], Int[Array, ""]], Int[Array, " B"]]) -> Acceptance:
    """Descend from the root: ``choose(node, depth)`` is the token after a node; the child that holds it is next.

    Ends when no sequence has such a child. All sequences descend together, so ``depth`` is one number.
    """
    tokens, tree = proposal.tokens, proposal.tree
    parents = jnp.asarray(tree.parents)

    def descend(at: _Walk) -> _Walk:
        token = jnp.where(at.ended, at.token, choose(at.node, at.depth))
        holds = (parents == at.node[:, None]) & (tokens == token[:, None])
        ended = at.ended | ~jnp.any(holds, axis=1)
        return _Walk(jnp.where(ended, at.node, jnp.argmax(holds, axis=1)), token, ended, at.depth + 1)

    zeros = jnp.zeros_like(tokens[:, 0])
    start = _Walk(zeros, zeros, jnp.zeros(zeros.shape, bool), jnp.zeros((), jnp.int32))
    # A loop around the root alone would slow down decoding without a draft.
    end = jax.lax.while_loop(lambda at: ~jnp.all(at.ended), descend, start) if tree.depth else descend(start)
    return ending_at(end.node, tree, end.token)


def accepted_nodes(agrees: Bool[Array, "B n"], tree: Topology) -> Bool[Array, "B N"]:
    """Return the nodes that agree together with all their ancestors; ``agrees`` excludes the root, which always
    agrees.
    """
    agrees = jnp.pad(agrees & (tree.parents[..., 1:] >= 0), ((0, 0), (1, 0)), constant_values=True)
    return jnp.all(agrees[:, None, :] | ~tree.mask, axis=2)


def deepest(accepted: Bool[Array, "B N"], tree: Topology) -> Int[Array, " B"]:
    """Return the deepest accepted node: unique if siblings differ, else the first."""
    return jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1).astype(jnp.int32)


def ending_at(last: Int[Array, " B"], tree: Topology, bonus_token: Int[Array, " B"]) -> Acceptance:
    """Return the path from the root to node ``last`` of each sequence."""
    return Acceptance(tree.at(tree.paths, last), tree.at(tree.depths, last), bonus_token)
