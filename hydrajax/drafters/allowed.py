"""The tokens that a grammar allows at the nodes of a tree, while it is filled from a draft's logits.

A decode step knows them, and drafters do not: `fill` and `grow` mask the logits of each level, so that no node holds a
token that the base cannot emit. What is drawn then has the draft's distribution, restricted to the allowed tokens and
renormalised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.models.arrays import Array

WORD = 32  # tokens per word of a mask
# allowed(paths int32 [B, n, d]) -> uint32 [B, n, W]: the tokens that may follow each of n paths of d tokens, the first
# of which is the root. Token t is bit t % 32 of word t // 32. None: they are not known.
Allowed = Callable[[Int[Array, "B n d"]], UInt32[Array, "B n W"] | None]
_allowed: ContextVar[Allowed | None] = ContextVar("allowed", default=None)


@contextmanager
def only(allowed: Allowed | None) -> Iterator[None]:
    """Trace with trees that are filled with allowed tokens only; None for all tokens."""
    before = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(before)


def is_allowed(words: UInt32[Array, "*rows W"], vocab_size: int) -> Bool[Array, "*rows V"]:
    """Return the bits of a mask."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab_size] > 0


@dataclass(frozen=True)
class Mask:
    """The tokens that may follow the nodes of a beam.

    Attributes:
        lm_head: The draft's, whose logits are masked.
        words: uint32 ``[B, n, W]`` of `Allowed`; None for all tokens.
    """

    lm_head: LmHead
    words: UInt32[Array, "B n W"] | None

    @classmethod
    def after(cls, paths: Int[Array, "B n d"], lm_head: LmHead) -> Mask:
        """Return the mask after these paths, of the context of `only`."""
        allowed = _allowed.get()
        return cls(lm_head, None if allowed is None else allowed(paths))

    def over(self, logits: Float[Array, "B n_ V_"]) -> Float[Array, "B n V_"]:
        """Return the logits, -inf for forbidden tokens. They are unchanged after a node that no token of the draft
        follows, so that its likelihoods are numbers.
        """
        if self.words is None:
            return logits
        if self.lm_head.vocabulary is None:
            allowed = is_allowed(self.words, logits.shape[-1])
        else:
            tokens = self.lm_head.vocabulary.tokens
            allowed = (self.words[..., tokens // WORD] >> (tokens % WORD).astype(np.uint32)) & 1 > 0
        return jnp.where(allowed | ~jnp.any(allowed, axis=-1, keepdims=True), logits, -jnp.inf)

    def keep(self, tokens: Int[Array, "B n k"]) -> Int[Array, "B n k"]:
        """Return the tokens chosen from `over`, -1 for forbidden ones: fewer than k are allowed."""
        if self.words is None:
            return tokens
        place = jnp.maximum(tokens, 0)
        words = jnp.take_along_axis(self.words, place // WORD, axis=-1)
        allowed = (words >> (place % WORD).astype(jnp.uint32)) & 1 > 0
        return jnp.where(allowed & (tokens >= 0), tokens, -1)

    def keep_likely(
        self, tokens: Int[Array, "B n k"], log_p: Float[Array, "B n k"]
    ) -> tuple[Int[Array, "B n k"], Float[Array, "B n k"]]:
        """Return `keep` and the log-probabilities, -inf for tokens that are not kept."""
        if self.words is None:
            return tokens, log_p
        tokens = self.keep(tokens)
        return tokens, jnp.where(tokens < 0, -jnp.inf, log_p)
