"""Streamed text: decode a growing list of token ids and cut it at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydrajax.errors import HydrajaxError

INCOMPLETE = "\ufffd"  # decoders write it for a character with missing bytes


class GrowingText:
    """The text of one sequence while its ids grow.

    Args:
        decode: ids to text; more ids only append text, except that they complete characters.
        stop: stop strings, no part of which is ever emitted. The text is cut before the stop string that is complete
            first: ``["b", "abc"]`` cuts "abc" to "a". If several end at the same character, the longest is used. So the
            cut does not depend on the number of ids per call.

    Attributes:
        text: the text that no further id changes.
        stopped: whether a stop string was found.
        used: number of ids in the text, the one that completed the stop string included.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        if any(not string for string in stop):
            raise HydrajaxError("stop: got an empty string, expected at least one character")
        self._decode, self._stop = decode, tuple(stop)
        self.text, self.stopped, self.used = "", False, 0

    def grow(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Take all ids so far and return the new text that no further id changes; ``final`` marks the last call."""
        if self.stopped:
            return ""
        before, full = self.text, self._certain(ids, final)
        cut = first_stop(full, self._stop)
        if cut is not None:
            self.stopped, self.text = True, full[:cut]
            self.used = next(n for n in range(self.used, len(ids) + 1) if self._stops_within(ids, n, final))
            return self.text[len(before) :]
        self.used = len(ids)
        if not final:
            full = full[: len(full) - self._begun(full)]
        if full.startswith(before):
            self.text = full
        return self.text[len(before) :]

    def _certain(self, ids: Sequence[int], final: bool) -> str:
        """Return the text of these ids without incomplete characters at its end."""
        text = self._decode(ids)
        return text if final else text.rstrip(INCOMPLETE)

    def _stops_within(self, ids: Sequence[int], n: int, final: bool) -> bool:
        """Return whether a stop string is complete in the first ``n`` ids."""
        return first_stop(self._certain(ids[:n], final and n == len(ids)), self._stop) is not None

    def _begun(self, text: str) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        longest = max((len(string) - 1 for string in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop if len(string) > length):
                return length
        return 0


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the start of the stop string that is complete first (the longest of several), None without one."""
    ends = [(text.find(string) + len(string), -len(string)) for string in stop if string in text]
    if not ends:
        return None
    end, minus_length = min(ends)
    return end + minus_length
