"""Throughput over tree sizes, for each kind of heads and batch size (hydra figures 7 to 9, section 4).

Trees of every size are searched by simulated decoding of calibration text. They, chains and the released tree of 63
choices then decode other prompts: all of them for tokens per step, which the calibration predicts, the first few for
speed.
"""

import sys
from dataclasses import asdict
from functools import partial
from operator import attrgetter

import common

from hydrajax.trees import TreeTopology, presets

FULL = {"count": 256, "calibration": 512, "timed": 8, "prompt_tokens": 64, "new_tokens": 64, "repeats": 11}
FULL |= {"sizes": [1, 2, 3, 4, 6, 8, 16, 32, 64], "batch_sizes": [1, 2, 4, 8]}
QUICK = {"count": 32, "calibration": 64, "timed": 4, "new_tokens": 32, "repeats": 3, "sizes": [1, 2, 8, 64]}
QUICK |= {"batch_sizes": [1, 4]}

Trees = dict[tuple[str, str], TreeTopology]  # by family and name


def run(args) -> None:
    setup = common.Setup(args)
    rows, remarks = [], []
    for heads in setup.heads:
        trees = candidates(setup, heads, args.sizes)
        taus = args.parts.rows(heads, partial(tokens_per_step, setup, heads, trees))
        worst = max(taus, key=lambda row: abs(row["expected"] / row["tokens_per_step"] - 1))
        remarks.append(
            f"{heads}: τ predicted from {args.calibration} prompts and measured on {args.count} others differ by "
            f"{worst['expected'] / worst['tokens_per_step'] - 1:+.1%} at most ({worst['name']})"
        )
        print(remarks[-1], flush=True)
        for batch in args.batch_sizes:
            timed = args.parts.rows(f"{heads}, batch {batch}", partial(speed, setup, heads, trees, batch))
            rows += [rate | tau | {"drafter": heads} for rate, tau in zip(timed, taus, strict=True)]
    common.write(args, "trees", "hydra figures 7 to 9", "trees over their size", rows, remarks)


def candidates(setup: common.Setup, heads: str, sizes: list[int]) -> Trees:
    grown = setup.grown_trees(heads, sizes)
    trees = {("searched" if tree.size > 1 else "root", name): tree for name, tree in grown.items()}
    depth = setup.heads[heads].drafter.spec.depth
    trees |= {("chain", f"chain-{d}"): presets.chain(d) for d in range(1, depth + 1)}
    return trees | {("released", common.RELEASED): setup.released(heads)}


def tokens_per_step(setup: common.Setup, heads: str, trees: Trees) -> list[dict]:
    """Return predicted and measured tokens per step of each tree."""
    rows = []
    for (family, name), tree in trees.items():
        with common.CONSOLE.status(f"{heads}: tokens_per_step of {name}"):
            reached = setup.tokens_per_step(setup.executor(heads, tree))
        expected = setup.expected(heads, tree)
        rows.append({"family": family, "name": name, "expected": expected, "tokens_per_step": reached})
    return rows


def speed(setup: common.Setup, heads: str, trees: Trees, batch: int) -> list[dict]:
    """Time all trees on the first prompts and print the fastest of every family."""
    args = setup.args
    by_name = {name: tree for (_, name), tree in trees.items()}
    rates = setup.measure_trees(heads, by_name, setup.measured[: max(args.timed, batch)], batch, args.repeats)
    families = [family for family, _ in trees]
    best = [
        max(
            (rate for rate, mine in zip(rates, families, strict=True) if mine == family),
            key=attrgetter("tokens_per_second"),
        )
        for family in dict.fromkeys(families)
    ]
    print(heads)
    common.speed_rows(best, batch)
    return [{"batch": batch} | asdict(rate) | {"tokens_per_step_when_timed": rate.tokens_per_step} for rate in rates]


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
