"""Prompt lookup: the text so far is the draft. No weights and nearly no time.

What was written once is often written again: names in code, sentences of a document in its summary. The last tokens are
looked up in the text so far, and what followed them there is proposed (prompt lookup decoding, Saxena 2023; the same
idea as ``prompt_lookup_num_tokens`` in transformers). Where they occur more than once, the continuations make a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.drafters.costs import CostsNothing
from hydrajax.drafters.drafter import Proposal, SeesAcceptedOnly
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.cache import write_tokens
from hydrajax.models.ranking import top_tokens

NOTHING = -1  # in the place of a token: no match says what comes here


class History(NamedTuple):
    """Token ids of the text so far, int32 ``[B, S]``, of which the first ``lengths[b]`` of row b are there."""

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]


class Continuations(NamedTuple):
    """What followed the best M matches, int32 ``[B, M, K]``, and which of them are matches at all, bool ``[B, M]``."""

    tokens: Int[Array, "B M K"]
    found: Bool[Array, "B M"]


@dataclass(frozen=True)
class PromptLookup(SeesAcceptedOnly, CostsNothing):
    """Proposes what followed the longest n-gram of the text's end where it occurred before, the latest first.

    depth: K, the longest continuation. longest, shortest: of the n-grams that are compared; of two matches the longer
    one counts more, of equally long ones the later. matches: how many make the tree; rank r among a node's children
    is the r-th different token that the matches agreeing with the path so far go on with. A match nearer to the end
    than K is taken to go on repeating.

    The rules that can judge it are those for given candidates (greedy, exact sampling, typical): it draws nothing.
    Methods: `hydrajax.drafters.drafter.Drafter`. Raises `HydrajaxError` for numbers that make no sense.
    """

    depth: int = 10
    longest: int = 4
    shortest: int = 1
    matches: int = 8
    reads: tuple[int, ...] = (0,)
    draws: bool = False
    grows: bool = False
    default_tree: str = "chain-5"

    def __post_init__(self):
        if min(self.depth, self.shortest, self.matches) < 1:
            raise HydrajaxError("lookup: depth, shortest and matches must be at least 1")
        if self.longest < self.shortest:
            raise HydrajaxError(f"lookup: longest must be at least shortest, {self.shortest}, found {self.longest}")

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return History(jnp.zeros((batch, slots), jnp.int32), jnp.zeros(batch, jnp.int32))

    def advance(self, params, state, features, tokens, counts, next_root, base):
        return _append(state, tokens, counts)

    def propose(self, params, state, root, tree, base, draw=None):
        # With one leaf below every node only the best match is ever asked.
        n_matches = 1 if tree.max_rank <= 0 else self.matches
        found = self._look_up(_append(state, root[:, None], jnp.ones_like(root)), tree.depth, n_matches)
        tokens, agreeing = [root[:, None]], found.found[:, None]  # [B, nodes, M]: matches that hold the path to a node
        above = np.zeros(1, np.int32)  # the nodes of the level before
        for d, level in enumerate(tree.levels):
            following = found.tokens[:, None, :, d]
            agreeing, above = agreeing[:, np.searchsorted(above, level.parents)], level.children
            rank = _ranks_of_matches(following, agreeing)  # [B, parents, M]
            holds = agreeing[:, level.parent_slot] & (rank[:, level.parent_slot] == level.ranks[:, None])
            first = jnp.argmax(holds, axis=-1)
            token = jnp.take_along_axis(jnp.broadcast_to(following, holds.shape), first[..., None], axis=-1)[..., 0]
            tokens.append(jnp.where(jnp.any(holds, axis=-1), token, NOTHING))
            agreeing = holds
        return Proposal(jnp.concatenate(tokens, axis=1), tree.topology)

    def ranks(self, params, features, batch, base, chunk_tokens, depth):
        """One position after the other, as decoding would look there; rows must hold one document each."""
        tokens = batch["tokens"]
        length = tokens.shape[1]

        def at(t):
            known = History(tokens, jnp.full(len(tokens), t + 2, jnp.int32))  # up to t, and the root
            found = self._look_up(known, depth, self.matches)
            agreeing, ranks = found.found, []
            for k in range(depth):
                true = tokens[:, jnp.minimum(t + 2 + k, length - 1), None]
                same = agreeing & (found.tokens[:, :, k] == true)
                rank = jnp.where(same, _ranks_of_matches(found.tokens[:, :, k], agreeing), length)
                ranks.append(jnp.min(rank, axis=-1))  # `length` where no match goes on like the text
                agreeing = same
            return jnp.stack(ranks)  # [K, B]

        return jnp.moveaxis(jax.lax.map(at, jnp.arange(length)), 0, -1).astype(jnp.int32)

    def _look_up(self, history: History, depth: int, n_matches: int) -> Continuations:
        """The best matches of the end of the history with earlier places of it."""
        tokens, lengths = history
        end = lengths[:, None] - 1  # place of the last token
        places = jnp.arange(tokens.shape[1])
        # A place matches as many tokens as agree, going back from it and from the end.
        length, agrees = 0, places < end
        for back in range(self.longest):
            last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
            agrees = agrees & (jnp.roll(tokens, back, axis=1) == last) & (places >= back)
            length = length + agrees
        # The longest match, and of equally long ones the latest; exact in float32 up to 16 million.
        score = jnp.where(length >= self.shortest, length * tokens.shape[1] + places, -1)
        best = top_tokens(score.astype(jnp.float32), min(n_matches, tokens.shape[1]))  # [B, M] places
        period = end - best
        following = jnp.arange(depth) % jnp.maximum(period, 1)[..., None]
        at = jnp.clip(best[..., None] + 1 + following, 0, tokens.shape[1] - 1)
        rows = jnp.arange(len(tokens))[:, None, None]
        return Continuations(tokens[rows, at], jnp.take_along_axis(score, best, axis=1) >= 0)


def _append(history: History, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> History:
    """The history with the first ``counts[b]`` tokens added to row b; the rest is written beyond its length."""
    return History(write_tokens(history.tokens, tokens, history.lengths), history.lengths + counts)


def _ranks_of_matches(following: Int[Array, "*#n M"], agreeing: Bool[Array, "*#n M"]) -> Int[Array, "*#n M"]:
    """The rank of each match's next token among the different ones of the agreeing matches; the best match's is 0."""
    n_matches = following.shape[-1]
    same = following[..., :, None] == following[..., None, :]
    earlier = jnp.tri(n_matches, k=-1, dtype=bool)
    is_first = agreeing & ~jnp.any(same & earlier & agreeing[..., None, :], axis=-1)
    before = jnp.sum(earlier & is_first[..., None, :], axis=-1)  # different tokens before each match
    of_its_first = same & is_first[..., None, :]
    return jnp.sum(jnp.where(of_its_first, before[..., None, :], 0), axis=-1)
