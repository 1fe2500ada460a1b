"""The rank of every true token among each head's guesses, from one teacher-forced pass over text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.drafters.drafter import Trainable
from hydrajax.models.arrays import Array
from hydrajax.models.base import BoundBase
from hydrajax.models.rows import chunk_width, into_chunks, row_layout


def head_ranks(
    drafter: Trainable, params, features, batch: dict[str, Array], base: BoundBase, chunk_tokens: int, depth: int
) -> Int[Array, "K B T"]:
    """The rank (0: the best guess) that head k < depth at position t gives to the text's token t + 2 + k, int32.

    Positions without such a token hold garbage. Of equal logits the smaller id ranks first, as in top-k. A token that
    the heads do not know ranks behind the base's whole vocabulary.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    positions, mask = row_layout(tokens, segments)
    read = drafter.teacher_hidden(params, features, tokens, base, None, positions, mask)
    width = chunk_width(chunk_tokens, tokens.shape)
    vocab_size = base.config.vocab_size

    def one_head(k):
        def rank(chunk):
            hidden, wanted = chunk
            logits = drafter.head_logits(params, k, hidden, base)
            if drafter.vocabulary is not None:
                wanted = drafter.vocabulary.places_of(wanted, vocab_size)
            chosen = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[..., None], axis=-1)
            before = jnp.arange(logits.shape[-1]) < wanted[..., None]
            rank = jnp.sum((logits > chosen) | ((logits == chosen) & before), axis=-1, dtype=jnp.int32)
            return jnp.where(wanted >= 0, rank, vocab_size)

        chunks = into_chunks((read[k], jnp.roll(tokens, -(k + 2), axis=1)), width)
        ranks = jax.lax.map(rank, chunks)  # [chunks, B, width]
        return jnp.moveaxis(ranks, 0, 1).reshape(tokens.shape[0], -1)[:, : tokens.shape[1]]

    return jnp.stack([one_head(k) for k in range(depth)])
