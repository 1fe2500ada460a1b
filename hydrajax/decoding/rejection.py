"""Rejection sampling, for candidates drawn from the drafter's own distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.decoding.acceptance import walk
from hydrajax.decoding.parameters import is_mixed, parameters_as_arrays
from hydrajax.decoding.sampling import NEUTRAL, ExactSampling, Sampling, check_temperature, sample
from hydrajax.drafters.drafter import Draw
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.ops import best_token
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import at_rows

# Folded into the key of a position: for the draft, for the base's own sample, for each child.
DRAFT, BASE, CHILDREN = 0, 1, 2


@parameters_as_arrays
@dataclass(frozen=True)
class RejectionSampling(Sampling):
    """Rejection sampling of candidates drawn from q (Leviathan et al. 2023, Chen et al. 2023).

    The children of a node are tried in the order in which they were drawn, without replacement (SpecInfer 2024; Jeon et
    al. 2024). Each is accepted with probability min(1, p / q); on rejection, p becomes norm(max(0, p - q)) and q loses
    the token. If no child is accepted, the bonus token is drawn from the last p. The output has the base's
    distribution, as with `ExactSampling`; the closer q is to p, the more is accepted. Processors shape p and not q.

    A node that was given and not drawn, such as those of prompt lookup next to heads, comes after its drawn siblings.
    Its q is entirely on its own token, so it is accepted with the probability that p has left for it.

    The drafter must support sampling (`DrafterSpec.supports_sampling`), and a static tree must not skip ranks among
    siblings. `hydrajax.drafters.growing.grow` explains why a dynamic tree, which depends on the draws, does not change
    the distribution. Sequences at temperature 0, where p is on one token, draft at temperature 1.

    Attributes:
        draft_temperature: The temperature of q; None for ``temperature``.
    """

    draft_temperature: float | None = None
    NEUTRAL: ClassVar[dict[str, Any]] = NEUTRAL | {"draft_temperature": lambda rule: rule.temperature}
    needs_draws: ClassVar[bool] = True
    same_output: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.draft_temperature is not None:
            check_temperature(self, "draft_temperature")

    def check(self, tree):
        if isinstance(tree, DynamicTree):
            return  # it never skips an earlier sibling
        for node, choice in enumerate(tree.choices, start=1):
            if choice[-1] and (*choice[:-1], choice[-1] - 1) not in tree.choices[: node - 1]:
                siblings = f"siblings of rank 0, 1, 2 ... for {type(self).__name__}"
                raise HydrajaxError(f"tree: got the choice {list(choice)}, expected {siblings}")

    def baseline(self):
        return ExactSampling(self.temperature, self.top_k, self.top_p, min_p=self.min_p)

    def draw(self, keys):
        temperature = self.temperature if self.draft_temperature is None else self.draft_temperature
        if is_mixed(self):
            temperature = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)
        return Draw(fold(keys, DRAFT), temperature)

    def first_root(self, logits, keys):
        return self.choose(fold(keys, BASE), logits)

    def accept(self, verify_result, keys):
        proposal = verify_result.proposal
        tree, tokens = proposal.tree, proposal.tokens
        most_children = tree.children.shape[-1]
        n_slots = 0 if proposal.log_q is None else proposal.log_q.shape[1]
        some_given = tree.inner.shape[-1] > n_slots

        def choose(node, depth):
            p = self._probabilities(verify_result.at(node, depth))
            token, open_ = jnp.zeros_like(node), jnp.ones_like(node, bool)
            children, log_q = tree.at(tree.children, node), jnp.zeros_like(p)
            if most_children and n_slots:
                slot = tree.at(tree.parent_slot, jnp.maximum(children[:, 0], 0))
                log_q = at_rows(proposal.log_q, jnp.minimum(slot, n_slots - 1))
            for rank in range(most_children):
                child = children[:, rank]
                drawn = at_rows(tokens, child)
                looked_at = open_ & (child > 0) & (drawn >= 0)
                itself = jnp.arange(p.shape[-1]) == drawn[:, None]
                q = jax.nn.softmax(log_q, axis=-1)
                if some_given:
                    was_given = tree.at(tree.parent_slot, jnp.maximum(child, 0)) >= n_slots
                    q = jnp.where(was_given[:, None], itself, q)
                uniform = jax.vmap(jax.random.uniform)(fold(keys[:, depth], CHILDREN + rank))
                accepted = looked_at & (uniform * at_rows(q, drawn) < at_rows(p, drawn))
                token, open_ = jnp.where(accepted, drawn, token), open_ & ~accepted
                rest = jnp.maximum(p - q, 0)
                total = jnp.sum(rest, axis=-1, keepdims=True)
                rejected = (looked_at & ~accepted)[:, None]
                p = jnp.where(rejected & (total > 0), rest / total, p)
                log_q = jnp.where(rejected & itself, -jnp.inf, log_q)
            return jnp.where(open_, sample(fold(keys[:, depth], BASE), jnp.log(p)), token)

        return walk(proposal, choose)

    def _probabilities(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return p; at temperature 0 it is entirely on the most likely token."""
        p = jax.nn.softmax(self.shape(logits), axis=-1)
        if not is_mixed(self):
            return p
        best = jnp.arange(p.shape[-1]) == best_token(logits)[:, None]
        return jnp.where(self.sampled_rows()[:, None], p, best)


def fold(keys: Array, purpose: int) -> Array:
    """Return keys of the same shape for one purpose."""

    def of_key(key):
        return jax.random.fold_in(key, purpose)

    for _ in keys.shape:
        of_key = jax.vmap(of_key)
    return of_key(keys)
