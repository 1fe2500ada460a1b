"""Acceptance rules: which path of a verified tree is kept, and which token the base chooses next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    """A frozen dataclass that picks the root after prefill and judges every tree."""

    def first_root(self, logits: Float[Array, "B V"], rng: Array) -> Int[Array, " B"]:
        """The first token, from the logits of the last prompt token."""

    def accept(
        self, logits: Float[Array, "B N V"], candidates: Int[Array, "B N"], tree: TreeTopology, rng: Array
    ) -> Acceptance:
        """Judge the tree given the base's logits at every node."""


@dataclass(frozen=True)
class Greedy:
    """A node is accepted if it equals the argmax at its parent: the output is the base's own greedy output.

    Hydra section 6 (greedy decoding), medusa 2.3.1 with temperature 0.
    """

    def first_root(self, logits, rng):
        return best_token(logits)

    def accept(self, logits, candidates, tree, rng):
        chosen = best_token(logits)  # [B, N]
        if tree.size == 1:
            return Acceptance(jnp.zeros_like(candidates), jnp.zeros_like(chosen[:, 0]), chosen[:, 0])
        agrees = candidates[:, 1:] == chosen[:, tree.parents[1:]]
        agrees = jnp.concatenate([jnp.ones_like(agrees[:, :1]), agrees], axis=1)
        # Accepted: the node and all its ancestors agree.
        accepted = jnp.all(agrees[:, None, :] | ~tree.ancestor_mask, axis=2)
        # The deepest accepted node: unique, as siblings differ (the first, should a drafter repeat itself).
        last = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
        path = jnp.asarray(tree.node_paths)[last]
        return Acceptance(
            path, jnp.asarray(tree.depths)[last], jnp.take_along_axis(chosen, last[:, None], axis=1)[:, 0]
        )
