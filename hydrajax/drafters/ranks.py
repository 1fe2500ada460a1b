"""Ranks of the true tokens among each head's guesses, from one teacher-forced pass over text."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.clusters import ChosenLogits, over_all
from hydrajax.drafters.trainable import TeacherForced
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, row_layout


def head_ranks(
    drafter: TeacherForced,
    params,
    aux_hidden_states,
    batch: dict[str, Array],
    base: BoundBase,
    chunk_tokens: int,
    depth: int,
) -> Int[Array, "K B T"]:
    """Return the rank (0: the best guess) of the text's token t + 2 + k for head k < depth at position t, int32.

    Positions without such a token hold garbage. Ties go to the smaller id, as in top-k. A token outside the draft's
    vocabulary ranks after the whole vocabulary.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    positions, mask = row_layout(tokens, segments)
    read = drafter.teacher_hidden(params, aux_hidden_states, tokens, base, None, positions, mask)

    def one_head(k):
        def logits(hidden):
            return drafter.head_logits(params, k, hidden, base)

        wanted = jnp.roll(tokens, -(k + 2), axis=1)
        return token_ranks(logits, read[k], wanted, drafter.vocabulary, base.config.vocab_size, chunk_tokens)

    return jnp.stack([one_head(k) for k in range(depth)])


def token_ranks(
    logits_of: Callable[[Array], Array],
    hidden: Float[Array, "B T D"],
    wanted: Int[Array, "B T"],
    vocabulary: Vocabulary | None,
    vocab_size: int,
    chunk_tokens: int,
) -> Int[Array, "B T"]:
    """Return the rank of each wanted token in the logits from the hidden state at its position, int32; see
    `head_ranks`.

    Args:
        logits_of: Maps hidden states to logits over the ``vocabulary``.
        vocabulary: The draft's; None for all ``vocab_size`` tokens.
        chunk_tokens: Maximum number of positions whose logits exist at once.
    """

    def rank(chunk):
        hidden, wanted = chunk
        return ranks_among(logits_of(hidden), wanted, vocabulary, vocab_size)

    ranks = jax.lax.map(rank, into_chunks((hidden, wanted), chunk_width(chunk_tokens, wanted.shape)))
    return jnp.moveaxis(ranks, 0, 1).reshape(wanted.shape[0], -1)[:, : wanted.shape[1]]  # from [chunks, B, width]


def ranks_among(
    logits: Float[Array, "*rows V_"] | ChosenLogits,
    wanted: Int[Array, "*rows"],
    vocabulary: Vocabulary | None,
    vocab_size: int,
) -> Int[Array, "*rows"]:
    """Return the rank of each wanted token in its row of logits over the ``vocabulary``, int32; see `head_ranks`."""
    logits = over_all(logits)
    if vocabulary is not None:
        wanted = vocabulary.places_of(wanted, vocab_size)
    chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)
    before = jnp.arange(logits.shape[-1]) < wanted[..., None]
    rank = jnp.sum((logits > chosen) | ((logits == chosen) & before), axis=-1, dtype=jnp.int32)
    return jnp.where(wanted >= 0, rank, vocab_size)
