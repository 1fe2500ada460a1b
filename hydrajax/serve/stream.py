"""Server-sent events for clients of any speed."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """A response of server-sent events. At its end the generator of events is closed at once.

    Attributes:
        write_timeout: Seconds that a client may take to read one event before its connection is closed.
        on_end: Called at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], write_timeout: float, on_end: Callable[[], None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._write_timeout, self._on_end = events, write_timeout, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(content: str, more: bool) -> None:
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": content.encode(), "more_body": more})

        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    await write(event, True)
                await write("", False)
        except (OSError, TimeoutError):
            return  # the client does not read; uvicorn closes a connection whose response is incomplete
        finally:
            self._on_end()
