"""Servers in the process of a test or in a separate one. Needs hydrajax[serve]."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np

from helpers.letters import answers
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.serve.options import ServerOptions
from hydrajax.serve.server import Server

SECONDS = 300  # enough on a busy machine
KEY = "a secret"
AUTHORISED = {"authorization": f"Bearer {KEY}"}
GOOD = {"prompt": "abc", "max_tokens": 3}  # bodies of requests
HELLO = {"messages": [{"role": "user", "content": "a"}]}


class PoolServer(Server):
    """A server of executors, which the tests share: their programs are compiled once."""

    def __init__(self, pools, about, **options):
        self._set_up(ServerOptions.checked(options), pools, about, print)


@contextmanager
def running(pool, model: str = "hydrajax", about=(), others=(), **options):
    """Yield ``(address, batcher)`` of a server in this process. others: pools of further models by name."""
    pools = {model: pool, **dict(others)}
    abouts = {name: dict(about if name == model else ()) for name in pools}
    options = {"port": 0, "queue": 100, "grace": 1, "warm_up": False} | options
    with PoolServer(pools, abouts, **options) as server:
        yield server.url, server.batchers[model]


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


@contextmanager
def watched(look):
    """Yield a list of what ``look()`` returns, called all the time."""
    stop, seen = threading.Event(), []

    def watch():
        while not stop.wait(0.001):
            seen.append(look())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def expected(served, prompts, rule=Greedy(), *, limit: int, seeds: int = 0):  # noqa: B008 (it is frozen)
    n = len(prompts)
    return answers(served, prompts, [rule] * n, [limit] * n, seeds)


def request(batcher, prompt, limit=20, rule=None, seed=None):
    """Return a request of a batcher for these ids."""
    numbers = {"temperature": rule.temperature, "top_p": rule.top_p} if isinstance(rule, ExactSampling) else {}
    return batcher.request(np.asarray(prompt, np.int32), max_new_tokens=limit, seed=seed, **numbers)
