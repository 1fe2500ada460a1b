"""Questions to an OpenAI-compatible server, and their request bodies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Content = str | tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """One request, apart from the model's name.

    Attributes:
        content: the prompt as text or token ids; in a chat the user's message.
        chat: ask ``/chat/completions``, not ``/completions``.
        temperature: 0 is greedy.
        seed: of sampling, None for the server's choice.
        stream: ask for server-sent events.
        logprobs: ask for the log-probabilities of the tokens and of this many most likely ones; None for none.
        more: further fields of the body, such as ``response_format``.
    """

    content: Content
    chat: bool
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def but(self, **changes: Any) -> Question:
        """Return the question with other fields."""
        return dataclasses.replace(self, **changes)

    @property
    def path(self) -> str:
        """The path below ``/v1``."""
        return "/chat/completions" if self.chat else "/completions"

    def body(self) -> dict[str, Any]:
        """Return the request body without the model. Fields at their defaults are left out."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.content}]
        else:
            body["prompt"] = self.content if isinstance(self.content, str) else list(self.content)
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if self.chat else {"logprobs": self.logprobs}
            if self.chat and not self.logprobs:
                del body["top_logprobs"]
        optional = {"seed": self.seed, "stop": list(self.stop) or None, "stream": self.stream or None}
        optional["n"] = self.n if self.n > 1 else None
        return body | {name: value for name, value in optional.items() if value is not None} | dict(self.more)
