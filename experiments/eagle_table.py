"""Compare EAGLE with Medusa and Hydra, all trained on the same text for the same number of steps (hydra figure 10).

Each kind of heads decodes with the released tree of 63 choices, with a searched and a dynamic tree of equal size, and
with the searched tree that is fastest here. Tokens per step are measured on all prompts, speed on the first of them.
"""

import functools
import itertools
import sys

import ablation
import common

from hydrajax.bench.contests.tree_search import usable
from hydrajax.trees.dynamic import DynamicTree

DECAY = (*ablation.TEACHER, "objective.head_decay=0.8")
VARIANTS = ablation.ALIKE | {
    "EAGLE-1": (),  # the base configuration
    # The released layers 2, 4 and 5 carry too little information about the end of a base of 8 layers.
    "EAGLE-3": (
        "draft.heads=eagle3",
        "draft.vocabulary=3072",
        "draft.aux_hidden_layers=[2,5,8]",
        "draft.ttt_length=5",
        *DECAY,
    ),
}
FULL = {"count": 48, "calibration": 48, "prompt_tokens": 64, "new_tokens": 128, "timed": 8, "repeats": 3, "rounds": 30}
FULL |= {"sizes": [2, 3, 4, 6, 8, 12], "steps": 400}
QUICK = {
    "count": 4,
    "calibration": 4,
    "new_tokens": 24,
    "timed": 2,
    "repeats": 2,
    "rounds": 3,
    "sizes": [4],
    "steps": 8,
}


def run(args) -> None:
    ablation.train(args, VARIANTS)
    setup = common.Setup(args, list(VARIANTS))
    rows = []
    for heads in setup.heads:
        rows += args.parts.rows(heads, functools.partial(measure, setup, heads, args))
    title = "EAGLE, Medusa and Hydra, trained alike"
    common.write(args, "speed", "hydra figure 10", title, rows, ablation.MEASURED)


def measure(setup: common.Setup, heads: str, args) -> list[dict]:
    released = setup.released(heads)
    grown = setup.grown_trees(heads, [*args.sizes, released.size])
    trees = {
        "63 choices": released,
        "searched": max(grown.values(), key=lambda tree: tree.size),
        "dynamic": dynamic(setup, heads, released.size),
        "fastest": setup.fastest_tree(heads, 1, args.sizes),
    }
    executors = {f"{heads}, {name}": setup.executor(heads, tree) for name, tree in trees.items()}
    rows = ablation.measure(setup, executors, args)[1:]
    for row, tree in zip(rows, trees.values(), strict=True):
        row["tree"] = tree.name if isinstance(tree, DynamicTree) else None
    return rows


def dynamic(setup: common.Setup, heads: str, size: int) -> DynamicTree:
    """Return the dynamic tree of this size with the most tokens per step on the calibration prompts."""
    depth = setup.heads[heads].drafter.spec.depth
    expansions = [n for n in (3, 5, 7) if n < depth] or [depth - 1]
    trees = [usable(size, n, k) for n, k in itertools.product(expansions, (6, 10))]
    return max(trees, key=lambda tree: setup.tokens_per_step(setup.executor(heads, tree), setup.calibration))


if __name__ == "__main__":
    add = functools.partial(ablation.add_arguments, config=ablation.OWN_TEXT, runs=ablation.OWN_TEXT_RUNS)
    sys.exit(common.program(__doc__, run, FULL, QUICK, add))
