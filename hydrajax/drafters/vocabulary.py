"""The tokens that a draft can propose."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array


class Vocabulary:
    """The token ids that a draft can propose, ascending; hashable, so that it can be a field of a drafter."""

    def __init__(self, tokens: Iterable[int]):
        self.tokens = np.unique(np.fromiter(tokens, np.int32))
        if not self.tokens.size or self.tokens[0] < 0:
            raise HydrajaxError("lm_head.vocabulary: expected at least one token id, all from 0 up")

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and np.array_equal(self.tokens, other.tokens)

    def __hash__(self):
        return hash(self.tokens.tobytes())

    def __len__(self):
        return len(self.tokens)

    def __repr__(self):
        return f"Vocabulary({len(self)} tokens)"

    def places_of(self, tokens: Int[Array, "*rows"], vocab_size: int) -> Int[Array, "*rows"]:
        """Return the index of each token id in this vocabulary, -1 for others; ``vocab_size`` is the base's."""
        places = np.full(vocab_size, -1, np.int32)
        places[self.tokens] = np.arange(len(self))
        return jnp.asarray(places)[tokens]

    @classmethod
    def ordered(cls, tokens: Int[np.ndarray, " V"]) -> Vocabulary:
        """Return all token ids in this order, such as that of clusters; not ascending."""
        found = cls(range(len(tokens)))
        if not np.array_equal(np.sort(tokens), found.tokens):
            raise HydrajaxError(f"order of tokens: expected each id from 0 to {len(tokens) - 1} once")
        found.tokens = tokens.astype(np.int32)
        return found

    @classmethod
    def most_frequent(cls, counts: Int[np.ndarray, " V"], size: int) -> Vocabulary:
        """Return the ``size`` ids with the highest counts; ties by the smaller id."""
        return cls(np.argsort(-counts, kind="stable")[:size].tolist())
