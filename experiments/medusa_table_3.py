"""What each technique adds: heads without a tree, a dense tree, an optimised tree (medusa table 3).

The first heads given, by default the shipped Medusa's. The dense tree has as many nodes as the searched one or a few
more. For Medusa-2 give its base and heads in a second run: it is another base, with an autoregressive speed of its own.
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
    common.write(args, "speed", "medusa table 3", "what each technique adds", rows)


def dense(nodes: int, depth: int) -> TreeTopology:
    """The smallest Cartesian tree of at least so many nodes whose every head offers half as many again as the next."""
    for widest in range(1, nodes + 1):
        sizes = [max(1, round(widest / 1.5**k)) for k in range(depth)]
        tree = presets.cartesian(sizes)
        if tree.size >= nodes:
            return tree
    raise AssertionError("a tree as wide has as many nodes")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
