"""What fits into the memory for caches: who is let in, and how much is left for texts that are kept."""

from __future__ import annotations

from collections.abc import Sequence

from hydrajax.errors import HydrajaxError
from hydrajax.serve.kept import Kept, KeptTexts
from hydrajax.serve.programs import Programs
from hydrajax.serve.requests import Request


class Memory:
    """So many bytes for the batch, for the prompt that is being read beside it, and for kept texts (``kept``).

    A request is let in where the shape that it and all that run need at their ends fits. So nothing that has begun is
    ever put off, and as a request that would not fit alone is refused, somebody can always be let in or goes on: where
    nothing runs, the batch takes no memory and the next one fits.

    limit: by default enough for all rows to fill the context, and as much again for kept texts. keep: whether there
    are any. Raises `HydrajaxError` where it is not enough for a single row.
    """

    def __init__(self, programs: Programs, limit: int | None, *, keep: bool):
        self._programs, self._keeps = programs, keep
        self.limit = 2 * programs.nbytes(programs.sizes.rows, programs.context) if limit is None else limit
        self.kept = KeptTexts(self.limit if keep else 0)
        if (least := self._needed([1], 1)) > self.limit:
            raise HydrajaxError(f"cache_memory: must be at least {least} bytes, for one row, found {self.limit}")

    def end_of(self, request: Request) -> int:
        """As many tokens as its text can come to have."""
        return min(len(request.ids) + request.max_new_tokens, self._programs.context)

    def check(self, request: Request) -> None:
        """Raises `HydrajaxError` for a request that can never be let in."""
        if (needed := self._needed([self.end_of(request)], len(request.ids))) > self.limit:
            raise HydrajaxError(
                f"max_new_tokens: prompt and answer would need {needed} bytes of cache, there are {self.limit}"
            )

    def _needed(self, ends: Sequence[int], prompt: int) -> int:
        """For a batch of rows that end with so many tokens, and to read a prompt of so many beside it."""
        return self._programs.nbytes(len(ends), max(ends)) + self._programs.nbytes_to_read(prompt)

    def fits(self, ends: Sequence[int], held: int, request: Request) -> bool:
        """Whether a request can join rows with such ends, and will have room to its own.

        held: bytes of the batch in its present shape, which may still be larger than it must be.
        """
        if len(ends) == self._programs.sizes.rows:
            return False
        prompt = len(request.ids)
        beside = held + self._programs.nbytes_to_read(prompt)
        return max(self._needed([*ends, self.end_of(request)], prompt), beside) <= self.limit

    def beginning_of(self, request: Request, held: int) -> tuple[Kept | None, int]:
        """A kept text to copy for a request that is let in, and how many tokens it has of it; (None, 0) for none.

        The copy and what it is made from exist side by side for a moment, which must fit, too.
        """
        kept, shared = self.kept.best(request.ids) or (None, 0)
        if kept is not None and held + self._programs.nbytes_to_read(len(request.ids)) + kept.nbytes > self.limit:
            return None, 0
        return kept, shared

    def leave_room(self, ends: Sequence[int], held: int, reading: Request | None) -> None:
        """What is kept may take the memory that is not needed by those that run, up to their ends."""
        prompt, needed = 1, held
        if reading is not None:
            ends, prompt = [*ends, self.end_of(reading)], len(reading.ids)
        if ends:
            needed = max(self._needed(ends, prompt), held + self._programs.nbytes_to_read(prompt))
        self.kept.shrink(max(self.limit - needed, 0) if self._keeps else 0)
