"""Speed-up of each technique: heads without a tree, with a dense tree, with a searched tree (medusa table 3).

Measures the first heads given (default: the shipped Medusa heads). The dense tree has at least as many nodes as the
searched one. Medusa-2 needs a second run with its base and heads, as its base has another autoregressive speed.
"""

import sys

import common

from hydrajax.trees import TreeTopology, presets

FULL = {"count": 16, "calibration": 256, "prompt_tokens": 64, "new_tokens": 128, "repeats": 15, "nodes": 64}
QUICK = {"count": 8, "calibration": 64, "new_tokens": 64, "repeats": 5}


def run(args) -> None:
    setup = common.Setup(args)
    heads, loaded = next(iter(setup.heads.items()))
    proposals = setup.grown(heads, args.nodes)
    searched = proposals.tree(min(args.nodes, proposals.largest))
    depth = loaded.drafter.spec.depth
    trees = {
        f"{heads} without tree attention": presets.chain(depth),
        "+ tree attention, dense tree": dense(searched.size, depth),
        "+ optimised tree": searched,
        "+ optimised tree, fastest size": setup.fastest_tree(heads, 1, [2, 3, 4, 6, 8, 16, 32]),
    }
    rows = common.speed_rows(setup.contest({name: setup.executor(heads, tree) for name, tree in trees.items()}), 1)
    common.write(args, "speed", "medusa table 3", "speed-up of each technique", rows)


def dense(nodes: int, depth: int) -> TreeTopology:
    """Return the smallest Cartesian tree of this size in which each head has 1.5 times the guesses of the next."""
    for widest in range(1, nodes + 1):
        sizes = [max(1, round(widest / 1.5**k)) for k in range(depth)]
        tree = presets.cartesian(sizes)
        if tree.size >= nodes:
            return tree
    raise AssertionError("a tree of this width has enough nodes")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
