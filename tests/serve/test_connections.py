"""Connections: without a request or with half of one, too many, and clients that read slowly or not at all."""

import asyncio
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hydrajax.serve import connections
from hydrajax.serve.connections import ConnectionLimits, HttpServer, listen, most_connections
from hydrajax.serve.stream import EventStream

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
IDLE = 0.2


class App:
    """Answers ``/`` with ``size`` bytes, and ``/wait`` when ``go`` is set."""

    def __init__(self, size: int = 2):
        self.size, self.waits, self.go = size, threading.Semaphore(0), threading.Event()

    def answer(self, request):
        return PlainTextResponse("a" * self.size)

    def wait(self, request):
        self.waits.release()
        assert self.go.wait(60)
        return PlainTextResponse("waited")

    def routes(self):
        return [Route("/", self.answer), Route("/wait", self.wait)]


@contextmanager
def connecting(routes: list[Route], limits: ConnectionLimits):
    """Yield a function that connects to a server."""
    listener = listen("127.0.0.1", 0)
    address, clients = listener.getsockname()[:2], []
    server = HttpServer(Starlette(routes=routes), listener, grace=0, quiet=True, limits=limits)
    server.start()

    def connect(sent: bytes = b"") -> socket.socket:
        clients.append(socket.create_connection(address, timeout=60))
        clients[-1].sendall(sent)
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.close()
        server.end()
        server.wait()


def received(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            found += piece
    return found


def test_connections_without_a_request_are_closed():
    app = App()
    with connecting(app.routes(), ConnectionLimits(100, IDLE)) as connect:
        waits = connect(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
        silent, half, second, unread = connect(), connect(REQUEST[:20]), connect(REQUEST), connect()
        unread.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")  # 405, without its body
        assert received(silent) == received(half) == b""
        assert received(second).count(b"HTTP/1.1 200") == 1
        assert received(unread).count(b"HTTP/1.1 405") == 1
        app.go.set()  # a request in progress takes longer
        assert received(waits).endswith(b"waited")


def test_bytes_of_half_a_request_do_not_extend_the_time():
    with connecting(App().routes(), ConnectionLimits(100, IDLE)) as connect:
        client, end = connect(), time.monotonic() + 30
        client.settimeout(IDLE / 10)
        with suppress(ConnectionError):
            while True:
                assert time.monotonic() < end
                client.sendall(b"G")
                with suppress(TimeoutError):
                    if not client.recv(1):
                        break


def test_a_client_that_does_not_read_is_disconnected():
    """Also in the middle of a response, and of a second one that waits for the first."""
    app = App(30_000_000)
    with connecting(app.routes(), ConnectionLimits(100, IDLE)) as connect:
        client = connect(REQUEST * 2)
        time.sleep(IDLE * 4)
        assert len(received(client)) < app.size
        assert len(received_slowly(connect(REQUEST), app.size)) > app.size  # one that reads gets everything


def received_slowly(client: socket.socket, size: int) -> bytes:
    found, end = b"", time.monotonic() + IDLE * 4
    while len(found) < size:
        found += client.recv(1 << 20)
        time.sleep(IDLE / 20 if time.monotonic() < end else 0)
    return found


def test_beyond_the_limit_the_oldest_idle_connection_makes_room(caplog):
    app = App()
    with connecting(app.routes(), ConnectionLimits(3)) as connect:
        idle = [connect() for _ in range(3)]
        for _ in range(20):  # they lock nobody out
            assert connect(REQUEST).recv(100).startswith(b"HTTP/1.1 200")
        assert [received(client) for client in idle] == [b""] * 3
        for _ in range(3):
            connect(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
            assert app.waits.acquire(timeout=60)
        refused = received(connect())
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"too many connections are open" in refused
        app.go.set()
    assert caplog.text.count("3 connections are open, which is the limit: closing the one that is idle longest\n") == 1


def test_half_of_the_file_descriptors_are_left_for_files(monkeypatch):
    with listen("127.0.0.1", 0) as listener:
        assert most_connections(listener, 5) == 5
        lowest_free = os.dup(listener.fileno())
        os.close(lowest_free)
        monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (lowest_free + 600, 1))
        # Other tests leave threads behind, which may open or close a file in between.
        assert 290 <= most_connections(listener, 1000) <= 310
        monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (0, 1))
        assert most_connections(listener, 1000) == 1
        monkeypatch.setattr(connections, "resource", None)
        assert most_connections(listener, 1000) == 1000


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

    def connected(self):
        def endpoint(request):
            return EventStream(self.events(), self.write_timeout, self.ended.set)

        return connecting([Route("/", endpoint)], ConnectionLimits(100))


def test_a_stream_whose_client_does_not_read_is_closed():
    """When the buffers are full no more events are made, and the connection is closed after the write timeout."""
    source = Source(10_000, 100_000, 0.3)
    with source.connected() as connect:
        connect(REQUEST)
        assert source.ended.wait(60)
        assert source.closed.wait(60)
    assert source.made < source.count


def test_a_slow_client_gets_everything():
    source, got = Source(100, 100_000, 30.0), 0
    with source.connected() as connect:
        client = connect(REQUEST)
        while piece := client.recv(200_000):
            got += piece.count(b"@")
            if source.ended.is_set() and got == source.count * source.size:
                break
    assert got == source.count * source.size
    assert source.closed.is_set()
