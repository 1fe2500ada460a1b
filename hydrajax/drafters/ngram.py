"""Earlier occurrences of the end of a text, at a cost that does not grow with the text: hash chains.

LZ77 compressors find repetitions in this way (Deutsch 1996, RFC 1951, section 4). For every length n a table maps a
hash of n tokens to the last position where n tokens of this hash ended, and every position links to the one before it.
A search starts at the hash of the text's end and follows the links, latest position first. N-grams may share a hash, so
tokens are compared at every position: nothing is missed, and collisions cost only extra links. A table has at least as
many entries as the text has positions, so there is less than one extra link on average.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.models.arrays import Array
from hydrajax.models.cache import write_tokens


class History(NamedTuple):
    """The text so far and its n-grams of L lengths, all int32.

    Links count positions from 1, so 0 means none and a history of zeros is empty.

    Attributes:
        tokens: ``[B, S]``, of which the first ``lengths[b]`` are valid.
        latest: ``[B, L, H]`` the last position where an n-gram of each hash ended.
        previous: ``[B, L, S]`` for each position, the one before it where an n-gram of the same hash ended.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    latest: Int[Array, "B L H"]
    previous: Int[Array, "B L S"]


class Matches(NamedTuple):
    """The best M matches of Q queries, longest first, then latest; int32 ``[B, Q, M]``.

    Attributes:
        places: Position where each ended, from 0.
        lengths: Number of tokens that agree, backwards from there; 0 for no match.
    """

    places: Int[Array, "B Q M"]
    lengths: Int[Array, "B Q M"]


def empty(batch: int, slots: int, sizes: range) -> History:
    """Return an empty history with room for ``slots`` tokens, for n-grams of these ``sizes``."""
    n_hashes = 2 ** max((slots - 1).bit_length(), 1)
    shape = batch, len(sizes)
    return History(
        jnp.zeros((batch, slots), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((*shape, n_hashes), jnp.int32),
        jnp.zeros((*shape, slots), jnp.int32),
    )


def append(history: History, tokens: Int[Array, "B T"], counts: Int[Array, " B"], sizes: range) -> History:
    """Return the history with the first ``counts[b]`` tokens appended; the rest is written beyond its length."""
    lengths, latest = history.lengths, history.latest
    text = write_tokens(history.tokens, tokens, lengths)
    each = jnp.arange(tokens.shape[1])
    places = lengths[:, None] + each
    whole = (each < counts[:, None])[:, None] & (places[:, None] >= np.array(sizes)[:, None] - 1)  # [B, L, T]
    nowhere = latest.shape[2]  # no n-gram: beyond the table, and last in the sort
    hashes = jnp.moveaxis(_hashes(_going_back(text, places, sizes[-1]), nowhere, sizes), 2, 1)
    hashes = jnp.where(whole, hashes, nowhere)
    # A position links to the new one before it with the same hash, which sorting makes adjacent, or to the table's.
    hashes, order = jax.lax.sort((hashes, jnp.broadcast_to(each, hashes.shape)), num_keys=1, is_stable=True)
    same = hashes[:, :, 1:] == hashes[:, :, :-1]
    at = 1 + lengths[:, None, None] + order
    known = jnp.take_along_axis(latest, jnp.minimum(hashes, nowhere - 1), axis=2)
    links = jnp.concatenate([known[:, :, :1], jnp.where(same, at[:, :, :-1], known[:, :, 1:])], axis=2)
    links = jnp.where(hashes < nowhere, links, 0)
    _, links = jax.lax.sort((order, links), num_keys=1)
    previous = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice(old, new, (0, start)))(
        history.previous, links, lengths
    )
    is_last = jnp.pad(~same, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    rows, levels = jnp.arange(len(tokens))[:, None, None], jnp.arange(len(sizes))[:, None]
    # The new position is the later one; comparing them makes XLA read the table before it is updated in place.
    latest = latest.at[rows, levels, jnp.where(is_last, hashes, nowhere)].set(jnp.maximum(at, known), mode="drop")
    return History(text, lengths + counts, latest, previous)


def rewound(history: History, lengths: Int[Array, " B"], sizes: range) -> History:
    """Return the history of the first ``lengths[b]`` tokens, with new tables.

    Table entries and links may point to removed tokens. The old tables are not read, so the arrays may also have been
    cut or padded to another number of slots.
    """
    nothing = empty(*history.tokens.shape, sizes)
    return append(nothing, history.tokens, jnp.minimum(history.lengths, lengths), sizes)


def end_of(history: History, last: Int[Array, " B"], sizes: range) -> Int[Array, "B 1 longest"]:
    """Return the last tokens of each sequence and one more token, ``last``, backwards."""
    before = _going_back(history.tokens, history.lengths[:, None] - 1, sizes[-1] - 1)
    return jnp.concatenate([last[:, None, None], before], axis=2)


def matches_of_end(history: History, end: Int[Array, "B 1 longest"], most: int, sizes: range) -> Matches:
    """Return earlier occurrences of the text's end with one more token; ``end`` comes from `end_of`."""
    hashes = jnp.moveaxis(_hashes(end, history.latest.shape[2], sizes), 2, 1)
    first = jnp.moveaxis(jnp.take_along_axis(history.latest, hashes, axis=2), 1, 2)
    return _matches(history, end, first, most, sizes)


def matches_within(history: History, places: Int[Array, "B Q"], most: int, sizes: range) -> Matches:
    """Return earlier occurrences of the text that ends at each of these positions."""
    first = jnp.take_along_axis(history.previous, places[:, None], axis=2)
    return _matches(history, _going_back(history.tokens, places, sizes[-1]), jnp.moveaxis(first, 1, 2), most, sizes)


def _matches(
    history: History, ends: Int[Array, "B Q longest"], first: Int[Array, "B Q L"], most: int, sizes: range
) -> Matches:
    """Follow the links of every length from the ``first`` position until M positions agree or none is left.

    M of each length suffice: links run from late to early, so whatever precedes a match among those that agree in at
    least n tokens is later and therefore better.
    """
    rows, levels = jnp.arange(len(ends))[:, None, None], jnp.arange(len(sizes))
    wanted, n_places = np.array(sizes, np.int32), history.tokens.shape[1]

    def follow(carry):
        at, count, found = carry
        there = _going_back(history.tokens, at - 1, sizes[-1])  # [B, Q, L, longest]
        agrees = (there == ends[:, :, None]) & (at[..., None] > np.arange(sizes[-1]))
        length = jnp.sum(jnp.cumprod(agrees, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
        is_match = (at > 0) & (length >= wanted)
        score = jnp.where(length == wanted, length * (n_places + 1) + at, 0)  # longer ones count at their length
        is_next = is_match[..., None] & (jnp.arange(most) == count[..., None])
        count = count + is_match
        before = jnp.where(at > 0, history.previous[rows, levels, jnp.maximum(at - 1, 0)], 0)
        return jnp.where(count < most, before, 0), count, jnp.where(is_next, score[..., None], found)

    carry = first, jnp.zeros_like(first), jnp.zeros((*first.shape, most), jnp.int32)
    *_, found = jax.lax.while_loop(lambda carry: jnp.any(carry[0] > 0), follow, carry)
    best = jnp.flip(jnp.sort(found.reshape(*found.shape[:2], -1), axis=-1), axis=-1)[:, :, :most]
    return Matches(jnp.maximum(best % (n_places + 1) - 1, 0), best // (n_places + 1))


def _going_back(tokens: Int[Array, "B S"], places: Int[Array, "B ..."], count: int) -> Int[Array, "B ... count"]:
    """Return ``count`` tokens backwards from each position; before the beginning of the text they are arbitrary."""
    rows = jnp.arange(len(tokens)).reshape(-1, *(1,) * places.ndim)
    return tokens[rows, jnp.clip(places[..., None] - np.arange(count), 0, tokens.shape[1] - 1)]


def _hashes(going_back: Int[Array, "B n longest"], n_hashes: int, sizes: range) -> Int[Array, "B n L"]:
    """Return a hash below ``n_hashes``, a power of two, for the n-gram of each size that ends with the first token."""
    mixed, found = jnp.zeros(going_back.shape[:-1], jnp.uint32), []
    for back in range(sizes[-1]):
        # Multiplication carries low bits to high ones, and the shift brings them back for the next token.
        mixed = (mixed ^ going_back[..., back].astype(jnp.uint32)) * np.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> 15)
        if back + 1 in sizes:
            found.append((mixed * np.uint32(0x85EBCA77)) >> (33 - n_hashes.bit_length()))
    return jnp.stack(found, axis=-1).astype(jnp.int32)
