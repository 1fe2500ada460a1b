"""Snapshots of recurrent layers' states, at the places of a text from which it may be continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydrajax.models.cache import States
from hydrajax.models.llama_config import LlamaConfig

# Prompt tokens after the last snapshot. The last token must run again, and templates rewrite a few, such as "<think>".
TAIL = 16


@dataclass(frozen=True)
class StateSnapshots:
    """The states after some prefixes of one text.

    A KV cache is cut by a length. A state is a sum over a text, so the text is continued from its end, from a snapshot
    or from nothing. A base without recurrent layers has no snapshots and continues from any length.

    Attributes:
        most: Maximum number of snapshots; None without recurrent layers.
        states: By length, ascending.
    """

    most: int | None = None
    states: Mapping[int, States] = field(default_factory=dict)

    @classmethod
    def of(cls, config: LlamaConfig, most: int) -> StateSnapshots:
        """Return no snapshots of a text of this base."""
        return cls(most if config.any_recurrent else None)

    def start(self, shared: int, length: int) -> int:
        """Return the number of tokens, at most ``shared``, from which a text of ``length`` tokens can be continued."""
        if self.most is None:
            return shared
        return max((at for at in (*self.states, length) if at <= shared), default=0)

    def at(self, length: int) -> States:
        """Return the states that `hydrajax.decoding.engine.Engine.rewind` requires for this length."""
        return self.states.get(length, ())

    def until(self, length: int) -> StateSnapshots:
        """Return the snapshots of the first ``length`` tokens."""
        return replace(self, states={at: states for at, states in self.states.items() if at <= length})

    def stops(self, start: int, shared: int, length: int) -> Sequence[int]:
        """Return where to take snapshots while a prompt is prefilled.

        They are before its last tokens, and where it leaves the text that it begins with, as others may too.

        Args:
            start: Tokens that are prefilled.
            shared: Tokens that another text begins with.
            length: Tokens of the prompt.
        """
        last = length - TAIL
        wanted = {at for at in (shared, last) if at == start or start < at <= last} if self.most else set()
        return sorted(at for at in wanted - self.states.keys() if at >= TAIL)

    def taken(self, length: int, states: States) -> StateSnapshots:
        """Add the latest snapshot. One too many displaces the earlier one that spares the fewest tokens."""
        found = {**self.states, length: states}
        if len(found) > self.most:
            before = dict(zip(found, (0, *found), strict=False))
            del found[min((at for at in found if at != length), key=lambda at: at - before[at], default=length)]
        return replace(self, states=found)
