"""The server process: socket, uvicorn and shutdown."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Sequence
from functools import partial

import uvicorn
from starlette.applications import Starlette

from hydrajax.errors import HydrajaxError
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.connections import Connection, ConnectionLimits
from hydrajax.serve.served_models import close_all

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_CONNECTIONS = 1000


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


class Server(uvicorn.Server):
    """Closes the batchers at SIGTERM or Ctrl-C, so that they finish while uvicorn waits for the connections.

    Attributes:
        signal: The last one received. Unlike uvicorn, this server does not raise it again after a clean shutdown.
    """

    def __init__(
        self,
        app: Starlette,
        batchers: Sequence[Batcher],
        *,
        grace: float,
        quiet: bool = False,
        limits: ConnectionLimits | None = None,
    ):
        """Build the server.

        Args:
            app: the API.
            batchers: closed at a signal.
            grace: seconds to finish requests after a signal; a second Ctrl-C ends the server at once.
            quiet: log warnings only.
            limits: of connections, by default `MOST_CONNECTIONS`.
        """
        limits = limits or ConnectionLimits(MOST_CONNECTIONS)
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning" if quiet else "info",
                timeout_graceful_shutdown=int(grace) + 5,  # to write the answers that were cut off
                timeout_keep_alive=int(limits.idle) + 1,
                # Unlike httptools, h11 bounds the size of headers.
                http=partial(Connection, limits=limits),  # type: ignore[arg-type]
                ws="none",  # it would leave the limits
                h11_max_incomplete_event_size=1 << 16,
                server_header=False,
            )
        )
        self.signal = 0
        self._closer = threading.Thread(target=close_all, args=(batchers, grace), daemon=True)

    def handle_exit(self, sig: int, frame) -> None:
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit, self.signal = True, sig
        if self._closer.ident is None:
            self._closer.start()


def serve(server: Server, batchers: Sequence[Batcher], listener: socket.socket) -> int:
    """Serve until a signal. Return the exit code: 0, or 128 plus the signal's number if answers were cut off."""
    server.run(sockets=[listener])
    return 0 if close_all(batchers) else 128 + server.signal
