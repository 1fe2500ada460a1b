"""What fits into the memory for caches: who is let in, and how much is left for texts that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hydrajax.errors import HydrajaxError
from hydrajax.serve.pool import Pool
from hydrajax.serve.prefix_cache import CachedPrefix, PrefixCache
from hydrajax.serve.requests import Request


class Use(NamedTuple):
    """What a group of rows takes.

    ends: tokens that each row can come to have. nbytes: of its present shape, which may still be larger than it must
    be.
    """

    ends: tuple[int, ...]
    nbytes: int


class Memory:
    """So many bytes for the groups, for the prompt that is being read beside them, and for kept texts (``kept``).

    A request is let in where the shapes that it and all that run need at their ends fit. So nothing that has begun is
    ever put off, and as a request that would not fit alone is refused, somebody can always be let in or goes on: where
    nothing runs, nothing is taken and the next one fits.

    limit: by default enough for all rows to fill the context, and as much again for kept texts. keep: whether there
    are any. Raises `HydrajaxError` where it is not enough for a single row.
    """

    def __init__(self, pool: Pool, limit: int | None, *, keep: bool):
        self._pool, self._keeps = pool, keep
        self.limit = 2 * pool.nbytes(pool.sizes.rows, pool.context) if limit is None else limit
        self.kept = PrefixCache(self.limit if keep else 0)
        if (least := self._alone(1, 1)) > self.limit:
            raise HydrajaxError(f"cache_memory: must be at least {least} bytes, for one row, found {self.limit}")

    def end_of(self, request: Request) -> int:
        """As many tokens as its text can come to have."""
        return min(len(request.ids) + request.spec.max_new_tokens, self._pool.context)

    def check(self, request: Request) -> None:
        """Raises `HydrajaxError` for a request that can never be let in."""
        if (needed := self._alone(self.end_of(request), len(request.ids))) > self.limit:
            raise HydrajaxError(
                f"max_new_tokens: prompt and answer would need {needed} bytes of cache, there are {self.limit}"
            )

    def group_for(self, uses: Sequence[Use], request: Request) -> int | None:
        """The group that a request can join, such that all will have room to their ends; None where there is none.

        The number after the last means a group of its own, which costs a pass through the model in every step. So it
        is taken only where rows of its length in one of the others would not fit.
        """
        if sum(len(use.ends) for use in uses) == self._pool.sizes.rows:
            return None
        end, needed = self.end_of(request), []
        for number in range(len(uses) + 1):
            joined = [*uses, Use((), 0)]
            joined[number] = Use((*joined[number].ends, end), joined[number].nbytes)
            needed.append(self._most(joined, request))
        for number in (*sorted(range(len(uses)), key=needed.__getitem__), len(uses)):
            if needed[number] <= self.limit:
                return number
        return None

    def beginning_of(self, request: Request, held: int) -> tuple[CachedPrefix | None, int]:
        """A kept text to copy for a request that is let in, and how many tokens it has of it; (None, 0) for none.

        The copy and what it is made from exist side by side for a moment, which must fit, too. held: bytes of all
        groups in their present shapes.
        """
        kept, shared = self.kept.best(request.ids) or (None, 0)
        if kept is not None and held + self._pool.nbytes_to_read(len(request.ids)) + kept.nbytes > self.limit:
            return None, 0
        return kept, shared

    def leave_room(self, uses: Sequence[Use], reading: Request | None) -> None:
        """What is kept may take the memory that is not needed by those that run or are read, up to their ends."""
        self.kept.shrink(max(self.limit - self._most(uses, reading), 0) if self._keeps else 0)

    def _alone(self, end: int, prompt: int) -> int:
        """For a row with this end, and to read a prompt of so many tokens beside it."""
        return self._pool.nbytes(1, end) + self._pool.nbytes_to_read(prompt)

    def _most(self, uses: Sequence[Use], reading: Request | None) -> int:
        """That groups can come to take, and a prompt that is read beside them."""
        at_ends = [self._pool.nbytes(len(use.ends), max(use.ends)) if use.ends else 0 for use in uses]
        groups = sum(max(use.nbytes, needed) for use, needed in zip(uses, at_ends, strict=True))
        return groups + (0 if reading is None else self._pool.nbytes_to_read(len(reading.ids)))
