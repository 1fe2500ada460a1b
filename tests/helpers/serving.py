"""Servers in the process of a test or in a separate one. Needs hydrajax[serve]."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

from helpers.letters import answers
from hydrajax.decoding.acceptance import Greedy
from hydrajax.serve.app import Api, ServerSettings
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.request_encoder import RequestEncoder
from hydrajax.serve.served_models import ServedModel, close_all
from hydrajax.serve.server import Server, address_of, listen

SECONDS = 300


@contextmanager
def running(
    pool, queue: int = 100, model: str = "hydrajax", about=(), others=(), listener=None, limits=None, **settings
):
    """Yield ``(address, batcher)`` of a server in this process. others: pools of further models by name."""
    batchers = {model: Batcher(pool, queue=queue)}
    batchers |= {name: Batcher(more, queue=queue) for name, more in dict(others).items()}
    served = [ServedModel(name, batcher.start(), dict(about)) for name, batcher in batchers.items()]
    encoder = RequestEncoder(pool.executor.tokenizer, pool.executor.model.config)
    api = Api(served, encoder, ServerSettings(**settings))
    listener = listener or listen("127.0.0.1", 0)
    uvicorn = Server(api.app(), list(batchers.values()), grace=1, quiet=True, limits=limits)
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://{address_of(listener)}", batchers[model]
    finally:
        close_all(list(batchers.values()))
        uvicorn.should_exit = True
        thread.join()


@contextmanager
def serving(*options: object, api_key: str | None = None):
    """Yield ``(process, address, log)`` of ``hydrajax serve`` with these options on a free port.

    log: the lines on stderr before the one with the address.
    """
    command = [sys.executable, "-m", "hydrajax", "serve", "--port", "0", *map(str, options)]
    given = {} if api_key is None else {"HYDRAJAX_API_KEY": api_key}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | given)
    log = []
    try:
        for line in process.stderr:
            if found := re.match(r"serving on (http://127\.0\.0\.1:\d+)/v1, \d+ MB for KV caches", line):
                break
            log.append(line.rstrip("\n"))
        else:
            raise AssertionError("\n".join(log))
        # Drain the log, so that the server never blocks on a full pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, found[1], log
    finally:
        process.kill()
        process.wait()


def expected(served, prompts, rule=Greedy(), *, limit: int, seeds: int = 0):  # noqa: B008 (it is frozen)
    n = len(prompts)
    return answers(served, prompts, [rule] * n, [limit] * n, seeds)
