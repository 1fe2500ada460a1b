"""A tiny model and its executors for all tests of serving."""

import dataclasses
from importlib.util import find_spec

import pytest

from helpers import json_letters, letters
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.programs import Kind

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "openai", "httpx", "llguidance", "jsonschema")
collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]  # hydrajax[serve,grammar,test]


@pytest.fixture(scope="session")
def served():
    return letters.model()


@pytest.fixture(scope="session")
def small(served):
    """Two slots and a single cache length, so that few programs compile. Those of a grammar compile when it is used."""
    pool = letters.pool(served, PoolSizes(slots=2, chunk=16, cache_len=128, penalties=True))
    for program in pool.all_programs():
        if program.kind is not Kind.CONSTRAINED:
            pool.programs.compile(program)
    return pool


@pytest.fixture(scope="session")
def json_pool(served):
    """A slot for a tokenizer that can write JSON. Except for grammars, its programs are those of `small`."""
    own = dataclasses.replace(served, tokenizer=json_letters.tokenizer())
    return letters.pool(own, PoolSizes(slots=1, chunk=16, cache_len=128, penalties=True))


@pytest.fixture(scope="module")
def address(small):
    """The URL of a server with a key and small limits."""
    from helpers.serving import KEY, running  # needs hydrajax[serve]

    with running(small, model="letters", api_key=KEY, max_body=5000, body_timeout=0.5) as (at, _):
        yield at


@pytest.fixture
def start():
    """``start(pool, ...)``: a running batcher that is closed at the end."""
    made = []

    def started(executors, **settings) -> Batcher:
        made.append(Batcher(executors, **settings).start())
        return made[-1]

    yield started
    for batcher in made:
        batcher.close()
