"""Hundreds of calls of `hydrajax.LanguageModel.generate` in one process: compilations and memory."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import hydrajax
from hydrajax.decoding.prompt_batch import bucket
from tools.faults.fixtures import CONTEXT, base, text
from tools.faults.registry import Failure, Trial, Unsupported, fault

CALLS = 300
PROGRAMS = 2  # compiled for a new kind of call: prefill and loop
SMALL = 16  # other programs in all, such as random keys
MEGABYTES = 48  # allowed growth of memory after the last new kind of call
LONGEST = 30  # tokens of a prompt and of an answer, which keeps the kinds few
BATCHES = (1, 3)


class Compilations:
    """Count compilations from now on. JAX has no public way to remove the listener."""

    def __init__(self):
        import jax

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, seconds: float, **_) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def resident() -> float:
    """Resident memory in megabytes."""
    if not Path("/proc/self/statm").exists():
        raise Unsupported("no /proc/self/statm")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def call(random: random.Random) -> tuple[list, dict[str, Any]]:
    """Random prompts and settings."""
    prompts: list[Any] = []
    for _ in range(random.choice((1, 1, 2, 5))):
        ids = [random.randrange(1, 250) for _ in range(random.randrange(1, LONGEST))]
        prompts.append(random.choice((ids, text(random.randrange(10**6), random.randint(1, 4)))))
    rule: Any = hydrajax.Greedy()
    if random.random() < 0.5:
        rule = [hydrajax.ExactSampling(random.uniform(0.1, 3), top_p=random.uniform(0.1, 0.99)) for _ in prompts]
    return prompts, {
        "rule": rule,
        "max_new_tokens": [random.randrange(1, LONGEST) for _ in prompts],
        "stop": [random.choice(("e", "th", "\n\n", "é", "\ufffd", "xyz")) for _ in range(random.randrange(3))],
        "batch_size": random.choice(BATCHES),
        "seed": random.choice((None, random.randrange(2**32))),
    }


def kinds_of(loaded: Any, prompts: list, settings: dict[str, Any]) -> set[tuple]:
    """The properties that select a call's programs: prompt width, room for answers, batch size, rule."""
    rows = min(settings["batch_size"], len(prompts))
    lengths = [len(ids) for ids in loaded.ids_of_prompts(prompts)]
    widths = {bucket(max(lengths[start : start + rows]), CONTEXT) for start in range(0, len(lengths), rows)}
    room, kind = bucket(max(settings["max_new_tokens"]), CONTEXT), type(settings["rule"])
    return {(width, room, rows, kind) for width in widths}


@fault("repeated-calls")
def repeated_calls(trial: Trial) -> int:
    """A known kind of call compiles nothing, a new one `PROGRAMS`; memory does not grow."""
    loaded = hydrajax.load(base(trial), "lookup", dtype="float32")
    tree, known, new_at, compilations = hydrajax.TreeTopology.from_choices([[0], [0, 0]]), set(), 0, Compilations()
    memory, small = resident(), 0
    for number in range(CALLS):
        prompts, settings = call(trial.random)
        before, new = compilations.count, kinds_of(loaded, prompts, settings) - known
        results = loaded.generate(prompts, tree=tree, **settings)
        compiled = compilations.count - before
        small += compiled - PROGRAMS * len(new)
        if (compiled and not new) or small > SMALL:
            raise Failure(f"call {number} compiled {compiled} programs for {len(new)} new kinds of call: {settings}")
        if [len(result.prompt_ids) for result in results] != [len(ids) for ids in loaded.ids_of_prompts(prompts)]:
            raise Failure(f"call {number} answered other prompts: {settings}")
        known |= new
        if new:
            new_at, memory = number + 1, resident()
    grown = resident() - memory
    if grown > MEGABYTES:
        raise Failure(f"memory grew by {grown:.0f} MB in {CALLS - new_at} calls of known kinds")
    summary = f"{CALLS} calls of {len(known)} kinds compiled {compilations.count} programs"
    print(f"{summary}; the last {CALLS - new_at} added {grown:.1f} MB to {memory:.0f}")
    return CALLS
