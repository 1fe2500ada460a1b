"""Typical acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import Greedy, JudgesBestGuesses, accepted_nodes, ending_at
from hydrajax.decoding.parameters import LARGEST_NUMBER, bound, parameters_as_arrays
from hydrajax.decoding.sampling import NEUTRAL, TOP_K, check_cuts, check_temperature, shaped
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.ops import best_token, over_rows
from hydrajax.trees.topology import Topology, take


@parameters_as_arrays
@dataclass(frozen=True)
class Typical(JudgesBestGuesses):
    """Typical acceptance (medusa 2.3.1, hydra 6.3): accept a node x if p(x) > min(ε, α exp(-H(p))) and all its
    ancestors are accepted; p is the base's distribution at its parent at ``temperature`` and H its entropy.

    Of several longest paths the most likely wins, then the first in the released order. The root is always the argmax,
    as in the released code. The output is *not* distributed as the base's.

    Attributes:
        epsilon: ε, the posterior threshold.
        alpha: α; None for the papers' √ε.
        temperature: The temperature of p, positive.
        top_k, top_p, min_p: Truncate p as `hydrajax.decoding.sampling.Sampling` does, before the comparison.

    Raises:
        HydrajaxError: For a parameter out of range.
    """

    epsilon: float = 0.1
    alpha: float | None = None
    temperature: float = 0.7
    top_k: int | None = field(default=None, kw_only=True, metadata=TOP_K)
    top_p: float = field(default=1.0, kw_only=True)
    min_p: float = field(default=0.0, kw_only=True)
    NEUTRAL: ClassVar[dict[str, Any]] = NEUTRAL | {"alpha": lambda rule: np.sqrt(np.float32(rule.epsilon))}
    draws: ClassVar[bool] = False
    same_output: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.epsilon <= 1:
            raise HydrajaxError(f"epsilon: got {self.epsilon}, expected a number from 0 to 1")
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise HydrajaxError(f"alpha: got {self.alpha}, expected a number from 0 up")
        bound(self, alpha=(0, LARGEST_NUMBER))
        check_temperature(self)
        check_cuts(self)

    def baseline(self):
        return Greedy()

    def first_root(self, logits, keys):
        return best_token(logits)

    def accept(self, verify_result, keys):
        tree, tokens = verify_result.proposal.tree, verify_result.proposal.tokens[:, 1:]
        # Only at nodes that may have children: two thirds of a static tree are leaves.
        log_p = jax.nn.log_softmax(shaped(self, verify_result.at_inner()), axis=-1)
        p = jnp.exp(log_p)
        entropy = -jnp.sum(p * jnp.log(p + 1e-5), axis=-1)  # the released code's guard against log 0
        epsilon = over_rows(self.epsilon, entropy)
        alpha = jnp.sqrt(epsilon) if self.alpha is None else over_rows(self.alpha, entropy)
        slots = tree.parent_slot[..., 1:]
        threshold = take(jnp.minimum(epsilon, alpha * jnp.exp(-entropy)), slots)
        log_p_node = log_p[jnp.arange(len(tokens))[:, None], slots, jnp.maximum(tokens, 0)]
        accepted = accepted_nodes((jnp.exp(log_p_node) > threshold) & (tokens >= 0), tree)
        last = _likeliest_longest(accepted, jnp.pad(log_p_node, ((0, 0), (1, 0))), tree)
        if verify_result.processors:
            return ending_at(last, tree, best_token(verify_result.at(last, tree.at(tree.depths, last))))
        root = best_token(jnp.take_along_axis(verify_result.logits, last[:, None, None], axis=1)[:, 0])
        return ending_at(last, tree, root)


def _likeliest_longest(
    accepted: Bool[Array, "B N"], log_p_node: Float[Array, "B N"], tree: Topology
) -> Int[Array, " B"]:
    """Return the last node of the most likely of the longest accepted paths; ties as in the released code.

    The released code scans its leaves from the last to the first and takes the first path that is good enough. Of two
    nodes of one depth the one with the later last descendant therefore comes first.
    """
    on_path = jnp.arange(tree.depth + 1) <= tree.depths[..., None]
    along = take(log_p_node, tree.paths.reshape(*tree.paths.shape[:-2], -1)).reshape(
        len(accepted), *tree.paths.shape[-2:]
    )
    log_p_path = jnp.sum(jnp.where(on_path, along, 0.0), axis=-1)
    longest = accepted & (tree.depths == jnp.max(jnp.where(accepted, tree.depths, 0), axis=1, keepdims=True))
    likeliest = jnp.max(jnp.where(longest, log_p_path, -jnp.inf), axis=1, keepdims=True)
    last_below = jnp.max(jnp.where(tree.mask, jnp.arange(tree.size)[:, None], -1), axis=-2)
    return jnp.argmax(jnp.where(longest & (log_p_path == likeliest), last_below, -1), axis=1).astype(jnp.int32)
