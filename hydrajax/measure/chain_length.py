"""What a pass of a draft model costs here, by which `hydrajax.trees.speculation` says how long its chains should be."""

from __future__ import annotations

from hydrajax.decoding.executor import Executor
from hydrajax.measure.benchmark import room_for, step_timer
from hydrajax.measure.timing import interleaved_ms
from hydrajax.trees import presets

ROUNDS = 5


def draft_cost(executor: Executor, batch_size: int, context: int) -> float:
    """Measure c: proposing one token in autoregressive steps, both at the end of ``context`` tokens, interleaved.

    The context is made as long or as short as timing and the model need it.
    """
    one = executor.with_spec(tree=presets.chain(1))
    room = room_for([one.spec.longest_path])
    context = max(room + 1, min(context, executor.model.config.max_positions))
    timed = {"draft": step_timer(one, batch_size, context, room).propose()}
    timed["base"] = step_timer(executor.autoregressive(), batch_size, context, room).step()
    found = interleaved_ms(timed, ROUNDS)
    return found["draft"] / found["base"]
