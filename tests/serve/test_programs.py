"""The batcher's thread compiles nothing: a request waits for its programs while the others go on."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from helpers.host_grammars import Table
from helpers.lab import VOCAB
from helpers.letters import TREE, pool
from hydrajax.decoding.request import Request
from hydrajax.generation import generate
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.programs import Kind, Programs, ProgramShape

SECONDS = 300
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@contextmanager
def compiling_threads():
    """The names of the threads that compile something inside the context."""
    found = set()

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            found.add(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def batcher_with(served, monkeypatch):
    """``batcher_with(kinds, cache_lens)``: a batcher of which these programs are compiled, and an event.

    The compilation of any other program begins after the event.
    """
    made = []

    def started(kinds, cache_lens):
        found, go_on = pool(served, PoolSizes(slots=2, chunk=16, cache_len=64)), threading.Event()
        assert found.cache_lens == (64, 114)
        for program in found.all_programs():
            if program.kind in kinds and program.cache_len in cache_lens:
                found.programs.compile(program)
        compile_program = found.programs._compile
        monkeypatch.setattr(found.programs, "_compile", lambda each: go_on.wait(SECONDS) and compile_program(each))
        made.append((Batcher(found).start(), go_on))
        return made[-1]

    yield started
    for batcher, go_on in made:
        go_on.set()
        batcher.close()


def answer(served, limit: int, grammar=None) -> tuple[int, ...]:
    request = Request(max_new_tokens=limit, grammar=grammar)
    executor = served.executor(served.program(request, tree=TREE), request)
    return next(generate(executor, [PROMPT])).output_ids


def test_requests_overtake_one_that_waits_for_the_programs_of_its_grammar(served, batcher_with):
    grammar = Table(3, VOCAB)
    wanted, constrained = answer(served, 30), answer(served, 9, grammar)
    batcher, go_on = batcher_with([kind for kind in Kind if kind is not Kind.CONSTRAINED], [64])
    with compiling_threads() as threads:
        (waits,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=9, grammar=grammar)])
        for limit in (9, 30):
            (other,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=limit)])
            assert other.wait(SECONDS).output_ids == wanted[:limit]
        assert waits.result is None
        go_on.set()
        assert waits.wait(SECONDS).output_ids == constrained
    assert threads == {"hydrajax compiler_0"}


def test_a_sequence_that_outgrows_its_cache_waits_aside_and_goes_on_with_the_same_tokens(served, batcher_with):
    wanted = answer(served, 70)
    batcher, go_on = batcher_with(Kind, [64])
    with compiling_threads() as threads:
        long, short = batcher.submit([batcher.request(PROMPT, max_new_tokens=limit) for limit in (70, 30)])
        assert short.wait(SECONDS).output_ids == wanted[:30]
        while not (groups := batcher._batch.groups) or groups[0].stepping:  # until the long one is parked
            pass
        for _ in range(2):  # while the long one is parked
            (short,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=30)])
            assert short.wait(SECONDS).output_ids == wanted[:30]
        assert 30 < long.result.new_tokens < 70
        assert long.result.finish_reason is None
        go_on.set()
        assert long.wait(SECONDS).output_ids == wanted
    assert threads == {"hydrajax compiler_0"}


def test_a_program_is_compiled_once_by_threads_that_want_it_at_the_same_time():
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    def compiles(program):
        begun.set()
        assert go_on.wait(SECONDS)
        compiled.append(program)

    programs, program = Programs(compiles), ProgramShape(Kind.PLAIN, 64, 1)
    assert not programs.ready([program])
    assert begun.wait(SECONDS)
    other = threading.Thread(target=programs.compile, args=[program])
    other.start()
    go_on.set()
    other.join(SECONDS)
    programs.close()
    assert programs.ready([program])
    assert compiled == [program]


def test_a_failed_compilation_is_raised_where_the_program_is_needed():
    def fails(program):
        raise MemoryError("too large")

    programs, wanted = Programs(fails), [ProgramShape(Kind.PLAIN, 64, 1)]
    programs.ready(wanted)
    programs.wait_for_wanted()
    with pytest.raises(MemoryError, match="too large"):
        programs.ready(wanted)
