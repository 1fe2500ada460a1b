"""A server in the process of a test. Needs the packages of hydrajax[serve]."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from letters import answers

from hydrajax.decoding.acceptance import Greedy
from hydrajax.serve.app import Interface, Settings
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.prompts import Encoder
from hydrajax.serve.served import Served, close_all
from hydrajax.serve.server import listening, server

SECONDS = 300


@contextmanager
def running(programs, queue: int = 100, model: str = "hydrajax", about=(), others=(), **settings):
    """``(address, batcher)`` of a server in this process. others: programs by the names of further models."""
    batchers = {model: Batcher(programs, queue=queue)}
    batchers |= {name: Batcher(more, queue=queue) for name, more in dict(others).items()}
    served = [Served(name, batcher.start(), dict(about)) for name, batcher in batchers.items()]
    interface = Interface(served, Encoder(programs.loaded), Settings(**settings))
    listener = listening("127.0.0.1", 0)
    uvicorn = server(interface.app(), list(batchers.values()), grace=1, quiet=True)
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", batchers[model]
    finally:
        close_all(list(batchers.values()))
        uvicorn.should_exit = True
        thread.join()


def expected(served, prompts, rule=Greedy(), *, limit: int, seeds: int = 0):  # noqa: B008 (it is frozen)
    n = len(prompts)
    return answers(served, prompts, [rule] * n, [limit] * n, seeds)
