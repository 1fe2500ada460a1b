"""What drafting costs in a step: prefix attention and each head (hydra table 1).

A head's time is that of proposing a tree cut below its level, less that of the tree cut above it.
"""

import statistics
import sys

import common

from hydrajax.measure.benchmark import step_timer

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
    tree = setup.released(heads)
    ways = [setup.way(heads, common.cut(tree, depth)) for depth in range(tree.depth + 1)]
    timers = [step_timer(way, args.batch_size, args.context, args.repeats) for way in ways]
    plain = step_timer(ways[0].autoregressive(), args.batch_size, args.context, args.repeats)
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
    attends = bool(ways[0].drafter.observe_costs(1, 1, 1))  # what has seen the text with layers of its own
    return {
        "drafter": heads, "prefix_attention": median["observe"] if attends else None, "heads": costs,
        "verify": median["verify"], "autoregressive_step": median["step"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
