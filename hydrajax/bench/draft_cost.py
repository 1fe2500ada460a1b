"""Measure the cost of a pass of a draft model, from which `hydrajax.bench.trees.speculation` computes chain lengths."""

from __future__ import annotations

from hydrajax.bench.benchmark import room_for, step_timer
from hydrajax.bench.rounds import medians
from hydrajax.decoding.executor import Executor
from hydrajax.trees import presets

ROUNDS = 5


def draft_cost(executor: Executor, batch_size: int, context: int) -> float:
    """Return c: the time to propose one token, in autoregressive steps, timed in the same rounds.

    Both run after ``context`` tokens, or as near to it as the timed steps and the model allow.
    """
    one = executor.with_spec(tree=presets.chain(1))
    room = room_for([one.spec.longest_path])
    context = max(room + 1, min(context, executor.model.config.max_positions))
    timed = {"draft": step_timer(one, batch_size, context, room).propose()}
    timed["base"] = step_timer(executor.autoregressive(), batch_size, context, room).step()
    found = medians(timed, ROUNDS)
    return found["draft"] / found["base"]
