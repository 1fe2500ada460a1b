"""What drafting costs in a step: prefix attention and each head (hydra table 1).

A head's time is that of proposing a tree cut below its level, less that of the tree cut above it.
"""

import statistics
import sys

import common

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.step import Engine, Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.measure.timing import StepTimer
from hydrajax.trees import presets

N_STEPS = 8  # in a timed call

FULL = {"count": 1, "prompt_tokens": 64, "context": 256, "batch_size": 1, "rounds": 7, "repeats": 15}
QUICK = {"rounds": 3, "repeats": 7}


def run(args) -> None:
    setup = common.Setup(args)
    rows = []
    for heads in setup.heads:
        with common.CONSOLE.status(heads):
            rows.append(measure(setup, heads, args))
        print(rows[-1], flush=True)
    remark = "each head's time is a difference of two timings: of hundredths of a millisecond, mostly noise"
    common.write(args, "overhead", "hydra table 1", "what drafting costs, released tree", rows, [remark])


def measure(setup: common.Setup, heads: str, args) -> dict:
    loaded, tree = setup.heads[heads], setup.released(heads)
    timers = [
        timer(loaded.model, loaded.drafter, common.cut(tree, depth), loaded.params, args)
        for depth in range(tree.depth + 1)
    ]
    plain = timer(loaded.model, NoDrafter(), presets.root(), Params(loaded.params.base, {}), args)
    found: dict[str, list[float]] = {"step": [], "verify": [], "observe": []}
    proposing: list[list[float]] = []
    for _ in range(args.rounds):  # what else the machine does meets all parts alike
        proposing.append([timed.propose() for timed in timers])
        found["step"].append(plain.step())
        found["verify"].append(timers[-1].verify())
        found["observe"].append(timers[-1].observe())
    median = {name: statistics.median(values) for name, values in found.items()}
    costs = [
        max(0.0, statistics.median(one[depth + 1] - one[depth] for one in proposing)) for depth in range(tree.depth)
    ]
    has_prefix = isinstance(loaded.drafter, WithPrefix)
    return {
        "drafter": heads, "prefix_attention": median["observe"] if has_prefix else None, "heads": costs,
        "verify": median["verify"], "autoregressive_step": median["step"],
    }  # fmt: skip


def timer(model, drafter, tree, params, args) -> StepTimer:
    room = N_STEPS * (tree.depth + 1)
    engine = Engine(model, drafter, tree, Greedy(), max_new_tokens=room)
    return StepTimer(engine, params, args.batch_size, args.context - room, N_STEPS, args.repeats)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
