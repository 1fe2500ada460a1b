"""A conversation with given user messages and generated answers."""

import zlib
from collections.abc import Sequence


class Dialogue:
    """Step through a conversation: `ask`, generate from ``ids``, `answer`, and again. Subclasses define `encode`.

    Attributes:
        turn: index of the current turn, -1 before the first.
    """

    def __init__(self, seed: int, key: int | str, turns: Sequence[str], system: str | None = None):
        self._seed, self._key, self._turns = seed, key, turns
        self.turn, self.ids = -1, []
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def encode(self) -> list[int]:
        """Return ``messages`` as token ids, up to the start of the answer."""
        raise NotImplementedError

    def ask(self) -> bool:
        """Add the next user message and encode the prompt. Return False after the last turn."""
        self.turn += 1
        if self.turn >= len(self._turns):
            return False
        self.messages.append({"role": "user", "content": self._turns[self.turn]})
        self.ids = self.encode()
        return True

    def answer(self, text: str | None) -> None:
        """Add the assistant's message."""
        self.messages.append({"role": "assistant", "content": (text or "").strip()})

    @property
    def turn_seed(self) -> int:
        """Seed of the current turn's draws. It depends on the run's seed, the conversation's key and the turn only."""
        return zlib.crc32(repr((self._seed, self._key, self.turn)).encode())
