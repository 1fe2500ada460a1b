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

    Attributes:
        text: the text that no further id changes.
        stopped: whether a stop string was found.
        used: number of ids in the text, the one that completed the stop string included.
    """

    def __init__(self, answer: Continuation, stop: Sequence[str] = ()):
        if any(not string for string in stop):
            raise HydrajaxError("stop: got an empty string, expected at least one character")
        self._answer, self._stop, self._full = answer, tuple(stop), ""
        self.text, self.stopped, self.used = "", False, 0

    def grow(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Take all ids so far and return the new text that no further id changes; ``final`` marks the last call."""
        start, new = len(self.text), () if self.stopped else ids[self.used :]
        for token in new:
            self._full += self._answer.read(token)
            self.used += 1
            if (cut := first_stop(self._full, self._stop)) is not None:
                self.stopped, self.text = True, self._full[:cut]
                break
        if final and not self.stopped:
            self.text = self._full + self._answer.rest()
        elif not self.stopped:  # without what may begin a stop string
            begun = (n for string in self._stop for n in range(1, len(string)) if self._full.endswith(string[:n]))
            self.text = self._full[: len(self._full) - max(begun, default=0)]
        return self.text[start:]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the start of the stop string that is complete first (the longest of several), None without one."""
    ends = [(text.find(string) + len(string), -len(string)) for string in stop if string in text]
    if not ends:
        return None
    end, minus_length = min(ends)
    return end + minus_length
