"""Text from growing token ids: shown once it is certain, cut at stop strings. No arrays here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydrajax.errors import HydrajaxError

INCOMPLETE = "\ufffd"  # what decoders show for a character of which not all bytes are there yet


class GrowingText:
    """The text of one row while its ids grow.

    decode: ids to text, such that more ids only add text (but for characters that are not complete).
    stop:   strings at which the text ends; none of one is ever shown. It ends where a stop string is first complete,
            and is cut before it: with ``["b", "abc"]`` the text "abc" becomes "a". Of several that are complete at the
            same character the longest counts. So the cut does not depend on how many ids come at a time.

    Attributes: ``text`` is what is certain so far; ``stopped`` whether a stop string was met; ``used`` how many ids
    the text took, counting the one that completed the stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        if any(not string for string in stop):
            raise HydrajaxError("stop: found an empty string, it would stop before anything")
        self._decode, self._stop = decode, tuple(stop)
        self.text, self.stopped, self.used = "", False, 0

    def grow(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Take all ids so far, and return the text that became certain; with ``final`` no more will come."""
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
        """The text of these ids that more of them leave as it is."""
        text = self._decode(ids)
        return text if final else text.rstrip(INCOMPLETE)

    def _stops_within(self, ids: Sequence[int], n: int, final: bool) -> bool:
        """Whether a stop string is complete in the first ``n`` ids."""
        return first_stop(self._certain(ids[:n], final and n == len(ids)), self._stop) is not None

    def _begun(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max((len(string) - 1 for string in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop if len(string) > length):
                return length
        return 0


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where to cut: before the stop string that is complete first, of those the longest; None without one."""
    ends = [(text.find(string) + len(string), -len(string)) for string in stop if string in text]
    if not ends:
        return None
    end, minus_length = min(ends)
    return end + minus_length
