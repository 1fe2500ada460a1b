"""Acceptance rules: which path of a verified tree is kept, and which token the base chooses next.

`Greedy` and `Typical` judge the whole tree at once. `ExactSampling` and `RejectionSampling` draw from the base, node by
node from the root down, and so look at the few nodes they reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hydrajax.decoding.sampling import Sampling, sample
from hydrajax.errors import HydrajaxError
from hydrajax.models.ranking import best_token
from hydrajax.trees.tree import TreeTopology


class Acceptance(NamedTuple):
    """path: int32 ``[B, K+1]`` nodes from the root to the last accepted one, which repeats beyond its depth.

    accept_length: int32 ``[B]`` accepted draft tokens (root not counted). next_root: int32 ``[B]``.
    """

    path: Int[Array, "B path"]
    accept_length: Int[Array, " B"]
    next_root: Int[Array, " B"]


class AcceptanceRule(Protocol):
    """A frozen dataclass that picks the root after prefill and judges every tree.

    Random keys are of places in a row's output (`hydrajax.decoding.sampling.position_keys`), so that a row draws the
    same whatever batch it sits in.
    """

    def first_root(self, logits: Float[Array, "B V"], keys: Array) -> Int[Array, " B"]:
        """The first token, from the logits of the last prompt token and a key per row."""

    def accept(
        self, logits: Float[Array, "B N V"], candidates: Int[Array, "B N"], tree: TreeTopology, keys: Array
    ) -> Acceptance:
        """Judge the tree given the base's logits at every node; ``keys[b, d]`` is for what follows depth d."""


@dataclass(frozen=True)
class Greedy:
    """A node is accepted if it equals the argmax at its parent: the output is the base's own greedy output.

    Hydra section 6 (greedy decoding), medusa 2.3.1 with temperature 0.
    """

    def first_root(self, logits, keys):
        return best_token(logits)

    def accept(self, logits, candidates, tree, keys):
        chosen = best_token(logits)
        if tree.size == 1:  # the autoregressive baseline: nothing to compute
            return ending_at(jnp.zeros_like(chosen[:, 0]), tree, chosen[:, 0])
        last = deepest(accepted_nodes(candidates[:, 1:] == chosen[:, tree.parents[1:]], tree), tree)
        return ending_at(last, tree, jnp.take_along_axis(chosen, last[:, None], axis=1)[:, 0])


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (medusa 2.3.1, hydra 6.3): a node x is accepted if p(x) > min(ε, α exp(-H(p))), with all its
    ancestors; p is the base's distribution at its parent at ``temperature`` and H its entropy.

    epsilon: ε, the posterior threshold. alpha: α, None for the papers' √ε. Of several longest paths the likeliest
    wins, then the one that comes first in the released order. The root is always the argmax, as in the released code.
    The output is *not* distributed as the base's. Raises `HydrajaxError` for numbers out of range.
    """

    epsilon: float = 0.1
    alpha: float | None = None
    temperature: float = 0.7

    def __post_init__(self):
        if not 0 <= self.epsilon <= 1:
            raise HydrajaxError(f"epsilon: must be from 0 to 1, found {self.epsilon}")
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise HydrajaxError(f"alpha: must be from 0 up, found {self.alpha}")
        if not 0 < self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: must be positive, found {self.temperature}")

    def first_root(self, logits, keys):
        return best_token(logits)

    def accept(self, logits, candidates, tree, keys):
        if tree.size == 1:
            return ending_at(jnp.zeros_like(candidates[:, 0]), tree, best_token(logits[:, 0]))
        # Only nodes with children are asked about: two thirds of a tree are leaves.
        inner, parent_slot = np.unique(tree.parents[1:], return_inverse=True)
        log_p = jax.nn.log_softmax(logits[:, inner] / self.temperature, axis=-1)
        p = jnp.exp(log_p)
        entropy = -jnp.sum(p * jnp.log(p + 1e-5), axis=-1)  # the released code's guard against log 0
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        threshold = jnp.minimum(self.epsilon, alpha * jnp.exp(-entropy))[:, parent_slot]
        rows = jnp.arange(len(candidates))[:, None]
        log_p_node = log_p[rows, parent_slot, candidates[:, 1:]]
        accepted = accepted_nodes(jnp.exp(log_p_node) > threshold, tree)
        log_p_node = jnp.concatenate([jnp.zeros_like(log_p_node[:, :1]), log_p_node], axis=1)
        on_path = np.arange(tree.depth + 1) <= tree.depths[:, None]
        log_p_path = jnp.sum(jnp.where(on_path, log_p_node[:, tree.node_paths], 0.0), axis=-1)
        longest = accepted & (tree.depths == jnp.max(jnp.where(accepted, tree.depths, 0), axis=1, keepdims=True))
        order = _released_order(tree)
        best = jnp.argmax(jnp.where(longest, log_p_path, -jnp.inf)[:, order], axis=1)
        last = jnp.asarray(order)[best]
        root = best_token(jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0])
        return ending_at(last, tree, root)


@dataclass(frozen=True)
class ExactSampling(Sampling):
    """Sample from the base's distribution at a node and follow the child that holds the sample, if one does.

    The output's distribution is the base's own as `Sampling` shapes it, whatever was drafted (DESIGN section 3): each
    token is a sample of the base given what precedes it, and the tree only decides how many of them one step finds.
    Without a tree it is plain sampling, and draws the very same tokens (but for rounding).
    """

    def first_root(self, logits, keys):
        return sample(keys, self.shape(logits))

    def accept(self, logits, candidates, tree, keys):
        return walk(tree, candidates, lambda node, depth: sample(keys[:, depth], self.shape(_rows(logits, node))))


@dataclass(frozen=True)
class RejectionSampling(Sampling):
    """For drafts that were drawn from distributions of their own, q (Leviathan et al. 2023, Chen et al. 2023).

    The children of a node are looked at in the order in which they were drawn, without replacement (SpecInfer 2024;
    Jeon et al. 2024). One is accepted with probability min(1, p / q); if not, p becomes norm(max(0, p - q)) and q
    loses the token. If none is accepted, the base's token is drawn from the last p. The output is distributed as the
    base's, as with `ExactSampling`; the closer q is to p, the more is accepted.

    draft_temperature: of q, None for ``temperature``. The drafter must have the method ``sample``
    (`hydrajax.drafters.drafter.SamplingDrafter`), the tree no gaps between the ranks of siblings.
    """

    draft_temperature: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.draft_temperature is not None and not 0 < self.draft_temperature < float("inf"):
            raise HydrajaxError(f"draft_temperature: must be positive, found {self.draft_temperature}")

    def draft(self, drafter, params, state, root, tree: TreeTopology, base, keys: Array):
        """``(candidates [B, N], draft_logits [B, P, V])``, of the P nodes with children, in node order."""
        if not hasattr(drafter, "sample"):
            raise HydrajaxError(f"rule: RejectionSampling needs a drafter that samples, not {type(drafter).__name__}")
        for node, choice in enumerate(tree.choices, start=1):
            if choice[-1] and (*choice[:-1], choice[-1] - 1) not in tree.choices[: node - 1]:
                raise HydrajaxError(f"tree: RejectionSampling needs siblings of rank 0, 1, 2 ..., found {list(choice)}")
        temperature = self.temperature if self.draft_temperature is None else self.draft_temperature
        return drafter.sample(params, state, root, tree, base, _fold(keys, DRAFT), temperature)

    def first_root(self, logits, keys):
        return sample(_fold(keys, BASE), self.shape(logits))

    def accept(self, logits, candidates, tree, keys, draft_logits=None):
        children = jnp.asarray(tree.children)
        slots = jnp.asarray(np.searchsorted(np.unique(tree.parents[1:]), np.arange(tree.size)))

        def choose(node, depth):
            p = jax.nn.softmax(self.shape(_rows(logits, node)), axis=-1)
            token, open_ = jnp.zeros_like(node), jnp.ones_like(node, bool)
            if tree.size > 1:
                log_q = _rows(draft_logits, jnp.minimum(slots[node], draft_logits.shape[1] - 1))
            for rank in range(children.shape[1]):
                child = children[node, rank]
                drawn = _rows(candidates, child)
                looked_at = open_ & (child > 0)
                q = jax.nn.softmax(log_q, axis=-1)
                uniform = jax.vmap(jax.random.uniform)(_fold(keys[:, depth], CHILDREN + rank))
                accepted = looked_at & (uniform * _rows(q, drawn) < _rows(p, drawn))
                token, open_ = jnp.where(accepted, drawn, token), open_ & ~accepted
                rest = jnp.maximum(p - q, 0)
                total = jnp.sum(rest, axis=-1, keepdims=True)
                rejected = (looked_at & ~accepted)[:, None]
                p = jnp.where(rejected & (total > 0), rest / total, p)
                gone = rejected & (jnp.arange(p.shape[-1]) == drawn[:, None])
                log_q = jnp.where(gone, -jnp.inf, log_q)
            return jnp.where(open_, sample(_fold(keys[:, depth], BASE), jnp.log(p)), token)

        return walk(tree, candidates, choose)


# What the key of a place in the output is folded with: for the draft, for the base's own sample, for each child.
DRAFT, BASE, CHILDREN = 0, 1, 2


def _fold(keys: Array, purpose: int) -> Array:
    def fold(key):
        return jax.random.fold_in(key, purpose)

    for _ in keys.shape:
        fold = jax.vmap(fold)
    return fold(keys)


def _rows(array: Array, index: Int[Array, " B"]) -> Array:
    """``array[b, index[b]]`` for every row b."""
    return array[jnp.arange(len(index)), index]


class _Walk(NamedTuple):
    node: Int[Array, " B"]
    token: Int[Array, " B"]  # the base's choice there
    ended: Bool[Array, " B"]
    depth: Int[Array, ""]


def walk(
    tree: TreeTopology,
    candidates: Int[Array, "B N"],
    choose: Callable[[Int[Array, " B"], Int[Array, ""]], Int[Array, " B"]],
) -> Acceptance:
    """From the root down: ``choose(node, depth)`` is the token that follows a node; a child that holds it is next.

    Ends where no row has such a child. All rows descend together, so ``depth`` is one number.
    """
    if tree.size == 1:
        root = jnp.zeros_like(candidates[:, 0])
        return ending_at(root, tree, choose(root, jnp.zeros((), jnp.int32)))
    parents = jnp.asarray(tree.parents)

    def descend(at: _Walk) -> _Walk:
        token = jnp.where(at.ended, at.token, choose(at.node, at.depth))
        holds = (parents == at.node[:, None]) & (candidates == token[:, None])
        ended = at.ended | ~jnp.any(holds, axis=1)
        return _Walk(jnp.where(ended, at.node, jnp.argmax(holds, axis=1)), token, ended, at.depth + 1)

    zeros = jnp.zeros_like(candidates[:, 0])
    start = _Walk(zeros, zeros, jnp.zeros(zeros.shape, bool), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(lambda at: ~jnp.all(at.ended), descend, start)
    return ending_at(end.node, tree, end.token)


def _released_order(tree: TreeTopology) -> np.ndarray:
    """All nodes, in the order in which they first end a prefix of the released code's root-to-leaf paths."""
    nodes = tree.leaf_paths.T.ravel()
    _, first = np.unique(nodes[nodes >= 0], return_index=True)
    return nodes[nodes >= 0][np.sort(first)].astype(np.int32)


def accepted_nodes(agrees: Bool[Array, "B n"], tree: TreeTopology) -> Bool[Array, "B N"]:
    """Nodes that agree with all their ancestors; ``agrees`` leaves the root out, which always does."""
    agrees = jnp.concatenate([jnp.ones((len(agrees), 1), bool), agrees], axis=1)
    return jnp.all(agrees[:, None, :] | ~tree.ancestor_mask, axis=2)


def deepest(accepted: Bool[Array, "B N"], tree: TreeTopology) -> Int[Array, " B"]:
    """The deepest accepted node: unique where siblings differ, else the first."""
    return jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)


def ending_at(last: Int[Array, " B"], tree: TreeTopology, next_root: Int[Array, " B"]) -> Acceptance:
    """The path from the root to node ``last`` of each row."""
    if tree.size == 1:
        return Acceptance(last[:, None], last, next_root)
    return Acceptance(jnp.asarray(tree.node_paths)[last], jnp.asarray(tree.depths)[last], next_root)
