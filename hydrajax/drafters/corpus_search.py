"""Search a suffix corpus for the end of each text, inside a decode step."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.drafters.chains import estimated, leading
from hydrajax.drafters.corpus import CONTEXT, END, NOTHING, Index
from hydrajax.drafters.drafter import CORPUS
from hydrajax.models.arrays import Array

# Estimates of acceptance (`hydrajax.drafters.chains.estimated`), measured as docs/reference/drafts.md describes.
SURVIVAL = (0.15, 0.35, 0.4, 0.6, 0.7, 0.75, 0.8, 0.83, 0.86, 0.88, 0.9, 0.92, 0.93, 0.94, 0.95, 0.96)
DOUBT = 0.5


class Tail(NamedTuple):
    """The last tokens of each text, all int32.

    Attributes:
        tokens: ``[B, CONTEXT - 1]``, the last one at the end; `NOTHING` before the beginning.
        lengths: ``[B]`` of the texts.
    """

    tokens: Int[Array, "B context"]
    lengths: Int[Array, " B"]


@dataclass(frozen=True)
class CorpusSearch:
    """Chains that follow the text's end in past outputs (`hydrajax.drafters.corpus.Corpus`).

    The places whose contexts have most tokens in common with the end of the text are neighbours of the place where the
    text itself would be sorted in. Without a corpus among the parameters there are none.

    Attributes:
        matches: M, chains that are kept.
        neighbours: Places on each side that are compared.
    """

    matches: int = 8
    neighbours: int = 8

    def init_state(self, batch, slots):
        return Tail(jnp.full((batch, CONTEXT - 1), NOTHING, jnp.int32), jnp.zeros(batch, jnp.int32))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        both = jnp.concatenate([state.tokens, tokens.astype(jnp.int32)], axis=1)
        last = counts[:, None] + np.arange(CONTEXT - 1)
        return Tail(jnp.take_along_axis(both, last, axis=1), state.lengths + counts)

    def rewind(self, state, lengths):
        removed = jnp.maximum(state.lengths - lengths, 0)[:, None]
        from_ = np.arange(CONTEXT - 1) - removed
        kept = jnp.take_along_axis(state.tokens, jnp.maximum(from_, 0), axis=1)
        return Tail(jnp.where(from_ >= 0, kept, NOTHING), jnp.minimum(state.lengths, lengths))

    def chains(self, params, state, root, depth):
        return estimated(*self.best_matches(params, state, root, depth), SURVIVAL, DOUBT)

    def best_matches(
        self, params, state: Tail, root: Int[Array, " B"], depth: int
    ) -> tuple[Int[Array, "B M K"], Int[Array, "B M"]]:
        """Return what follows the M longest matches, with `END` after each text, and their lengths."""
        if CORPUS not in params:
            return jnp.full((len(root), self.matches, depth), END), jnp.zeros((len(root), self.matches), jnp.int32)
        index = params[CORPUS].index
        end = jnp.concatenate([root[:, None], jnp.flip(state.tokens, axis=1)], axis=1)
        first = lower_bound(index, end)[:, None]
        each = np.arange(self.neighbours)
        # Of equal contexts the latest place comes first, at `first`.
        places = first + np.concatenate([each, -1 - each])
        inside = (places >= 0) & (places < index.count)
        at = index.order[jnp.clip(places, 0, len(index.order) - 1)]
        agrees = leading(contexts(index, at) == end[:, None])
        lengths = jnp.where(inside, jnp.sum(agrees, axis=2, dtype=jnp.int32), 0)
        lengths, best = jax.lax.top_k(lengths, min(self.matches, 2 * self.neighbours))
        at = jnp.take_along_axis(at, best, axis=1)
        return index.tokens[(at[:, :, None] + np.arange(depth)) % len(index.tokens)], lengths


def contexts(index: Index, places: Int[Array, "*n"]) -> Int[Array, "*n context"]:
    """Return the tokens before each place, backwards."""
    return index.tokens[(places[..., None] - 1 - np.arange(CONTEXT)) % len(index.tokens)]


def lower_bound(index: Index, end: Int[Array, "B context"]) -> Int[Array, " B"]:
    """Return the first place in the order whose context is not less than each text's end."""
    steps = len(index.order).bit_length()

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        there = contexts(index, index.order[jnp.minimum(middle, len(index.order) - 1)])
        first = jnp.argmax(there != end, axis=1)[:, None]
        less = jnp.take_along_axis(there < end, first, axis=1)[:, 0] & (low < high)
        return jnp.where(less, middle + 1, low), jnp.where(less | (low >= high), high, middle)

    low = jnp.zeros(len(end), jnp.int32)
    return jax.lax.fori_loop(0, steps, halve, (low, jnp.broadcast_to(index.count[0], low.shape)))[0]
