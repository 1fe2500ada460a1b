"""Acceptance rules: which path of a verified tree is kept, and which token the base chooses next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
        return follow(best_token(logits), candidates, tree)


@dataclass(frozen=True)
class ExactSampling:
    """Sample from the base's distribution at ``temperature`` at every node; follow the child that holds the sample.

    The output's distribution is the base's own, whatever was drafted (DESIGN section 3): each token is a sample of
    the base given what precedes it, and the tree only decides how many of them one step finds. Without a tree it is
    plain sampling. Raises `HydrajaxError` for a temperature that is not positive.
    """

    temperature: float = 1.0

    def __post_init__(self):
        if not 0 < self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: must be positive, found {self.temperature}")

    def first_root(self, logits, rng):
        return jax.random.categorical(rng, logits / self.temperature).astype(jnp.int32)

    def accept(self, logits, candidates, tree, rng):
        return follow(jax.random.categorical(rng, logits / self.temperature).astype(jnp.int32), candidates, tree)


def follow(chosen: Int[Array, "B N"], candidates: Int[Array, "B N"], tree: TreeTopology) -> Acceptance:
    """Accept the nodes that hold what the base ``chosen`` at their parent, with all their ancestors."""
    if tree.size == 1:
        return Acceptance(jnp.zeros_like(candidates), jnp.zeros_like(chosen[:, 0]), chosen[:, 0])
    agrees = candidates[:, 1:] == chosen[:, tree.parents[1:]]
    agrees = jnp.concatenate([jnp.ones_like(agrees[:, :1]), agrees], axis=1)
    # Accepted: the node and all its ancestors agree.
    accepted = jnp.all(agrees[:, None, :] | ~tree.ancestor_mask, axis=2)
    # The deepest accepted node: unique, as siblings differ (the first, should a drafter repeat itself).
    last = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
    path = jnp.asarray(tree.node_paths)[last]
    return Acceptance(path, jnp.asarray(tree.depths)[last], jnp.take_along_axis(chosen, last[:, None], axis=1)[:, 0])
