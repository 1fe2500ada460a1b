"""What a pass of a draft model costs here, by which `hydrajax.trees.speculation` says how long its chains should be."""

from __future__ import annotations

from hydrajax.measure.benchmark import room_for, step_timer
from hydrajax.measure.timing import interleaved_ms
from hydrajax.measure.way import Way
from hydrajax.trees import presets

ROUNDS = 5


def draft_cost(way: Way, batch_size: int, context: int) -> float:
    """c, measured: proposing one token in autoregressive steps, both at the end of so many tokens, interleaved.

    The context is made as long or as short as timing and the model need it.
    """
    one = way.with_tree(presets.chain(1), "chain-1")
    room = room_for([one.depth])
    context = max(room + 1, min(context, way.model.config.max_positions))
    timed = {"draft": step_timer(one, batch_size, context, room).propose()}
    timed["base"] = step_timer(way.autoregressive(), batch_size, context, room).step()
    found = interleaved_ms(timed, ROUNDS)
    return found["draft"] / found["base"]
