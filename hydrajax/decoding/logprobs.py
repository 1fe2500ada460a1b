"""Log-probabilities under the base: of the emitted tokens, and of the most likely tokens at their positions.

They belong to the base's own distribution given the text before a token, without penalties, temperature and truncation,
for any rule. The engine reads them from the logits of every step; rules are not involved.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.decoding.acceptance import Acceptance
from hydrajax.models.arrays import Array
from hydrajax.models.cache import write_tokens
from hydrajax.ops import log_probabilities, log_probability, top_tokens


class TopTokens(NamedTuple):
    """The base's k most likely tokens at some positions, most likely first; ties by the smallest id.

    Attributes:
        ids: int32 ``[*places, k]``.
        logprobs: float32, of the same shape.
    """

    ids: Int[Array, "*places k"]
    logprobs: Float[Array, "*places k"]


class Logprobs(NamedTuple):
    """Log-probabilities at some positions.

    Attributes:
        chosen: float32 ``[*places]``, of the tokens of the text.
        top: The most likely tokens; None if not requested.
    """

    chosen: Float[Array, "*places"]
    top: TopTokens | None = None

    @staticmethod
    def nothing(places: tuple[int, ...], k: int) -> Logprobs:
        """Return zeros with room for k most likely tokens."""
        room = (*places, k)
        top = TopTokens(jnp.zeros(room, jnp.int32), jnp.zeros(room, jnp.float32)) if k else None
        return Logprobs(jnp.zeros(places, jnp.float32), top)

    @staticmethod
    def of(logits: Float[Array, "*places V"], tokens: Int[Array, "*places"], k: int) -> Logprobs:
        """Return the log-probabilities of these tokens, and of the k most likely ones."""
        top = None
        if k:
            ids = top_tokens(logits, k)  # not likeliest_tokens: a chosen token's number is its number here, to the bit
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
        """Return the output's log-probabilities with a path's ``tokens`` written at ``lengths[b]``, and the bonus
        token's.

        The base chose each token at the node before it, and the root in the previous step (``root``).
        """
        # Beyond its last node a path repeats it; the bonus token follows there.
        accepts = jnp.arange(tokens.shape[1]) < accepted.accept_length[:, None]
        following = jnp.where(accepts, jnp.roll(tokens, -1, axis=1), accepted.bonus_token[:, None])
        along_path = jnp.take_along_axis(logits, accepted.path[:, :, None], axis=1)
        found = Logprobs.of(along_path, following, 0 if self.top is None else self.top.ids.shape[-1])

        def written(old, root, found):
            return write_tokens(old, jnp.concatenate([root[:, None], found[:, :-1]], axis=1), lengths)

        return jax.tree.map(written, self, root, found), jax.tree.map(lambda x: x[:, -1], found)
