"""Time of prefix attention and of each head in a step (hydra table 1).

A head's time is the difference of proposing the tree cut below and above its level.
"""

import statistics
import sys

import common
import numpy as np

from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.roofline import passes
from hydrajax.bench.rounds import in_rounds

FULL = {"count": 1, "prompt_tokens": 64, "context": 256, "batch_size": 1, "rounds": 100}
QUICK = {"rounds": 20}


def run(args) -> None:
    setup = common.Setup(args)
    rows = []
    for heads in setup.heads:
        with common.CONSOLE.status(heads):
            rows.append(measure(setup, heads, args))
        print(rows[-1], flush=True)
    remark = "each head's time is a difference of two timings; hundredths of a millisecond are noise"
    common.write(args, "overhead", "hydra table 1", "drafting overhead, released tree", rows, [remark])


def measure(setup: common.Setup, heads: str, args) -> dict:
    tree = setup.released(heads)
    executors = [setup.executor(heads, common.cut(tree, depth)) for depth in range(tree.depth + 1)]
    timers = [step_timer(executor, args.batch_size, args.context) for executor in executors]
    timed = {f"propose {depth}": timer.propose() for depth, timer in enumerate(timers)} | {
        "step": step_timer(executors[0].autoregressive(), args.batch_size, args.context).step(),
        "verify": timers[-1].verify(), "observe": timers[-1].observe(),
    }  # fmt: skip
    times = in_rounds(timed, args.rounds)
    median = {name: statistics.median(times[name]) for name in ("step", "verify", "observe")}
    costs = [
        max(0.0, float(np.median(np.subtract(times[f"propose {depth + 1}"], times[f"propose {depth}"]))))
        for depth in range(tree.depth)
    ]
    # The drafter has layers of its own that attend to the text.
    attends = bool(passes.observe(executors[0].program.drafter, executors[0].model, tree, 1, args.context))
    return {
        "drafter": heads, "prefix_attention": median["observe"] if attends else None, "heads": costs,
        "verify": median["verify"], "autoregressive_step": median["step"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
