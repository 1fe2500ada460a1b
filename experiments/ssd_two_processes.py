"""Drafting ahead with one process and one core for each side, as one process cannot split a CPU (docs/ssd.md).

    python experiments/ssd_two_processes.py --output experiments/results/ssd_two_processes.json
    python experiments/ssd_two_processes.py --quick
    python experiments/ssd_two_processes.py --base DIR --draft SMALLER_BASE --prompts FILE.jsonl

The base (default: the shipped one) runs in this process on its first core, the draft model in another process on the
second core, and they exchange messages through a pipe. The baselines are the same pair in turn, and the base alone and
the pair in one program, each on one core and on both. All parts of a round are timed in the same runs. The simulator
predicts the rounds from them and the counted outcomes. Greedy, one prompt at a time; Linux only, as it selects cores.
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
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from common import CONSOLE, draft_model_of, program, prompts_of, speed_rows, write
from ssd_parts import times_of
from ssd_simulator import Outcomes, predict

import hydrajax
from hydrajax import assets
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, contest
from hydrajax.bench.split_contest import ONE_PROGRAM, joined
from hydrajax.decoding.decode import DecodeResult, result_of
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.record import SpeculationRecord
from hydrajax.ssd.speculator import MISS, Speculator
from hydrajax.ssd.split_executor import verify_round
from hydrajax.trees.presets import chain

FULL = {"count": 8, "prompt_tokens": 128, "new_tokens": 128, "repeats": 5, "depth": 4, "ranks": 8}
FULL |= {"fan_outs": [1, 2, 4, 8, 12, 16]}
QUICK = {"count": 2, "prompt_tokens": 32, "new_tokens": 32, "repeats": 1, "depth": 2, "ranks": 4, "fan_outs": [4]}
PINGS = 500
POLL_SECONDS = 0.02  # several rounds


def run(args: argparse.Namespace) -> None:
    draft, (mine, other) = str(draft_model_of(args)), two_cores()
    pair = Pair(args.base or str(assets.base()), draft, args.dtype, args.depth, args.new_tokens)
    os.sched_setaffinity(0, {mine})  # before JAX starts one thread per core
    m = pair.load()
    prompts = prompts_of(args, m)
    drafting = Worker(draft_side, {other}, pair, poll=True)
    whole = Worker(whole_machine, {mine, other}, pair, poll=False)  # its decoding uses both cores
    with drafting, whole:
        measure(args, pair, m, prompts, drafting, whole)


def measure(args, pair: Pair, m: LanguageModel, prompts, drafting: Worker, whole: Worker) -> None:
    executors = pair.executors(m)
    others = {f"{name}, one core": executor for name, executor in executors.items()}
    others |= {
        f"{name}, both cores": RemoteExecutor(name, executor.program, whole) for name, executor in executors.items()
    }
    program = pair.program(m)
    two_processes = functools.partial(TwoProcesses, program, BaseSide(m, program), drafting)
    with CONSOLE.status("outcomes"):
        wide = two_processes(FanOut((args.ranks,) * (args.depth + 1)))
        for prompt, lengths, _ in batches(prompts, 1):
            wide.decode(prompt, lengths)
    counted = wide.record().outcomes()
    outcomes = Outcomes.counted(counted)
    fan_outs = {fan_out.total: fan_out for fan_out in map(outcomes.best, args.fan_outs) if fan_out.total}
    ahead = {0: two_processes(FanOut((0,) * (args.depth + 1)))}
    ahead |= {total: two_processes(fan_out) for total, fan_out in fan_outs.items()}
    named = {f"ahead, {total} outcomes" if total else "in turn": each for total, each in ahead.items()}
    with CONSOLE.status("") as line:
        found = contest(
            others | named,
            prompts,
            batch_size=1,
            repeats=args.repeats,
            on_status=lambda text: line.update(text),
        )
    rows = speed_rows(found, 1)
    transfer = ping_seconds(drafting, prompts[0][: args.depth + 1])
    parts = {total: each.parts() | {"hand over": transfer, "tell": transfer} for total, each in ahead.items()}
    columns = {"verify": 7, "prepare": 8, "hit": 6, "miss": 6}
    names = " ".join(name.rjust(width) for name, width in columns.items())
    print(f"\n{'outcomes':>8} {'hits':>6} {names}  round predicted")
    for (total, each), row in zip(ahead.items(), rows[len(others) :], strict=True):
        own, record = parts[total], each.record()
        speed = predict(times_of(parts, total), outcomes, each.fan_out)
        row |= {"fan_out": list(each.fan_out.counts), "hit_rate": record.hit_rate if total else None}
        row |= {"parts_ms": {name: 1e3 * value for name, value in own.items() if value == value}}
        row |= {"round_ms": 1e3 * each.round_seconds(), "predicted_round_ms": 1e3 * speed.seconds}
        row |= {"predicted_hit_rate": speed.hit_rate, "predicted_hidden": speed.hidden}
        figures = " ".join(f"{1e3 * own[name]:{width}.2f}" for name, width in columns.items())
        rounds = f"{row['round_ms']:6.2f} {row['predicted_round_ms']:9.2f}"
        print(f"{total:8} {record.hit_rate if total else 0:6.0%} {figures} {rounds}", flush=True)
    args.settings["outcomes"] = counted.tolist()
    remark = (
        f"The base runs on core {min(os.sched_getaffinity(0))}, the draft in a second process on another; a message "
        f"took {1e6 * transfer:.0f} microseconds. Milliseconds are medians over the rounds of all prompts and repeats "
        f"except each first round. Of {int(counted.sum())} rounds {outcomes.accept_lengths[-1]:.0%} accepted "
        f"the whole chain."
    )
    title = f"Drafting ahead with a process and a core for each side, chains of {args.depth}"
    write(args, "speed", "", title, rows, [remark])


def two_cores() -> tuple[int, int]:
    """Return the first two cores that this process may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise HydrajaxError("two processes: this system cannot pin processes to cores, use Linux")
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise HydrajaxError(f"two processes: got {len(found)} core, expected two")
    return found[0], found[1]


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Settings from which every process loads base and draft."""

    base: str
    draft: str
    dtype: str
    depth: int
    new_tokens: int

    def load(self) -> LanguageModel:
        return hydrajax.load(self.base, self.draft, dtype=self.dtype)

    def program(self, m: LanguageModel) -> Program:
        return m.program(tree=chain(self.depth), max_new_tokens=self.new_tokens)

    def executors(self, m: LanguageModel) -> dict[str, Executor]:
        """Return executors of the base alone and of the pair in one program."""
        together = hydrajax.make_executor(m, self.program(m))
        return {AUTOREGRESSIVE: together.autoregressive(), ONE_PROGRAM: together}


class Worker:
    """A process that runs ``target(pipe, pair)`` on these cores, and this end of its pipe.

    Args:
        poll: Poll the pipe instead of sleeping (`poll_message`).
    """

    def __init__(self, target: Callable, cores: set[int], pair: Pair, poll: bool):
        self._poll = poll
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # a process inherits the cores of the thread that starts it
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
            return poll_message(self._pipe) if self._poll else self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> HydrajaxError:
        self._process.join()
        return HydrajaxError(f"two processes: one ended with code {self._process.exitcode}, see its message above")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._pipe.close()  # ends its loop over `messages`
        self._process.join(10)
        self._process.terminate()


def poll_message(pipe) -> Any:
    """Receive a message, polling for a while: each side has its own core, and a sleeping core wakes slowly."""
    until = time.perf_counter() + POLL_SECONDS
    while not pipe.poll() and time.perf_counter() < until:
        pass
    return pipe.recv()


def messages(pipe):
    """Yield messages until the other end is closed."""
    try:
        while True:
            yield pipe.recv()
    except EOFError:
        return


def whole_machine(pipe, pair: Pair) -> None:
    """Decode with one of `Pair.executors`."""
    executors = pair.executors(pair.load())
    for name, prompt, lengths in messages(pipe):
        pipe.send(jax.device_get(executors[name].decode(prompt, lengths)))


def draft_side(pipe, pair: Pair) -> None:
    """Draft for a base in another process. A message starts a call, or is a number of pings."""
    m = pair.load()
    programs = functools.cache(lambda counts: DraftPrograms(m, FanOut(counts), pair.new_tokens))
    params = m.params.draft
    for message in messages(pipe):
        if isinstance(message, int):
            for _ in range(message):
                pipe.send(poll_message(pipe))
            continue
        counts, prompt, lengths, slots, (root, keys, rule, done) = message
        run = programs(counts)
        draft = run.feed(params, run.init_state(len(prompt), slots), prompt, lengths)
        state = run.begin(params, draft, root, jax.random.wrap_key_data(keys), rule, done)
        took: dict[str, list[float]] = {"prepare": [], "answer": []}
        while True:
            pipe.send(jax.device_get(state.speculation.tokens))
            began = time.perf_counter()
            # With one core nothing else could run meanwhile, so waiting costs nothing.
            cache = jax.block_until_ready(run.prepare(params, state)) if sum(counts) else None
            took["prepare"].append(time.perf_counter() - began)
            outcome = poll_message(pipe)
            began = time.perf_counter()
            state = jax.block_until_ready(run.resolve(params, state, cache, outcome))
            took["answer"].append(time.perf_counter() - began)
            if outcome.done.all():
                break
        pipe.send((np.asarray(state.record), took))


class DraftPrograms:
    """Compiled functions of the draft's side."""

    def __init__(self, m: LanguageModel, fan_out: FanOut, max_new_tokens: int):
        side = Speculator(m.drafter, fan_out, max_new_tokens)
        self.init_state = jax.jit(m.drafter.init_state, static_argnums=(0, 1))
        self.feed = jax.jit(side.feed, donate_argnums=1)
        self.begin = jax.jit(side.begin, donate_argnums=1)
        self.prepare = jax.jit(side.prepare)
        self.resolve = jax.jit(side.resolve, donate_argnums=1)


class BaseSide:
    """Compiled functions of the base's side, for every fan-out."""

    def __init__(self, m: LanguageModel, program: Program):
        self.engine = engine = Engine(m.model, program.replace(drafter=NoDrafter()))
        self.params = Params(m.params.base, {})
        self.prefill = jax.jit(engine.prefill)
        self.verify = jax.jit(functools.partial(verify_round, engine), donate_argnums=1)
        self.result = jax.jit(result_of)


# --- executors of a contest --------------------------------------------------------------------------------------


@dataclass
class RemoteExecutor:
    """An executor in another process (`whole_machine`), with the interface that `contest` uses."""

    name: str
    program: Program
    worker: Worker

    def decode(self, prompt, lengths, key=None) -> DecodeResult:
        self.worker.send((self.name, np.asarray(prompt), np.asarray(lengths)))
        return self.worker.receive()


class TwoProcesses:
    """An executor with the base in this process and the draft in another."""

    def __init__(self, program: Program, base: BaseSide, drafting: Worker, fan_out: FanOut):
        self.program, self.fan_out, self._base, self._drafting = program, fan_out, base, drafting
        self._records: list[SpeculationRecord] = []
        self._took: dict[str, list[float]] = defaultdict(list)

    def decode(self, prompt, lengths=None, key=None) -> DecodeResult:
        base, engine = self._base, self._base.engine
        given = settled_inputs(self.program, engine.model.config, prompt, lengths, key)
        state = base.prefill(base.params, *given)
        root, keys, rule, done = jax.device_get(
            (state.target.root, jax.random.key_data(state.output.keys), state.output.rule, state.output.done)
        )
        slots = engine.cache_slots(given.prompt.shape[1])
        prompt, lengths = jax.device_get((given.prompt, given.lengths))
        self._drafting.send((self.fan_out.counts, prompt, lengths, slots, (root, keys, rule, done)))
        stopped, rounds, took = np.zeros(len(prompt), bool), [], []
        tokens = self._drafting.receive()
        while not done.all():
            began = time.perf_counter()
            state, outcome = base.verify(base.params, state, tokens, None, stopped)
            outcome = jax.device_get(outcome)
            took.append(time.perf_counter() - began)
            self._drafting.send(outcome)
            done = outcome.done
            if not done.all():
                tokens = self._drafting.receive()
                rounds.append(time.perf_counter() - began)
        record, theirs = self._drafting.receive()
        result = jax.block_until_ready(base.result(state.output))
        record = SpeculationRecord(
            record[:, : engine.program.max_new_tokens], np.asarray(result.accept_lengths), self.fan_out
        )
        self._remember(record, {"verify": took, "round": rounds, **theirs})
        return result

    def _remember(self, record: SpeculationRecord, took: dict[str, list[float]]) -> None:
        """Add the times of one prompt without its first round, which may compile and has no prepared draft."""
        self._records.append(record)
        missed = record.numbers[0, : len(took["round"])] == MISS
        for name in ("verify", "prepare", "round"):
            self._took[name] += took[name][1 : len(missed)]
        for answer, miss in list(zip(took["answer"], missed, strict=False))[1:]:
            self._took["miss" if miss else "hit"].append(answer)

    def record(self) -> SpeculationRecord:
        """Return the record of all prompts decoded so far."""
        return joined(self._records)

    def parts(self) -> dict[str, float]:
        """Return median seconds of a round's parts, as `ssd_parts.part_seconds`; NaN without data."""
        return {name: median(self._took[name]) for name in ("verify", "prepare", "hit", "miss")}

    def round_seconds(self) -> float:
        """Return the mean without the slowest 1%, which a busy machine distorts. The prediction is a mean too."""
        times = np.sort(self._took["round"])
        return float(times[: -max(len(times) // 100, 1)].mean()) if len(times) > 1 else float("nan")


def ping_seconds(worker: Worker, message: np.ndarray) -> float:
    """Return the median seconds of a small message to the other process, half of a round trip."""
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
