"""The process that serves: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette

from hydrajax.errors import HydrajaxError
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.served import close_all

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises `HydrajaxError` where that cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise HydrajaxError(f"port: cannot listen on {host} port {port}: {error}") from None


class _Server(uvicorn.Server):
    """Tells the batchers of a signal at once, so that they finish what runs while uvicorn waits for the connections.

    signal: the last one that came. Unlike uvicorn's own it is not raised again after an orderly end.
    """

    def __init__(self, config: uvicorn.Config, batchers: Sequence[Batcher], grace: float):
        super().__init__(config)
        self.signal = 0
        self._ending = threading.Thread(target=close_all, args=(batchers, grace), daemon=True)

    def handle_exit(self, sig: int, frame) -> None:
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit, self.signal = True, sig
        if self._ending.ident is None:
            self._ending.start()


def server(app: Starlette, batchers: Sequence[Batcher], *, grace: float, quiet: bool = False) -> _Server:
    """What answers when it is ``run(sockets=[listener])``, until SIGTERM or Ctrl-C.

    It then finishes what runs within ``grace`` seconds; a second Ctrl-C ends it at once.
    """
    config = uvicorn.Config(
        app,
        log_level="warning" if quiet else "info",
        timeout_graceful_shutdown=int(grace) + 5,  # what was broken off is still to be written
        timeout_keep_alive=30,
        http="h11",  # whichever others are installed: this one bounds the size of headers
        h11_max_incomplete_event_size=1 << 16,
        server_header=False,
    )
    return _Server(config, batchers, grace)


def serve(server: _Server, batchers: Sequence[Batcher], listener: socket.socket) -> int:
    """Answer until a signal comes.

    Returns the exit code: 0, or 128 and the signal's number where an answer was broken off.
    """
    server.run(sockets=[listener])
    return 0 if close_all(batchers) else 128 + server.signal
