"""Prompt lookup: the text so far is the draft, without weights and at almost no cost.

Text often repeats itself: names in code, sentences of a document in its summary. The last tokens are looked up in the
text so far, and what followed them there is proposed (prompt lookup decoding, Saxena 2023;
``prompt_lookup_num_tokens`` in transformers). Several occurrences give a tree of continuations.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.drafters import ngram
from hydrajax.drafters.chains import NO_TOKEN, by_rank, estimated, ranks_of_matches
from hydrajax.drafters.drafter import DrafterSpec, SeesAcceptedOnly
from hydrajax.drafters.kind import DrafterKind
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array

# Estimates of acceptance (`hydrajax.drafters.chains.estimated`), measured as docs/reference/drafts.md describes.
SURVIVAL, DOUBT = (0.25, 0.5, 0.7, 0.88), 0.3


class Continuations(NamedTuple):
    """Continuations of the best M matches of Q queries.

    Attributes:
        tokens: int32 ``[B, Q, M, K]``.
        lengths: int32 ``[B, Q, M]`` of the matches, in tokens; 0 for no match.
    """

    tokens: Int[Array, "B Q M K"]
    lengths: Int[Array, "B Q M"]

    @property
    def found(self) -> Bool[Array, "B Q M"]:
        """True where there is a match."""
        return self.lengths > 0


@dataclass(frozen=True)
class PromptLookup(SeesAcceptedOnly):
    """Propose what followed earlier occurrences of the longest n-gram at the end of the text, latest first.

    It draws nothing, so the rules for given candidates apply: greedy, exact sampling and typical.

    Attributes:
        depth: K, the longest continuation.
        longest, shortest: Lengths of the n-grams that are compared. A longer match ranks first; of equal lengths, the
            later one.
        matches: Number of matches that make the tree. Rank r among a node's children is the r-th distinct token that
            follows the matches which agree with the path so far. A match closer to the end than K is assumed to repeat.

    Raises:
        HydrajaxError: For numbers out of range.
    """

    depth: int = 10
    longest: int = 4
    shortest: int = 1
    matches: int = 8

    def __post_init__(self):
        if min(self.depth, self.shortest, self.matches) < 1:
            numbers = f"depth {self.depth}, shortest {self.shortest}, matches {self.matches}"
            raise HydrajaxError(f"lookup: got {numbers}, expected at least 1 for each")
        if self.longest < self.shortest:
            raise HydrajaxError(f"lookup: longest: got {self.longest}, expected at least shortest, {self.shortest}")

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(depth=self.depth, default_tree="chain-5")

    def init(self, rng, base):
        return {}

    @property
    def sizes(self) -> range:
        """The lengths of the n-grams."""
        return range(self.shortest, self.longest + 1)

    def init_state(self, batch, slots):
        return ngram.empty(batch, slots, self.sizes)

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return ngram.append(state, tokens, counts, self.sizes)

    def rewind(self, state, lengths):
        return ngram.rewound(state, lengths, self.sizes)

    def propose(self, params, state, root, tree, base, draw=None):
        # A chain needs only the best match.
        found = self.look_up(state, root, tree.depth, 1 if tree.max_rank <= 0 else self.matches)
        return by_rank(root, found.tokens, found.found, tree)

    def chains(self, params, state, root, depth):
        """Return the chains of all matches (`hydrajax.drafters.chains.Source`)."""
        found = self.look_up(state, root, depth, self.matches)
        return estimated(found.tokens[:, 0], found.lengths[:, 0], SURVIVAL, DOUBT)

    def best_chain(self, state: ngram.History, root: Int[Array, " B"], depth: int) -> Int[Array, "B K"]:
        """Return what followed the best match, `NO_TOKEN` without one."""
        found = self.look_up(state, root, depth)
        return jnp.where(found.found[:, 0, :1], found.tokens[:, 0, 0], NO_TOKEN)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Look up every position as decoding would there: links point only to earlier positions, so later text is not
        read. Rows must hold one document each.
        """
        tokens = batch["tokens"]
        n_rows, length = tokens.shape
        whole = jnp.full(n_rows, length, jnp.int32)
        known = ngram.append(ngram.empty(n_rows, length, self.sizes), tokens, whole, self.sizes)
        roots = jnp.broadcast_to(jnp.minimum(jnp.arange(length) + 1, length - 1), tokens.shape)
        found = self._continuations(
            known, roots, tokens[:, roots[0]], ngram.matches_within(known, roots, self.matches, self.sizes), depth
        )
        agreeing, ranks = found.found, []
        for k in range(depth):
            true = tokens[:, np.minimum(np.arange(length) + 2 + k, length - 1), None]
            same = agreeing & (found.tokens[..., k] == true)
            rank = jnp.where(same, ranks_of_matches(found.tokens[..., k], agreeing), length)
            ranks.append(jnp.min(rank, axis=-1))  # `length` if no match continues like the text
            agreeing = same
        return jnp.stack(ranks).astype(jnp.int32)

    def look_up(self, state: ngram.History, root: Int[Array, " B"], depth: int, n_matches: int = 1) -> Continuations:
        """Return what followed earlier occurrences of the text's end, ``root`` included: one query per sequence."""
        end = ngram.end_of(state, root, self.sizes)
        found = ngram.matches_of_end(state, end, n_matches, self.sizes)
        return self._continuations(state, state.lengths[:, None], root[:, None], found, depth)

    def _continuations(
        self,
        history: ngram.History,
        ends: Int[Array, "B Q"],
        last: Int[Array, "B Q"],
        matches: ngram.Matches,
        depth: int,
    ) -> Continuations:
        """Return what followed each match up to the text's end at ``ends``, whose token is ``last``, then again from
        the match.
        """
        first = matches.places[..., None] + 1
        period = jnp.maximum(ends[..., None, None] + 1 - first, 1)
        at = first + jnp.arange(depth) % period
        rows = jnp.arange(len(ends))[:, None, None, None]
        tokens = history.tokens[rows, jnp.minimum(at, history.tokens.shape[1] - 1)]
        tokens = jnp.where(at == ends[..., None, None], last[..., None, None], tokens)
        return Continuations(tokens, matches.lengths)


KIND = DrafterKind("Lookup", PromptLookup, about="n-grams of the text so far")
