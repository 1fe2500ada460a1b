"""Streamed text: decode a growing list of token ids and cut it at stop strings."""

from collections.abc import Sequence

from hydrajax.errors import HydrajaxError
from hydrajax.text.continuation import Continuation


class GrowingText:
    """The text of one sequence while its ids grow.

    Args:
        stop: stop strings, no part of which is ever emitted. The text is cut before the stop string that is complete
            first: ``["b", "abc"]`` cuts "abc" to "a". If several end at the same character, the longest is used. So the
            cut does not depend on the number of ids per call.
        stop_ids: tokens that end the text, before theirs.
        include: the text is cut after the stop string or the token.

    Attributes:
        text: the text that no further id changes.
        stopped: whether a stop string or token was found.
        reason: it, None until then.
        used: number of ids in the text, the one that completed the stop string included.
    """

    def __init__(
        self, answer: Continuation, stop: Sequence[str] = (), stop_ids: Sequence[int] = (), include: bool = False
    ):
        if any(not string for string in stop):
            raise HydrajaxError("stop: got an empty string, expected at least one character")
        self._answer, self._stop, self._full = answer, tuple(stop), ""
        self._stop_ids, self._include = frozenset(stop_ids), include
        self.text, self.stopped, self.used = "", False, 0
        self.reason: str | int | None = None

    def grow(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Take all ids so far and return the new text that no further id changes; ``final`` marks the last call."""
        start, new = len(self.text), () if self.stopped else ids[self.used :]
        for token in new:
            ends = token in self._stop_ids
            before = self._full + self._answer.rest() if ends else ""
            self._full += self._answer.read(token)
            self.used += 1
            if (found := first_stop(self._full, self._stop)) is not None:
                self.reason, cut = found, self._full.index(found)
                self.stopped, self.text = True, self._full[: cut + len(found) * self._include]
            elif ends:
                self.reason, self.stopped = token, True
                self.text = self._full + self._answer.rest() if self._include else before
            if self.stopped:
                break
        if final and not self.stopped:
            self.text = self._full + self._answer.rest()
        elif not self.stopped:  # without what may begin a stop string
            begun = (n for string in self._stop for n in range(1, len(string)) if self._full.endswith(string[:n]))
            self.text = self._full[: len(self._full) - max(begun, default=0)]
        return self.text[start:]


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the stop string that is complete first (the longest of several), None without one."""
    found = (string for string in stop if string in text)
    return min(found, key=lambda string: (text.find(string) + len(string), -len(string)), default=None)
