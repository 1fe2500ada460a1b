"""Throughput and latency of Medusa, Hydra and Hydra++ over batch sizes (hydra figure 3).

Like `hydra_figure_2.py`, with a tree search for every batch size.
"""

import sys

import common

FULL = {"count": 16, "calibration": 256, "prompt_tokens": 64, "new_tokens": 64, "repeats": 9}
FULL |= {"sizes": [2, 4, 8, 16], "batch_sizes": [1, 2, 4, 8]}
QUICK = {"count": 8, "calibration": 64, "new_tokens": 32, "repeats": 5, "sizes": [2, 4], "batch_sizes": [1, 4]}


def run(args) -> None:
    setup = common.Setup(args)
    rows = []
    for batch in args.batch_sizes:
        rows += args.parts.rows(f"batch {batch}", lambda at=batch: common.contest_of_trees(setup, at, args.sizes))
    common.write(args, "speed", "hydra figure 3", "throughput and latency over batch sizes", rows)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
