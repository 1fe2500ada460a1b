"""HTTP: the listening socket, uvicorn in a thread, and limits for connections that uvicorn does not have."""

import asyncio
import ipaddress
import json
import logging
import os
import socket
import threading
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from hydrajax.errors import HydrajaxError

try:
    import resource
except ImportError:  # Windows
    resource = None

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LOG = logging.getLogger("uvicorn.error")
ERROR = {"message": "too many connections are open", "type": "server_error", "param": None, "code": None}
BUSY_BODY = json.dumps({"error": ERROR}).encode()
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BUSY_BODY), BUSY_BODY)
)
SECONDS_BETWEEN_WARNINGS = 60


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free port. Raises `HydrajaxError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise HydrajaxError(f"port: cannot listen on {host} port {port}: {error}") from None


def address_of(listener: socket.socket) -> str:
    """Return host and port as URLs have them: an IPv6 address is in brackets."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_names(listener: socket.socket) -> tuple[str, ...] | None:
    """Return the host names of a server that only this machine can reach; None for any other server."""
    host = listener.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback:
        return None
    return (*LOOPBACK, f"[{host}]" if ":" in host else host)


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


class HttpServer(uvicorn.Server):
    """uvicorn in a thread, which takes no signals."""

    def __init__(self, app: Starlette, listener: socket.socket, *, grace: float, quiet: bool, limits: ConnectionLimits):
        """Build the server, which closes ``listener`` at its end.

        Args:
            app: the API.
            listener: a listening socket.
            grace: seconds in which requests are finished.
            quiet: log warnings only.
            limits: of connections.
        """
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # uvicorn's would close the handlers of the process, such as absl's and its stderr
                log_level="warning" if quiet else "info",
                timeout_graceful_shutdown=int(grace) + 5,  # to write the answers that were cut off
                timeout_keep_alive=int(limits.idle) + 1,
                # Unlike httptools, h11 bounds the size of headers.
                http=partial(Connection, limits=limits),  # type: ignore[arg-type]
                ws="none",  # it would leave the limits
                h11_max_incomplete_event_size=1 << 16,
                lifespan="off",
                server_header=False,
            )
        )
        run = partial(self.run, [listener])
        self._thread = threading.Thread(target=run, name="hydrajax server", daemon=True)

    def start(self) -> None:
        """Start the thread. The socket listens already, so clients need not wait."""
        self._thread.start()

    def end(self) -> None:
        """Accept no more connections, and end when those with requests are closed; a second call ends at once."""
        self.force_exit |= self.should_exit
        self.should_exit = True

    def wait(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()
