"""Hydra heads: sequentially dependent predictions (hydra section 3)."""

from dataclasses import dataclass

import jax.numpy as jnp

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.filling import fill
from hydrajax.drafters.head_stack import HeadStack
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.prefix import Prefix
from hydrajax.drafters.trained import StackSettings
from hydrajax.models.arrays import DType
from hydrajax.ops.sharded import by_token


@dataclass(frozen=True)
class HydraHeads(HeadStack):
    """Head k reads [h_t, E(x_{t+1}), E(x̂_{t+2}) ... E(x̂_{t+1+k})], so it depends on the tokens before it on its path.

    ``n_layers`` 1 is Hydra, 4 with a ``prefix`` layer is Hydra++ (hydra 3.1).
    """

    num_draft_heads: int
    width: int
    vocab_size: int
    n_layers: int = 1
    share_blocks: bool = True
    hidden_state_offset: int = 0
    dtype: DType = jnp.float32
    dropout: float = 0.0
    small_lm_head: LmHead | None = None
    prefix: Prefix | None = None

    @property
    def lm_head(self) -> LmHead:
        return self.small_lm_head or LmHead(bias=True)

    def path_length(self, k):
        return k

    def propose(self, params, state, root, tree, base, draw=None):
        """Fill the tree with one head call for all parents of a level."""
        embedded = base.embed(root).astype(self.dtype)
        shared = jnp.concatenate([self.hidden_in(state), embedded], axis=-1)[:, None]

        def guess(nothing, beam):
            path = base.embed(beam.paths[:, :, 1:]).astype(self.dtype)
            path = path.reshape(*beam.paths.shape[:2], -1)
            hidden = self.apply_head(params, beam.depth, shared, path, method="hidden")
            return nothing, self.head_logits(params, beam.depth, hidden, base)

        return fill(tree, root, guess, None, self.lm_head, self.vocab_size, draw)[0]

    def teacher_inputs(self, aux_hidden_states, tokens, base):
        """Return the inputs of training: head k at position t reads the true tokens t+1 ... t+1+k; the last k+1
        positions wrap around and must be masked.
        """
        embeddings = by_token(base.embed(tokens).astype(self.dtype))
        shifted = [jnp.roll(embeddings, -(k + 1), axis=1) for k in range(self.num_draft_heads)]
        shared = jnp.concatenate([aux_hidden_states.astype(self.dtype), shifted[0]], axis=-1)
        return [
            (shared, jnp.concatenate(shifted[1 : k + 1], axis=-1) if k else None) for k in range(self.num_draft_heads)
        ]


HYDRA = DrafterKind("Hydra", HydraHeads)
HYDRA_PP = DrafterKind("Hydra++", HydraHeads, StackSettings(prefix=True, n_layers=4))
