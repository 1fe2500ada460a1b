"""Compare drafts of one pass with Medusa, Hydra, Amphista and EAGLE, all trained on the same text alike.

Each draft decodes with a chain, with the best static tree of 64 nodes, with a grown one (``best-64``; dynamic for
drafts of several passes), and with the tree that is fastest here. Tokens per step are measured on all prompts, speed on
the first of them.
"""

import functools
import sys

import ablation
import common
from eagle_table import VARIANTS as OF_SEVERAL_PASSES
from eagle_table import dynamic

from hydrajax.trees import BestFirstTree, DynamicTree, presets

CE = ("objective.lm_weight=1", "objective.teacher_weight=0", "objective.head_decay=0.78", *ablation.OTHERS)
DISTANCE = (
    "objective.lm_weight=0.1", "objective.teacher_weight=0", "objective.distance_weight=0.9",
    "objective.confidence_weight=0.5", "objective.head_decay=0.78", *ablation.OTHERS,
)  # fmt: skip
READS = "draft.target_layers=[1,4,7]"
BLOCK = ("draft.n_layers=2", READS, "draft.num_anchors=32")
VARIANTS = OF_SEVERAL_PASSES | {
    "Amphista": ("draft.heads=amphista", *ablation.SHARED, *ablation.BOTH),
    "DFlash": ("draft.heads=dflash", *BLOCK, *CE, "tree=chain-7"),
    "JetSpec": ("draft.heads=jetspec", *BLOCK, *CE, "tree=chain-7"),
    "DSpark": ("draft.heads=dspark", "draft.block_size=7", *BLOCK, *DISTANCE, "tree=chain-7"),
    "P-EAGLE": (
        "draft.heads=p-eagle", "draft.n_layers=2", "draft.block_size=7", "draft.vocabulary=3072",
        READS, "draft.num_anchors=256", "draft.retention=0.7", *ablation.TEACHER, "tree=chain-7",
    ),
}  # fmt: skip
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
SIZE = 64


def run(args) -> None:
    ablation.train(args, {name: VARIANTS[name] for name in args.variants})
    setup = common.Setup(args, args.variants)
    rows = []
    for heads in setup.heads:
        rows += args.parts.rows(heads, functools.partial(measure, setup, heads, args))
    title = "drafts of one pass and others, trained alike"
    common.write(args, "speed", "hydra figure 10", title, rows, ablation.MEASURED)


def measure(setup: common.Setup, heads: str, args) -> list[dict]:
    spec = setup.heads[heads].drafter.spec
    static = setup.grown_trees(heads, [*args.sizes, SIZE])
    trees = {
        "chain": presets.chain(min(spec.depth, 7)),
        "static": max(static.values(), key=lambda tree: tree.size),
        "grown": BestFirstTree(SIZE) if spec.one_pass else dynamic(setup, heads, SIZE),
        "fastest": setup.fastest_tree(heads, 1, args.sizes),
    }
    executors = {f"{heads}, {name}": setup.executor(heads, tree) for name, tree in trees.items()}
    rows = ablation.measure(setup, executors, args)[1:]
    for row, tree in zip(rows, trees.values(), strict=True):
        row["tree"] = tree.name if isinstance(tree, DynamicTree) else None
    return rows


def add_arguments(parser) -> None:
    ablation.add_arguments(parser, ablation.OWN_TEXT, "runs/parallel_table")
    ablation.add_choice(parser, "--variants", VARIANTS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
