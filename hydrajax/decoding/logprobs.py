"""Log-probabilities under the base, kept beside the tokens of a text: their own, and those of the likeliest there.

They are of the base's own distribution given all before a token: without penalties, temperature and cuts, whatever the
rule. The engine reads them off the logits of every step; no rule has a part in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.decoding.acceptance import Acceptance
from hydrajax.models.arrays import Array
from hydrajax.models.cache import write_tokens
from hydrajax.models.ranking import log_probabilities, log_probability, top_tokens


class TopTokens(NamedTuple):
    """The base's k likeliest tokens at some places, the likeliest first; of equally likely ones the smallest id.

    ids: int32 ``[*places, k]``. logprobs: float32, of the same shape.
    """

    ids: Int[Array, "*places k"]
    logprobs: Float[Array, "*places k"]


class Logprobs(NamedTuple):
    """chosen: float32 ``[*places]``, of the tokens that the text has there. top: None where none are wanted."""

    chosen: Float[Array, "*places"]
    top: TopTokens | None = None

    @staticmethod
    def nothing(places: tuple[int, ...], k: int) -> Logprobs:
        """Zeros, for so many likeliest tokens."""
        room = (*places, k)
        top = TopTokens(jnp.zeros(room, jnp.int32), jnp.zeros(room, jnp.float32)) if k else None
        return Logprobs(jnp.zeros(places, jnp.float32), top)

    @staticmethod
    def of(logits: Float[Array, "*places V"], tokens: Int[Array, "*places"], k: int) -> Logprobs:
        """What the logits say of these tokens, and of the k likeliest."""
        top = None
        if k:
            ids = top_tokens(logits, k)
            top = TopTokens(ids, log_probabilities(logits, ids))
        return Logprobs(log_probability(logits, tokens), top)

    def after_step(
        self,
        root: Logprobs,
        logits: Float[Array, "B N V"],
        tokens: Int[Array, "B path"],
        accepted: Acceptance,
        lengths: Int[Array, " B"],
    ) -> tuple[Logprobs, Logprobs]:
        """Those of an output with a path's ``tokens`` written from ``lengths[b]`` on, and those of the next root.

        The base chose each token at the node before it, and the root of the path in the step before: ``root``.
        """
        # Beyond its last node a path repeats it, and what follows there is the next root.
        accepts = jnp.arange(tokens.shape[1]) < accepted.accept_length[:, None]
        following = jnp.where(accepts, jnp.roll(tokens, -1, axis=1), accepted.bonus_token[:, None])
        along_path = jnp.take_along_axis(logits, accepted.path[:, :, None], axis=1)
        found = Logprobs.of(along_path, following, 0 if self.top is None else self.top.ids.shape[-1])

        def written(old, root, found):
            return write_tokens(old, jnp.concatenate([root[:, None], found[:, :-1]], axis=1), lengths)

        return jax.tree.map(written, self, root, found), jax.tree.map(lambda x: x[:, -1], found)
