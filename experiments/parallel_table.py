"""Compare drafts of one pass with Medusa, Hydra, Amphista and EAGLE, all trained on the same text alike.

Each draft decodes with a chain, with the best static tree of 64 nodes, with a grown one (``best-64``; dynamic for
drafts of several passes), and with the tree that is fastest here; sampled at temperature 0.7 too, under rejection
sampling where draft and tree allow it. Tokens per step are measured on all prompts, speed on the first of them. Each
greedy row also has the forecast of a 7B's step with a draft of this kind in its released size.

    python experiments/parallel_table.py --train-only --jobs 10     # on a GPU; then here, with its runs/parallel_table
    python experiments/parallel_table.py --output experiments/results/parallel_table.json
"""

import functools
import sys

import ablation
import common
import jax.numpy as jnp
from eagle_table import VARIANTS as OF_SEVERAL_PASSES
from eagle_table import dynamic

from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.roofline.prediction import predict
from hydrajax.bench.shapes import SHAPES
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS
from hydrajax.trees import BestFirstTree, DynamicTree, presets
from hydrajax.trees.dynamic import CandidateTree

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
FULL |= {"sizes": [2, 3, 4, 6, 8, 12], "steps": 2000, "jobs": 1}
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
SIZE, TEMPERATURE = 64, 0.7
LARGE, FORECAST = SHAPES["7b"], {"h100": DEVICES["H100"], "v5e": DEVICES["TPUv5e"]}
KIND_OF = {name: name.lower() for name in VARIANTS} | {"EAGLE-1": "eagle", "EAGLE-3": "eagle3"}


def run(args) -> None:
    ablation.train(args, {name: VARIANTS[name] for name in args.variants}, args.jobs)
    if args.train_only:
        args.parts.remove()
        sys.exit(0)
    setup = common.Setup(args, args.variants)
    rows = []
    for heads in setup.heads:
        rows += args.parts.rows(heads, functools.partial(measure, setup, heads, args))
    title = "drafts of one pass and others, trained alike"
    remarks = [
        *ablation.MEASURED,
        f"{TEMPERATURE:g}: relative to sampling without a draft at this temperature",
        "forecast: milliseconds of a 7B's step at context 1024 in bfloat16, without a draft and with one",
    ]
    common.write(args, "speed", "hydra figure 10", title, rows, remarks)


def measure(setup: common.Setup, heads: str, args) -> list[dict]:
    """Return the rows of a kind of heads: greedy with each tree, then sampled with the grown and the fastest one."""
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
        row |= {"tree": tree.name if isinstance(tree, DynamicTree) else None, "forecast": forecast(heads, tree)}
    return rows + sampled(setup, heads, {name: trees[name] for name in ("grown", "fastest")}, args)


def sampled(setup: common.Setup, heads: str, trees: dict[str, CandidateTree], args) -> list[dict]:
    plain, drafted = ExactSampling(TEMPERATURE), {}
    for name, tree in trees.items():
        rule = rejection(tree) if setup.heads[heads].drafter.spec.supports_sampling else None
        drafted[f"{heads}, {name}, {TEMPERATURE:g}"] = setup.executor(heads, tree, rule or plain)
    rows = common.speed_rows(setup.contest(drafted, timed=args.timed, rule=plain)[1:], 1)
    for row, executor in zip(rows, drafted.values(), strict=True):
        row |= {"tokens_per_step": setup.tokens_per_step(executor), "rule": executor.program.rule.__name__}
    return rows


def rejection(tree: CandidateTree) -> RejectionSampling | None:
    """Return rejection sampling; None for a tree that it cannot judge: searched ones may skip a rank."""
    rule = RejectionSampling(TEMPERATURE)
    try:
        rule.check(tree)
    except HydrajaxError:
        return None
    return rule


def forecast(heads: str, tree: CandidateTree) -> dict[str, list[float]] | None:
    """Return milliseconds of a 7B's step without a draft and with one, by device; None for a tree that is too deep."""
    drafter = KINDS[KIND_OF[heads]].build(LARGE, jnp.bfloat16)
    try:
        steps = [next(predict(device, LARGE, drafter, {"": tree}, [1], [1024], 2, [])) for device in FORECAST.values()]
    except HydrajaxError:
        return None
    return {name: [step.autoregressive_step, step.step] for name, step in zip(FORECAST, steps, strict=True)}


def add_arguments(parser) -> None:
    ablation.add_arguments(parser, ablation.CONFIG.with_name("parallel_table.yaml"), "runs/parallel_table")
    ablation.add_choice(parser, "--variants", VARIANTS)
    parser.add_argument("--train-only", action="store_true", help="train, to measure on another machine")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
