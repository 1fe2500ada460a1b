"""All rows that run: in one group, or where that would not fit into the memory in several, by their texts' lengths.

All rows of a group have caches of the same length, that of its longest text. So a group is one pass through the model,
and several groups are several passes, but rows of short texts do not take the memory of long ones.
"""

from __future__ import annotations

import threading

from hydrajax.serve.admission import Use
from hydrajax.serve.group import Group, Running
from hydrajax.serve.pool import Pool


class Batch:
    """One thread changes it. Others may read it while they hold ``guard``."""

    def __init__(self, pool: Pool, guard: threading.Condition):
        self._pool, self._guard = pool, guard
        self.groups: list[Group] = []

    @property
    def live(self) -> list[tuple[Group, int, Running]]:
        """The rows that run, with their groups and places there."""
        return [(group, at, row) for group in self.groups for at, row in group.live]

    @property
    def uses(self) -> list[Use]:
        """Of each group."""
        return [group.use for group in self.groups]

    @property
    def nbytes(self) -> int:
        """In their present shapes."""
        return sum(group.nbytes for group in self.groups)

    def expect(self, number: int, end: int) -> Group:
        """The group with this number, or a new one for the next number, in which a row with such an end will run."""
        with self._guard:
            if number == len(self.groups):
                self.groups.append(Group(self._pool, self._guard))
            self.groups[number].coming = end
            return self.groups[number]

    def drop_empty(self) -> None:
        """Groups in which nothing runs or will run."""
        for group in self.groups:
            group.drop_if_empty()
        with self._guard:
            self.groups = [group for group in self.groups if group.rows or group.coming is not None]

    def clear(self) -> None:
        """Without a word to anybody: something has failed."""
        self.groups = []
