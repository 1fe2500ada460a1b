"""Connections of clients: how many may be open, and for how long without a request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from dataclasses import dataclass

from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # Windows
    resource = None

LOG = logging.getLogger("uvicorn.error")
ERROR = {"message": "too many connections are open", "type": "server_error", "param": None, "code": None}
BUSY_BODY = json.dumps({"error": ERROR}).encode()
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BUSY_BODY), BUSY_BODY)
)
SECONDS_BETWEEN_WARNINGS = 60


@dataclass
class ConnectionLimits:
    """Limits for all connections of a server.

    Attributes:
        most: open connections.
        idle: seconds from the start of a connection, or from its last response, to the end of the next request's
            headers; and seconds without progress while the client reads a response.
    """

    most: int
    idle: float = 60.0
    next_warning: float = 0.0

    def warn(self, now: float) -> None:
        """Log that the limit is reached, at most once a minute."""
        if now >= self.next_warning:
            self.next_warning = now + SECONDS_BETWEEN_WARNINGS
            LOG.warning("%d connections are open, which is the limit: closing the one that is idle longest", self.most)


def most_connections(listener: socket.socket, wanted: int) -> int:
    """Return ``wanted``, but at most half of the free file descriptors."""
    if resource is None:
        return wanted
    lowest_free = os.dup(listener.fileno())
    os.close(lowest_free)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if limit == resource.RLIM_INFINITY else max(1, min(wanted, (limit - lowest_free) // 2))


class Connection(H11Protocol):
    """uvicorn's HTTP connection within `ConnectionLimits`.

    uvicorn itself waits without end for a first request, for the second half of headers, and for clients that do not
    read. It accepts connections until no file descriptor is left, and then drops all new ones.
    """

    def __init__(self, *args, limits: ConnectionLimits, **settings):
        super().__init__(*args, **settings)
        self._limits, self._idle_since, self._unsent = limits, 0.0, 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._limits.most:
            self._limits.warn(self.loop.time())
            idle = [each for each in self.connections if isinstance(each, Connection) and not each.answering]
            # The new one only if all others are in use. The loop's clock counts milliseconds, so times can be equal.
            oldest = min(idle, key=lambda each: (each is self, each._idle_since))
            self.connections.discard(oldest)
            if oldest is self:
                transport.write(BUSY)
                transport.close()
            else:
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answering and not self.flow.write_paused:
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.answering:  # else the client has sent the next request already
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answering:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._idle_since = self.loop.time()
        self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self._limits.idle, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        """Close the connection, unless the client reads the last response, however slowly."""
        if 0 < self.transport.get_write_buffer_size() < self._unsent:
            self._start_timer()
        else:
            self.transport.abort()
