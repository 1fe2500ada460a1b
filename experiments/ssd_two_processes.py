"""Drafting ahead with a process and a core for each side, which one process on a CPU cannot have (docs/ssd.md).

    python experiments/ssd_two_processes.py --output experiments/results/ssd_two_processes.json
    python experiments/ssd_two_processes.py --quick
    python experiments/ssd_two_processes.py --base DIR --draft SMALLER_BASE --prompts FILE.jsonl

The base runs in this process, on the first core that it may use, the draft in another, on the second. What each has to
know of the other goes through a pipe. It is timed against the same pair in turn, and against the base alone and the
pair in one program, each on one core and on both. All parts of a round are timed in the same runs; the simulator is
told them and which outcomes came about, and foretells the rounds. Linux only, as it chooses cores.

By default the shipped base and its draft model, one prompt at a time, greedily.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from common import CONSOLE, draft_model_of, program, prompts_of, speed_rows, write
from hydrajax.bundle import Bundle
from hydrajax.measure.apart import joined, times_of
from hydrajax.measure.way import Way
from hydrajax.ssd.decode import MISS, ApartFn, Record, make_apart_fn

import hydrajax
from hydrajax import assets
from hydrajax.autotune.contest import contest
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import DecodeResult, result_of, settled_inputs
from hydrajax.decoding.prompts import batches
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.ssd.fan_out import FanOut, even, nothing
from hydrajax.ssd.simulator import Outcomes, predict
from hydrajax.trees.presets import chain

FULL = {"count": 8, "prompt_tokens": 128, "new_tokens": 128, "repeats": 5, "depth": 4, "ranks": 8}
FULL |= {"fan_outs": [1, 2, 4, 8, 12, 16]}
QUICK = {"count": 2, "prompt_tokens": 32, "new_tokens": 32, "repeats": 1, "depth": 2, "ranks": 4, "fan_outs": [4]}
PINGS = 500
PATIENCE = 0.02  # seconds; several rounds


def run(args: argparse.Namespace) -> None:
    draft, (mine, other) = str(draft_model_of(args)), two_cores()
    pair = Pair(args.base or str(assets.base()), draft, args.dtype, args.depth, args.new_tokens)
    os.sched_setaffinity(0, {mine})  # before JAX starts its threads, which are as many as there are cores
    loaded = pair.load()
    prompts = prompts_of(args, loaded)
    drafting = Worker(draft_side, {other}, pair, awake=True)
    whole = Worker(whole_machine, {mine, other}, pair, awake=False)  # it has work for both cores
    with drafting, whole:
        measure(args, pair, loaded, prompts, drafting, whole)


def measure(args, pair: Pair, loaded: Bundle, prompts, drafting: Worker, whole: Worker) -> None:
    one_core, together = (pair.ways(loaded)[name] for name in WAYS)
    ways = [
        one_core,
        together,
        Elsewhere("autoregressive, both cores", whole, one_core),
        Elsewhere("one program, both cores", whole, together),
    ]
    apart = functools.partial(TwoProcesses, pair, loaded, drafting)
    with CONSOLE.status("outcomes"):
        wide = apart("wide", even(args.depth, args.ranks))
        for prompt, lengths, _ in batches(prompts, 1):
            wide.decode(prompt, lengths)
    counted = wide.record().outcomes()
    outcomes = Outcomes.counted(counted)
    told = {fan_out.total: fan_out for fan_out in map(outcomes.best, args.fan_outs) if fan_out.total}
    ahead = {0: apart("in turn", nothing(args.depth))}
    ahead |= {total: apart(f"ahead, {total} outcomes", fan_out) for total, fan_out in told.items()}
    with CONSOLE.status("") as line:
        found = contest(
            [*ways, *ahead.values()],
            prompts,
            batch_size=1,
            repeats=args.repeats,
            on_status=lambda text: line.update(text),
        )
    rows = speed_rows(found, 1)
    transfer = ping_seconds(drafting, prompts[0][: args.depth + 1])
    parts = {total: way.parts() | {"hand over": transfer, "tell": transfer} for total, way in ahead.items()}
    columns = {"verify": 7, "prepare": 8, "hit": 6, "miss": 6}
    names = " ".join(name.rjust(width) for name, width in columns.items())
    print(f"\n{'outcomes':>8} {'hits':>6} {names}  round foretold")
    for (total, way), row in zip(ahead.items(), rows[len(ways) :], strict=True):
        own, record = parts[total], way.record()
        speed = predict(times_of(parts, total), outcomes, way.fan_out)
        row |= {"fan_out": list(way.fan_out.counts), "hit_rate": record.hit_rate if total else None}
        row |= {"parts_ms": {name: 1e3 * value for name, value in own.items() if value == value}}
        row |= {"round_ms": 1e3 * way.round_seconds(), "predicted_round_ms": 1e3 * speed.seconds}
        row |= {"predicted_hit_rate": speed.hit_rate, "predicted_hidden": speed.hidden}
        figures = " ".join(f"{1e3 * own[name]:{width}.2f}" for name, width in columns.items())
        rounds = f"{row['round_ms']:6.2f} {row['predicted_round_ms']:8.2f}"
        print(f"{total:8} {record.hit_rate if total else 0:6.0%} {figures} {rounds}", flush=True)
    args.settings["outcomes"] = counted.tolist()
    said = (
        f"The base on core {min(os.sched_getaffinity(0))} in one process, the draft on another in a second; a message "
        f"took {1e6 * transfer:.0f} microseconds. Milliseconds are medians over the rounds of all prompts and repeats, "
        f"the first round of each left out. Of {int(counted.sum())} rounds {outcomes.accept_lengths[-1]:.0%} accepted "
        f"the whole chain."
    )
    title = f"Drafting ahead with a process and a core for each side, chains of {args.depth}"
    write(args, "speed", "", title, rows, [said])


def two_cores() -> tuple[int, int]:
    """The first two that this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise HydrajaxError("two processes: this system does not let a program choose its cores; Linux does")
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise HydrajaxError(f"two processes: need a core each, found {len(found)}")
    return found[0], found[1]


# --- processes --------------------------------------------------------------------------------------------------------

WAYS = "autoregressive, one core", "one program, one core"


@dataclass(frozen=True)
class Pair:
    """What every process loads for itself."""

    base: str
    draft: str
    dtype: str
    depth: int
    new_tokens: int

    def load(self) -> Bundle:
        return hydrajax.load(self.base, self.draft, dtype=self.dtype)

    def ways(self, loaded: Bundle) -> dict[str, Way]:
        """The base alone, and the pair in one program."""
        together = Way.of(loaded, WAYS[1], chain(self.depth), max_new_tokens=self.new_tokens)
        return {WAYS[0]: together.autoregressive(WAYS[0]), WAYS[1]: together}

    def apart(self, loaded: Bundle, fan_out: FanOut) -> ApartFn:
        """The programs of both sides, of which each process compiles its own."""
        settings = {"max_new_tokens": self.new_tokens, "eos_ids": loaded.eos_ids}
        return make_apart_fn(loaded.model, loaded.drafter, chain(self.depth), Greedy(), fan_out=fan_out, **settings)


class Worker:
    """A process that runs ``target(pipe, pair)`` on these cores, and this end of the pipe.

    awake: whether this side's core stays awake while it waits, see `awaited`.
    """

    def __init__(self, target: Callable, cores: set[int], pair: Pair, awake: bool):
        self._awake = awake
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # a process begins on the cores of the thread that starts it
        self._process = context.Process(target=target, args=(theirs, pair), daemon=True)
        self._process.start()
        os.sched_setaffinity(0, mine)
        theirs.close()

    def send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        try:
            return awaited(self._pipe) if self._awake else self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> HydrajaxError:
        self._process.join()
        return HydrajaxError(f"two processes: one ended, with code {self._process.exitcode}; its own words are above")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._pipe.close()  # which is how it learns that nothing more is wanted
        self._process.join(10)
        self._process.terminate()


def awaited(pipe) -> Any:
    """The next message, asked for again and again for a while: a core that sleeps is slow when it wakes, and each side
    has its own."""
    until = time.perf_counter() + PATIENCE
    while not pipe.poll() and time.perf_counter() < until:
        pass
    return pipe.recv()


def messages(pipe):
    """Until the other end is closed."""
    try:
        while True:
            yield pipe.recv()
    except EOFError:
        return


def whole_machine(pipe, pair: Pair) -> None:
    """Decode in one of `Pair.ways`."""
    ways = pair.ways(pair.load())
    for name, prompt, lengths in messages(pipe):
        pipe.send(jax.device_get(ways[name].decode(prompt, lengths)))


def draft_side(pipe, pair: Pair) -> None:
    """Draft for a base in another process. Every message is the beginning of a call, but for a number of pings."""
    loaded = pair.load()
    apart = functools.cache(lambda counts: pair.apart(loaded, FanOut(counts)))
    params = loaded.params.draft
    for message in messages(pipe):
        if isinstance(message, int):
            for _ in range(message):
                pipe.send(awaited(pipe))
            continue
        counts, prompt, lengths, slots, (root, keys, rule, done) = message
        run = apart(counts).programs()
        carry = run.first(
            params, run.read(params, prompt, lengths, slots), root, jax.random.wrap_key_data(keys), rule, done
        )
        took: dict[str, list[float]] = {"prepare": [], "answer": []}
        while True:
            pipe.send(jax.device_get(carry.drafted.tokens))
            began = time.perf_counter()
            # There is one core, so nothing could run beside this, and waiting for it costs nothing.
            prepared = jax.block_until_ready(run.prepare(params, carry)) if sum(counts) else None
            took["prepare"].append(time.perf_counter() - began)
            verdict = awaited(pipe)
            began = time.perf_counter()
            carry = jax.block_until_ready(run.answer(params, carry, prepared, verdict))
            took["answer"].append(time.perf_counter() - began)
            if verdict.done.all():
                break
        pipe.send((np.asarray(carry.record), took))


# --- ways -------------------------------------------------------------------------------------------------------------


@dataclass
class Elsewhere:
    """A way that another process decodes in; see `hydrajax.autotune.contest.contest` for what is asked of one."""

    name: str
    worker: Worker
    way: Way

    @property
    def nodes(self) -> int:
        return self.way.nodes

    promises_same_output = True

    def decode(self, prompt, lengths=None, key=None) -> DecodeResult:
        self.worker.send((self.way.name, np.asarray(prompt), np.asarray(lengths)))
        return self.worker.receive()


@dataclass
class TwoProcesses:
    """The base's side here, the draft's in another process."""

    pair: Pair
    loaded: Bundle
    drafting: Worker
    name: str
    fan_out: FanOut
    _records: list[Record] = field(default_factory=list)
    _took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    promises_same_output = True

    def __post_init__(self):
        self._fn = self.pair.apart(self.loaded, self.fan_out)
        self._result = jax.jit(result_of)

    @property
    def nodes(self) -> int:
        return self.pair.depth + 1

    def decode(self, prompt, lengths=None, key=None) -> DecodeResult:
        engine, run, base = self._fn.engine, self._fn.programs(), Params(self.loaded.params.base, {})
        given = settled_inputs(engine.model.config, Greedy(), engine.max_new_tokens, prompt, lengths, key, None, None)
        state = run.start(base, *given)
        root, keys, rule, done = jax.device_get(
            (state.target.root, jax.random.key_data(state.output.keys), state.output.rule, state.output.done)
        )
        slots = engine.cache_slots(given.prompt.shape[1])
        prompt, lengths = jax.device_get((given.prompt, given.lengths))
        self.drafting.send((self.fan_out.counts, prompt, lengths, slots, (root, keys, rule, done)))
        stopped, rounds, took = np.zeros(len(prompt), bool), [], []
        tokens = self.drafting.receive()
        while not done.all():
            began = time.perf_counter()
            state, verdict = run.verify(base, state, tokens, None, stopped)
            verdict = jax.device_get(verdict)
            took.append(time.perf_counter() - began)
            self.drafting.send(verdict)
            done = verdict.done
            if not done.all():
                tokens = self.drafting.receive()
                rounds.append(time.perf_counter() - began)
        record, theirs = self.drafting.receive()
        result = jax.block_until_ready(self._result(state.output))
        record = Record(record[:, : engine.max_new_tokens], np.asarray(result.accept_lengths), self.fan_out)
        self._remember(record, {"verify": took, "round": rounds, **theirs})
        return result

    def _remember(self, record: Record, took: dict[str, list[float]]) -> None:
        """Of one prompt; its first round is not timed, as it may compile and finds nothing prepared."""
        self._records.append(record)
        missed = record.numbers[0, : len(took["round"])] == MISS
        for name in ("verify", "prepare", "round"):
            self._took[name] += took[name][1 : len(missed)]
        for answer, miss in list(zip(took["answer"], missed, strict=False))[1:]:
            self._took["miss" if miss else "hit"].append(answer)

    def record(self) -> Record:
        """Of every prompt that was ever decoded."""
        return joined(self._records)

    def parts(self) -> dict[str, float]:
        """Median seconds of a round's parts, as `hydrajax.measure.apart.part_seconds`; NaN of nothing."""
        return {name: median(self._took[name]) for name in ("verify", "prepare", "hit", "miss")}

    def round_seconds(self) -> float:
        """The mean, as the foretold one is a mean over hits and misses, without what a busy machine makes of the
        slowest hundredth."""
        times = np.sort(self._took["round"])
        return float(times[: -max(len(times) // 100, 1)].mean()) if len(times) > 1 else float("nan")


def ping_seconds(worker: Worker, message: np.ndarray) -> float:
    """The median way of a small message to the other process, half of there and back."""
    times = []
    worker.send(PINGS)
    for _ in range(PINGS):
        began = time.perf_counter()
        worker.send(message)
        worker.receive()
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


if __name__ == "__main__":
    sys.exit(program(__doc__, run, FULL, QUICK))
