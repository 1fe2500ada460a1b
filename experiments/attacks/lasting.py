"""An attack on a process that serves for hours, in short: hundreds of calls, and what they may leave behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

from attacks.commands import CONTEXT, base, text
from attacks.registry import CannotTry, Fell, Place, attack

import hydrajax
from hydrajax.decoding.prompt_batch import bucket

CALLS = 300
PROGRAMS = 2  # that a kind of call compiles when it is first made: the prompt's pass, and the loop
SMALL = 16  # others, in all: random keys and what is drawn from them
MEGABYTES = 48  # by which memory may grow from the last new kind of call on, and that is without what they compile
LONGEST = 30  # tokens of a prompt, and of an answer, so that kinds are few
BATCHES = (1, 3)


class Compilations:
    """How many there have been since this was made. JAX has no way to stop listening that is its public interface."""

    def __init__(self):
        import jax

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def resident() -> float:
    """Megabytes."""
    if not Path("/proc/self/statm").exists():
        raise CannotTry("this system does not say how much memory a process has now")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def call(random: random.Random) -> tuple[list, dict[str, Any]]:
    """Prompts and settings of `hydrajax.LanguageModel.generate`."""
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
    """What of a call decides which programs it needs: widths of its batches, room for answers, rows, kind of rule."""
    rows = min(settings["batch_size"], len(prompts))
    lengths = [len(ids) for ids in loaded.ids_of_prompts(prompts)]
    widths = {bucket(max(lengths[start : start + rows]), CONTEXT) for start in range(0, len(lengths), rows)}
    room, kind = bucket(max(settings["max_new_tokens"]), CONTEXT), type(settings["rule"])
    return {(width, room, rows, kind) for width in widths}


@attack("hundreds of calls", count=1)
def lasting(place: Place) -> int:
    """A kind of call that was made before compiles nothing, a new one a few programs; memory stays what it was."""
    loaded = hydrajax.load(base(place), "lookup", dtype="float32")
    tree, known, new_at, compilations = hydrajax.TreeTopology.from_choices([[0], [0, 0]]), set(), 0, Compilations()
    memory, small = resident(), 0
    for number in range(CALLS):
        prompts, settings = call(place.random)
        before, new = compilations.count, kinds_of(loaded, prompts, settings) - known
        results = loaded.generate(prompts, tree=tree, **settings)
        compiled = compilations.count - before
        small += compiled - PROGRAMS * len(new)
        if (compiled and not new) or small > SMALL:
            raise Fell(f"call {number} compiled {compiled} programs for {len(new)} new kinds of call: {settings}")
        if [len(result.prompt_ids) for result in results] != [len(ids) for ids in loaded.ids_of_prompts(prompts)]:
            raise Fell(f"call {number} answers other prompts: {settings}")
        known |= new
        if new:
            new_at, memory = number + 1, resident()
    grown = resident() - memory
    if grown > MEGABYTES:
        raise Fell(f"{grown:.0f} MB more after {CALLS - new_at} calls of kinds that were known")
    summary = f"{CALLS} calls of {len(known)} kinds compiled {compilations.count} programs"
    print(f"{summary}; the last {CALLS - new_at} added {grown:.1f} MB to {memory:.0f}")
    return CALLS
