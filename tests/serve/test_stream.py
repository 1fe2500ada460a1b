"""Events for clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (hydrajax[serve])")

import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.routing import Route  # noqa: E402

from hydrajax.serve.connections import listen  # noqa: E402
from hydrajax.serve.stream import EventStream  # noqa: E402

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Source:
    """A generator of ``count`` events that records how many were requested and whether it was closed."""

    def __init__(self, count: int, size: int, write_timeout: float):
        self.count, self.size, self.write_timeout = count, size, write_timeout
        self.made, self.closed, self.ended = 0, threading.Event(), threading.Event()

    async def events(self):
        try:
            for _ in range(self.count):
                await asyncio.sleep(0)
                self.made += 1
                yield "@" * self.size
        finally:
            self.closed.set()

    def endpoint(self, request):
        return EventStream(self.events(), self.write_timeout, self.ended.set)


@pytest.fixture
def connect():
    """``connect(source)``: the socket of a client that has requested the events."""
    stops = []

    def connected(source: Source) -> socket.socket:
        listener = listen("127.0.0.1", 0)
        config = uvicorn.Config(Starlette(routes=[Route("/", source.endpoint)]), log_level="critical", http="h11")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        stops.append((server, thread))
        client = socket.create_connection(listener.getsockname()[:2], timeout=60)
        client.sendall(REQUEST)
        return client

    yield connected
    for server, thread in stops:
        server.should_exit = server.force_exit = True
        thread.join()


def test_a_client_that_does_not_read_is_disconnected(connect):
    """When the buffers are full no more events are made, and the connection is closed after the write timeout."""
    source = Source(10_000, 100_000, 0.3)
    with connect(source):
        assert source.ended.wait(60)
        assert source.closed.wait(60)
    assert source.made < source.count


def test_a_slow_client_gets_everything(connect):
    source, got = Source(100, 100_000, 30.0), 0
    with connect(source) as client:
        while piece := client.recv(200_000):
            got += piece.count(b"@")
            if source.ended.is_set() and got == source.count * source.size:
                break
    assert got == source.count * source.size
    assert source.closed.is_set()
