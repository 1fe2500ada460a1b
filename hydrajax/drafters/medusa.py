"""Medusa heads: independent predictions from the last hidden state (medusa 2.1.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.drafters.filling import fill
from hydrajax.drafters.head_stack import HeadStack
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.prefix import Prefix
from hydrajax.models.arrays import Array, DType
from hydrajax.ops.sharded import replicate_features
from hydrajax.trees.dynamic import CandidateTree, guesses_of


class AtOnce(HeadStack):
    """Heads that do not depend on each other's tokens, so that one pass drafts all levels."""

    def filled(
        self,
        params,
        hidden: Sequence[Float[Array, "B 1 D"]],
        root: Int[Array, " B"],
        tree: CandidateTree,
        base,
        draw: Draw | None,
    ) -> Proposal:
        """Return the tree, given the inputs of each level's lm head (more heads are allowed)."""
        of_base, n_levels = self.lm_head.base_logits(params, base), len(guesses_of(tree))
        base_logits = [of_base] * len(hidden)
        if n_levels:
            levels = replicate_features(jnp.concatenate(hidden[:n_levels], axis=1))  # one collective on a mesh
            hidden = jnp.split(levels, n_levels, axis=1)
            if self.lm_head.shared:
                # One product for all levels, so that the base's lm head is read once.
                shared = self.lm_head.of_base(levels, of_base)
                base_logits = [lambda *_, k=k: shared[:, k, None] for k in range(n_levels)]

        def guess(nothing, beam):
            k = beam.depth
            return nothing, self.apply_head(params, k, hidden[k], base_logits[k], method="logits")

        return fill(tree, root, guess, None, self.lm_head, self.vocab_size, draw)[0]


@dataclass(frozen=True)
class MedusaHeads(AtOnce):
    """Head k maps h_t to the distribution of token t + 2 + k: W2 (SiLU(W1 h) + h), more blocks if ``n_layers`` > 1.

    ``lm_head_bias=True`` gives the *ungrounded* heads of the released Hydra code.
    """

    num_draft_heads: int
    width: int
    vocab_size: int
    n_layers: int = 1
    share_blocks: bool = True
    lm_head_bias: bool = False
    hidden_state_offset: int = 0
    dtype: DType = jnp.float32
    dropout: float = 0.0
    small_lm_head: LmHead | None = None
    prefix: Prefix | None = None

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        # With a prefix layer, the released layout has only heads whose lm head has a bias.
        heads = super().for_base(base, dtype, settings, target_counts)
        return replace(heads, lm_head_bias=heads.prefix is not None)

    @property
    def lm_head(self) -> LmHead:
        return self.small_lm_head or LmHead(bias=self.lm_head_bias)

    def propose(self, params, state, root, tree, base, draw=None):
        levels = range(len(guesses_of(tree)))
        last = self.hidden_in(state)[:, None]
        hidden = [self.apply_head(params, k, last, method="hidden") for k in levels]
        return self.filled(params, hidden, root, tree, base, draw)

    def teacher_inputs(self, aux_hidden_states, tokens, base):
        return [(aux_hidden_states.astype(self.dtype),)] * self.num_draft_heads


KIND = DrafterKind("Medusa", MedusaHeads)
