"""The interface between decoding and grammars: which tokens may follow a text, known on the host.

`hydrajax.grammar.grammar.Grammar` implements it with llguidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt32

from hydrajax import plugins
from hydrajax.drafters.draft_lm_head import WORD

ALL = 0xFFFFFFFF  # a word of a mask that allows all of its tokens


def words(vocab_size: int) -> int:
    """Return W, the number of words of a mask: token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // WORD)


@runtime_checkable
class Constraint(Protocol):
    """The tokens that one sequence may continue with. The stepped executor calls it in every step, on a CPU from
    a thread of XLA's.

    Attributes:
        error: Why the text cannot continue, None if it can. The sequence then ends before its next token.
    """

    error: str | None

    def copy(self) -> Constraint:
        """Return a constraint at the same place of the text, which changes on its own."""

    def follow(self, text: Sequence[int]) -> None:
        """Move to the end of the text: everything emitted so far and the next root."""

    def forced(self, most: int) -> list[int]:
        """Return tokens that must follow, at most ``most``. They are drafts: the base still judges them."""

    def allow(
        self, tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"], allowed: UInt32[np.ndarray, "N W"]
    ) -> None:
        """Write which tokens may follow each node.

        Args:
            tokens: int32 ``[N]`` in node order; node 0 is the end of the followed text. -1 for nodes without a guess.
            parents: int32 ``[N]`` each node's parent, which precedes it; -1 for node 0 and for nodes that are never
                accepted.
            allowed: uint32 ``[N, W]``, to be filled. Nodes that cannot be reached may hold anything.
        """


def allowed_next(constraint: Constraint, vocab_size: int) -> UInt32[np.ndarray, "1 W"]:
    """Return the mask of the tokens that may follow the text of a constraint."""
    mask, here = np.zeros((1, words(vocab_size)), np.uint32), np.array([-1], np.int32)
    constraint.allow(here, here, mask)
    return mask


@runtime_checkable
class GrammarLike(Protocol):
    """A hashable description of the texts that a sequence may become (`hydrajax.decoding.request.Request.grammar`)."""

    def start(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Constraint:
        """Return the constraint of an empty text.

        Raises:
            HydrajaxError: If no text satisfies the grammar, or the tokenizer cannot be used.
        """


def as_grammar(value: Any) -> GrammarLike | None:
    """Return a grammar given as such, as a JSON schema or as a pydantic model; None for None.

    Raises:
        HydrajaxError: For anything else, and for a schema that is not supported.
    """
    return value if value is None or isinstance(value, GrammarLike) else plugins.find("grammars", "schema")(value)
