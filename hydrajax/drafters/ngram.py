"""Where the end of a text occurred before, at a cost that does not grow with the text: hash chains.

Compressors of the LZ77 family find repetitions like this (Deutsch 1996, RFC 1951, section 4). For every length n there
is a table from a hash of n tokens to the last place where n tokens of this hash ended, and from every place a link to
the one before it. Whoever looks for the end of the text starts at its hash and follows the links, latest place first.
Two n-grams may share a hash, so tokens are compared at every place; nothing is missed and nothing is wrong. What it
costs are links of other n-grams on the way. A table has at least as many entries as the text has places, so that there
is on average less than one, however long the text.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.models.arrays import Array
from hydrajax.models.cache import write_tokens


class History(NamedTuple):
    """The text so far and its n-grams of L lengths, all int32. Links count places from 1, so that 0 is none and a
    history of zeros is an empty one.

    tokens:   ``[B, S]`` of which the first ``lengths[b]`` of row b are there. lengths: ``[B]``.
    latest:   ``[B, L, H]`` the last place where an n-gram of each hash ended.
    previous: ``[B, L, S]`` of each place, the one before it where an n-gram of the same hash ended.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    latest: Int[Array, "B L H"]
    previous: Int[Array, "B L S"]


class Matches(NamedTuple):
    """Of each of Q queries the best M matches, the longest first and of equally long ones the latest; int32 [B, Q, M].

    places: where each ended, from 0. lengths: how many tokens agree, going back from there; 0 for no match.
    """

    places: Int[Array, "B Q M"]
    lengths: Int[Array, "B Q M"]


def empty(batch: int, slots: int, sizes: range) -> History:
    """No text, with room for ``slots`` tokens. sizes: the lengths n of the n-grams that are kept."""
    n_hashes = 2 ** max((slots - 1).bit_length(), 1)
    shape = batch, len(sizes)
    return History(
        jnp.zeros((batch, slots), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((*shape, n_hashes), jnp.int32),
        jnp.zeros((*shape, slots), jnp.int32),
    )


def append(history: History, tokens: Int[Array, "B T"], counts: Int[Array, " B"], sizes: range) -> History:
    """The history with the first ``counts[b]`` tokens added to row b; the rest is written beyond its length."""
    lengths, latest = history.lengths, history.latest
    text = write_tokens(history.tokens, tokens, lengths)
    each = jnp.arange(tokens.shape[1])
    places = lengths[:, None] + each
    whole = (each < counts[:, None])[:, None] & (places[:, None] >= np.array(sizes)[:, None] - 1)  # [B, L, T]
    nowhere = latest.shape[2]  # the hash of what is no n-gram: beyond the table, and last where hashes are sorted
    hashes = jnp.moveaxis(_hashes(_going_back(text, places, sizes[-1]), nowhere, sizes), 2, 1)
    hashes = jnp.where(whole, hashes, nowhere)
    # A place's link is the new place before it with the same hash, which sorting puts beside it, or what the table has.
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
    # The new place is the later one. That it is compared makes the table be read before it is written, in place.
    latest = latest.at[rows, levels, jnp.where(is_last, hashes, nowhere)].set(jnp.maximum(at, known), mode="drop")
    return History(text, lengths + counts, latest, previous)


def rewound(history: History, lengths: Int[Array, " B"], sizes: range) -> History:
    """Back to the first ``lengths[b]`` tokens of row b, at most those that are there; the tables are made anew.

    A table entry may point to a token that is gone, and so may the links behind it. The old tables are not read, so
    the arrays may also have been cut, or filled up, to another number of slots.
    """
    nothing = empty(*history.tokens.shape, sizes)
    return append(nothing, history.tokens, jnp.minimum(history.lengths, lengths), sizes)


def end_of(history: History, last: Int[Array, " B"], sizes: range) -> Int[Array, "B 1 longest"]:
    """The last tokens of each row, going back, of the text and one more token, ``last``."""
    before = _going_back(history.tokens, history.lengths[:, None] - 1, sizes[-1] - 1)
    return jnp.concatenate([last[:, None, None], before], axis=2)


def matches_of_end(history: History, end: Int[Array, "B 1 longest"], most: int, sizes: range) -> Matches:
    """Where the text ended before as it ends with one more token; ``end`` is from `end_of`."""
    hashes = jnp.moveaxis(_hashes(end, history.latest.shape[2], sizes), 2, 1)
    first = jnp.moveaxis(jnp.take_along_axis(history.latest, hashes, axis=2), 1, 2)
    return _matches(history, end, first, most, sizes)


def matches_within(history: History, places: Int[Array, "B Q"], most: int, sizes: range) -> Matches:
    """Where the text up to each of these places ended before as it ends there."""
    first = jnp.take_along_axis(history.previous, places[:, None], axis=2)
    return _matches(history, _going_back(history.tokens, places, sizes[-1]), jnp.moveaxis(first, 1, 2), most, sizes)


def _matches(
    history: History, ends: Int[Array, "B Q longest"], first: Int[Array, "B Q L"], most: int, sizes: range
) -> Matches:
    """Follow the links of every length from the ``first`` place of each, until M places agree with the end or none is
    left.

    M of each length are enough: what comes before a match among those that agree in n tokens or more is later than it,
    so where the match agrees in n tokens and no more, it is better.
    """
    rows, levels = jnp.arange(len(ends))[:, None, None], jnp.arange(len(sizes))
    wanted, n_places = np.array(sizes, np.int32), history.tokens.shape[1]

    def follow(carry):
        at, count, found = carry
        there = _going_back(history.tokens, at - 1, sizes[-1])  # [B, Q, L, longest]
        agrees = (there == ends[:, :, None]) & (at[..., None] > np.arange(sizes[-1]))
        length = jnp.sum(jnp.cumprod(agrees, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
        is_match = (at > 0) & (length >= wanted)
        score = jnp.where(length == wanted, length * (n_places + 1) + at, 0)  # longer ones are found as longer ones
        is_next = is_match[..., None] & (jnp.arange(most) == count[..., None])
        count = count + is_match
        before = jnp.where(at > 0, history.previous[rows, levels, jnp.maximum(at - 1, 0)], 0)
        return jnp.where(count < most, before, 0), count, jnp.where(is_next, score[..., None], found)

    carry = first, jnp.zeros_like(first), jnp.zeros((*first.shape, most), jnp.int32)
    *_, found = jax.lax.while_loop(lambda carry: jnp.any(carry[0] > 0), follow, carry)
    best = jnp.flip(jnp.sort(found.reshape(*found.shape[:2], -1), axis=-1), axis=-1)[:, :, :most]
    return Matches(jnp.maximum(best % (n_places + 1) - 1, 0), best // (n_places + 1))


def _going_back(tokens: Int[Array, "B S"], places: Int[Array, "B ..."], count: int) -> Int[Array, "B ... count"]:
    """``count`` tokens from each place on, going back; before the text's beginning they may be any."""
    rows = jnp.arange(len(tokens)).reshape(-1, *(1,) * places.ndim)
    return tokens[rows, jnp.clip(places[..., None] - np.arange(count), 0, tokens.shape[1] - 1)]


def _hashes(going_back: Int[Array, "B n longest"], n_hashes: int, sizes: range) -> Int[Array, "B n L"]:
    """A number below ``n_hashes``, a power of two, for the n-gram of each size that ends with the first token."""
    mixed, found = jnp.zeros(going_back.shape[:-1], jnp.uint32), []
    for back in range(sizes[-1]):
        # Multiplication carries what is low to what is high, and the shift brings it back for the next token.
        mixed = (mixed ^ going_back[..., back].astype(jnp.uint32)) * np.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> 15)
        if back + 1 in sizes:
            found.append((mixed * np.uint32(0x85EBCA77)) >> (33 - n_hashes.bit_length()))
    return jnp.stack(found, axis=-1).astype(jnp.int32)
