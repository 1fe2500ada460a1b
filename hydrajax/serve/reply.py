"""A request's choices in progress, and its stream of events."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
from starlette.requests import Request

from hydrajax.serve.api_errors import FAILED
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.prompt_scores import PromptScorer, TextScores
from hydrajax.serve.replies import ReplyChoice, ReplyFormat
from hydrajax.serve.requests import Closed, RequestHandle
from hydrajax.serve.responses import ResponsesFormat

LOG = logging.getLogger("uvicorn.error")


class Reply:
    """The choices of one request in progress; cancelled if the client disconnects or after ``timeout`` seconds.

    The caller must `close` it, which calls ``on_end`` for each sequence.
    """

    def __init__(self, batcher: Batcher, on_end: Callable[[RequestHandle], None], request: Request, timeout: float):
        self._batcher, self._on_end, self._request = batcher, on_end, request
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self.choices: list[ReplyChoice] = []
        self._cancelled = False
        self._disconnect = asyncio.create_task(self._until_disconnect())
        self._deadline = self._loop.call_later(timeout, self._cancel)

    def changed(self) -> None:
        """Wake the event loop from the batcher's thread."""
        with suppress(RuntimeError):  # the loop is closed after the server's end
            self._loop.call_soon_threadsafe(self._news.set)

    async def _until_disconnect(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        for choice in self.choices:
            if not choice.handle.done:
                self._batcher.cancel(choice.handle)

    def close(self) -> None:
        self._disconnect.cancel()
        self._deadline.cancel()
        self._cancel()
        for choice in self.choices:
            self._on_end(choice.handle)

    async def _change(self) -> None:
        await self._news.wait()
        self._news.clear()

    async def wait(self) -> None:
        """Wait for all choices. Raises the error of a failed one."""
        while not all(choice.handle.done for choice in self.choices):
            await self._change()
        for choice in self.choices:
            if choice.handle.error is not None:
                raise choice.handle.error

    async def score(self, scorer: PromptScorer, k: int, answers: bool) -> None:
        """Score the prompts, or prompts with their answers; equal texts once."""
        scored: dict[bytes, TextScores] = {}
        for choice in self.choices:
            ids, result = choice.handle.request.ids, choice.handle.result
            if answers and result is not None:
                ids = np.array([*ids, *result.output_ids], np.int32)
            if self._cancelled:
                raise Closed("the prompt was not scored in time")
            if (key := ids.tobytes()) not in scored:
                scored[key] = await scorer.score(ids, k)
            choice.scores = scored[key]

    async def events(self, form: ReplyFormat | ResponsesFormat, usage_for: int | None) -> AsyncGenerator[str, None]:
        """Yield server-sent events, those of one moment together.

        usage_for: choices per prompt if the token counts are wanted.
        """
        choices, new = self.choices, form.opening(self.choices)
        while True:
            for choice in choices:
                if choice.handle.error is not None:
                    yield written([*new, *form.failed(str(choice.handle.error), 503)])
                    return
                new += form.events(choice)
            if all(choice.ended for choice in choices):
                break
            if new:
                yield written(new)
                new = []
            await self._change()
        yield written([*new, *form.closing(choices, usage_for)]) + form.END


def written(events: Sequence[dict[str, Any]]) -> str:
    """Return events as one piece of a stream: each write would wake the client, which may share our processor."""
    heads = (f"event: {event['type']}\n" if "type" in event else "" for event in events)
    return "".join(
        f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n" for head, event in zip(heads, events, strict=True)
    )


async def ending_in_errors(
    events: AsyncGenerator[str, None], form: ReplyFormat | ResponsesFormat
) -> AsyncGenerator[str, None]:
    """Pass events on. An exception, which no status can tell any more, becomes the last event."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception:
        LOG.exception("a stream failed")
        yield written(form.failed(FAILED, 500))
