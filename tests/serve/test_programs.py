"""Programs of a server: compiled once, by the warm-up or when they are needed, while other requests go on."""

import asyncio
import ctypes
import json
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.compilations import compilations, no_compilation
from helpers.host_grammars import HostGrammar, Table
from helpers.lab import VOCAB
from helpers.letters import TREE, pool
from helpers.serving import SECONDS
from hydrajax.decoding.request import Request
from hydrajax.generation import generate
from hydrajax.ops import host_calls
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.serve.idle_times import idle_times
from hydrajax.serve.programs import Kind, Programs, ProgramShape
from hydrajax.serve.stats import Stats
from hydrajax.serve.warm_up import WarmUp

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@pytest.fixture
def batcher_with(served, start, monkeypatch):
    """``batcher_with(kinds, cache_lens)``: a batcher of which these programs are compiled, and an event.

    The compilation of any other program begins after the event.
    """
    go_on = threading.Event()

    def started(kinds, cache_lens):
        found = pool(served, PoolSizes(slots=2, chunk=16, cache_len=64))
        assert found.cache_lens == (64, 114)
        for program in found.all_programs():
            if program.kind in kinds and program.cache_len in cache_lens:
                found.programs.compile(program)
        compile_program = found.programs._compile
        monkeypatch.setattr(found.programs, "_compile", lambda each: go_on.wait(SECONDS) and compile_program(each))
        return start(found), go_on

    yield started
    go_on.set()


def answer(served, limit: int, grammar=None) -> tuple[int, ...]:
    request = Request(max_new_tokens=limit, grammar=grammar)
    executor = served.executor(served.program(request, tree=TREE), request)
    return next(generate(executor, [PROMPT])).output_ids


@pytest.mark.slow
def test_requests_overtake_one_that_waits_for_the_programs_of_its_grammar(served, batcher_with):
    grammar = Table(3, VOCAB)
    wanted, constrained = answer(served, 30), answer(served, 9, grammar)
    batcher, go_on = batcher_with([kind for kind in Kind if kind is not Kind.CONSTRAINED], [64])
    with compilations() as compiled:
        (waits,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=9, grammar=grammar)])
        for limit in (9, 30):
            (other,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=limit)])
            assert other.wait(SECONDS).output_ids == wanted[:limit]
        assert waits.result is None
        go_on.set()
        assert waits.wait(SECONDS).output_ids == constrained
    assert {thread.rstrip("01") for _, thread in compiled} == {"hydrajax compiler_"}


@pytest.mark.slow
def test_a_sequence_that_outgrows_its_cache_waits_aside_and_goes_on_with_the_same_tokens(served, batcher_with):
    wanted = answer(served, 70)
    batcher, go_on = batcher_with(Kind, [64])
    with compilations() as compiled:
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
    assert {thread.rstrip("01") for _, thread in compiled} == {"hydrajax compiler_"}


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


class Noted(ExecutorPool):
    """Programs that note when they are compiled."""

    def __init__(self, names: str, notes: list[str], compiles=lambda name: None):
        self._names, self.programs = names, Programs(lambda name: (compiles(name), notes.append(name)))

    def all_programs(self):
        return list(self._names)


def test_pools_take_turns_and_the_end_is_reported():
    notes, ended = [], threading.Event()
    warm_up = WarmUp([Noted("abc", notes), Noted("xy", notes)], lambda warm_up: ended.set())
    assert (warm_up.compiled, warm_up.total) == (0, 5)
    warm_up.start()
    assert ended.wait(SECONDS)
    assert notes == list("axbyc")
    assert (warm_up.compiled, warm_up.total) == (5, 5)
    assert warm_up.wait(0.0)
    warm_up.stop()
    assert not warm_up.wait(SECONDS)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library returns no freed memory")
def test_memory_that_a_compilation_frees_is_returned(monkeypatch):
    """A block that stays in use keeps glibc from returning those before it by itself."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from tools.faults.process import resident  # in megabytes

    libc, ended, sizes, last = ctypes.CDLL(None), threading.Event(), [], []
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def compiles(name):
        blocks = [libc.malloc(8192) for _ in range(20_000)]
        for block in blocks:
            ctypes.memset(block, 1, 8192)
        last.append(blocks.pop())
        for block in blocks:
            libc.free(block)
        sizes.append(resident())

    WarmUp([Noted("a", [], compiles)], lambda warm_up: ended.set()).start()
    assert ended.wait(SECONDS)
    assert resident() < sizes[0] - 103
    libc.free(last[0])


def test_it_stops_after_the_program_in_progress():
    notes, begun, go_on = [], threading.Event(), threading.Event()

    def compiles(name):
        begun.set()
        assert go_on.wait(SECONDS)

    warm_up = WarmUp([Noted("abc", notes, compiles)], lambda warm_up: notes.append("end"))
    warm_up.start()
    assert begun.wait(SECONDS)
    stopper = threading.Thread(target=warm_up.stop)
    stopper.start()
    assert not warm_up.wait(SECONDS)
    go_on.set()
    stopper.join(SECONDS)
    assert notes == ["a"]
    WarmUp([]).stop()  # one that was never started


def test_the_most_wanted_programs_come_first(served):
    """Short texts, small batches and one sequence under a grammar; then plain steps and prompts without the draft, in
    whose place others can be taken; other grammars last.
    """
    found = pool(served, PoolSizes(slots=2, chunk=16, cache_len=64), drops_draft=True)
    assert (found.batches, found.cache_lens, found.last_chunks) == ((1, 2), (64, 114), (8, 16))
    shapes, steps = [(64, 1), (114, 1), (64, 2), (114, 2)], Kind.SPECULATIVE
    assert [(program.kind, *program[1:]) for program in found.all_programs()] == [
        (steps, 64, 1), (Kind.PREFILL, 64, 16), (Kind.PREFILL, 64, 8), (Kind.FEED, 64, 16), (Kind.CONSTRAINED, 64, 1),
        (steps, 114, 1), (Kind.PREFILL, 114, 16), (Kind.PREFILL, 114, 8), (Kind.FEED, 114, 16),
        (steps, 64, 2), (steps, 114, 2), *[(Kind.PLAIN, *shape) for shape in shapes],
        (Kind.UNREAD_PREFILL, 64, 16), (Kind.UNREAD_PREFILL, 64, 8), (Kind.UNREAD_FEED, 64, 16),
        (Kind.UNREAD_PREFILL, 114, 16), (Kind.UNREAD_PREFILL, 114, 8), (Kind.UNREAD_FEED, 114, 16),
        *[(Kind.CONSTRAINED, *shape) for shape in shapes[1:]],
    ]  # fmt: skip
    assert not found.can_be_plain(1, 64)  # they have only been listed
    assert not found.can_be_unread(0, 9)


@dataclass(frozen=True)
class Mixed(HostGrammar):
    """Many forced tokens, none, and one."""

    def after(self, text):
        return frozenset({3}) if len(text) % 8 in (0, 1, 2, 3, 6) else frozenset({3, 4, 5})


@pytest.fixture(scope="module")
def found(served) -> ExecutorPool:
    """Executors that drop the draft, not compiled."""
    return pool(served, PoolSizes(slots=2, chunk=16, cache_len=128), drops_draft=True)


@pytest.mark.slow
def test_requests_during_the_warm_up_are_answered_and_compile_nothing_twice(served, found, start):
    """A request that comes first, while each program compiles, needs no program that is compiled again."""
    prompts = [np.array([at, 3], np.int32) for at in range(2)]
    wanted = served.generate([*prompts], tree=TREE, max_new_tokens=9, batch_size=2)
    ended, batcher = threading.Event(), start(found)
    with compilations() as compiled:
        warm_up = WarmUp([found], lambda warm_up: ended.set()).start()
        requests = [batcher.request(prompt, max_new_tokens=9) for prompt in prompts]
        answers = [handle.wait(SECONDS) for handle in batcher.submit(requests)]
        assert ended.wait(SECONDS)
        with no_compilation():
            answers += [handle.wait(SECONDS) for handle in batcher.submit(requests)]
            (constrained,) = batcher.submit([batcher.request(prompts[0], max_new_tokens=15, grammar=Mixed())])
            assert constrained.wait(SECONDS).new_tokens == 15
    warm_up.stop()
    assert [answer.output_ids for answer in answers] == 2 * [answer.output_ids for answer in wanted]
    assert warm_up.compiled == warm_up.total
    counts = Counter(function for function, _ in compiled)
    # Two batch sizes and two kinds of steps.
    assert counts["jit(burst)"] == 4
    assert counts["jit(extend)"] == 4  # two lengths with and without the draft
    # Steps in one program, or in three: without forced tokens, with one, and with as many as the tree is deep.
    constrained_steps = {"steps": 2} if host_calls() else {"verify": 6, "settle": 6}
    assert {name: counts[f"jit({name})"] for name in constrained_steps} == constrained_steps


def test_health_counts_the_programs(small):
    """While some are missing, the server is healthy: it answers requests."""
    from starlette.requests import Request

    from hydrajax.serve.app import Api
    from hydrajax.serve.options import ServerOptions
    from hydrajax.serve.request_encoder import RequestEncoder
    from hydrajax.serve.served_models import ServedModel

    encoder = RequestEncoder(small.executor.tokenizer, small.executor.model.config)
    warm_up = WarmUp([Noted("abc", [])])
    api = Api([ServedModel("letters", Batcher(small))], encoder, ServerOptions(), warm_up=warm_up)
    response = asyncio.run(api.health(Request({"type": "http"})))
    assert response.status_code == 200
    assert json.loads(response.body) == {"status": "ok", "compiled": 0, "programs": 3}


def test_times_are_measured_while_no_request_runs(small):
    from hydrajax.serve.served_models import while_idle

    class Busy(Batcher):
        def stats(self):
            return seen.pop(0)

    # Two with requests, one during which a request arrives, and one without.
    seen = [Stats(running=1), Stats(waiting=1), Stats(requests=1), *[Stats(requests=2)] * 3]
    times = [3.0, 2.0]
    assert while_idle(lambda: times.pop(0), [Busy(small)], lambda seconds: True) == 2.0
    assert (seen, times) == ([], [])
    assert while_idle(lambda: times.pop(0), [Busy(small)], lambda seconds: False) is None


@pytest.mark.slow
def test_steps_of_both_kinds_are_timed_for_every_batch_size(found):
    found.warm_up()  # nothing after the test above
    times = idle_times(found)
    assert set(times.steps) == {(batch, kind) for batch in (1, 2) for kind in (True, False)}
    assert all(1e-6 < seconds < 1 for seconds in times.steps.values())
    assert 0 <= times.reading < 1
