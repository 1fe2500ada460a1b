"""Random dense trees against searched sparse ones: tokens per step and speed by size (medusa figure 4)."""

import sys
from dataclasses import asdict
from functools import partial

import common
import numpy as np

from hydrajax.trees import TreeTopology, presets

FULL = {"count": 8, "calibration": 256, "prompt_tokens": 64, "new_tokens": 64, "repeats": 7}
FULL |= {"dense": 24, "largest": 256, "sizes": [4, 8, 16, 32, 64, 128, 256]}
QUICK = {"calibration": 64, "repeats": 3, "dense": 6, "largest": 64, "sizes": [4, 16, 64]}


def run(args) -> None:
    setup = common.Setup(args)
    rows = [row for heads in setup.heads for row in args.parts.rows(heads, partial(measure, setup, heads))]
    common.write(args, "trees", "medusa figure 4", "dense and sparse trees", rows)


def measure(setup: common.Setup, heads: str) -> list[dict]:
    args = setup.args
    searched = setup.grown_trees(heads, args.sizes)
    trees = searched | random_dense(args.dense, args.largest, setup.heads[heads].drafter.spec.depth)
    rows = []
    for rate in setup.measure_trees(heads, trees, setup.measured, 1, args.repeats):
        family = "searched" if rate.name in searched else "dense"
        expected = setup.expected(heads, trees[rate.name])
        rows.append({"drafter": heads, "batch": 1, "family": family, "expected": expected} | asdict(rate))
    print(f"{heads}: {len(trees)} trees", flush=True)
    return rows


def random_dense(count: int, largest: int, depth: int) -> dict[str, TreeTopology]:
    """Return Cartesian trees (medusa 2.1.2) with random numbers of guesses per head."""
    random, found = np.random.default_rng(0), {}
    for _ in range(100 * count):  # a few heads may have fewer trees
        sizes = random.integers(1, 9, random.integers(1, depth + 1)).tolist()
        if len(found) < count and np.cumprod(sizes).sum() < largest:
            name = "cartesian-" + "x".join(map(str, sizes))
            found[name] = presets.by_name(name)
    return found


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
