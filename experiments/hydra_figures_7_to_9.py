"""Throughput over tree sizes, for each kind of heads and batch size (hydra figures 7 to 9, section 4).

Trees of every size are grown by simulated decoding of calibration text. On other prompts they, chains and the released
63-choice tree are decoded: all for tokens_per_step, which the calibration predicts, the first few for time.
"""

import sys

import common

from hydrajax.decoding.acceptance import Greedy
from hydrajax.evaluation.rounds import measure_trees
from hydrajax.trees import presets
from hydrajax.trees.search import expected_tokens_per_step, simulated

FULL = {"count": 256, "calibration": 512, "timed": 8, "prompt_tokens": 64, "new_tokens": 64, "repeats": 11}
FULL |= {"sizes": [1, 2, 3, 4, 6, 8, 16, 32, 64], "batch_sizes": [1, 2, 4, 8]}
QUICK = {"count": 64, "calibration": 64, "repeats": 3, "sizes": [1, 2, 4, 16, 64], "batch_sizes": [1, 4]}


def run(args) -> None:
    setup = common.Setup(args)
    rows, remarks = [], []
    for heads, loaded in setup.heads.items():
        trees = candidates(setup, heads, args.sizes)
        found = setup.calibrated(heads)
        expected = {key: expected_tokens_per_step(tree, found.ranks, found.spans) for key, tree in trees.items()}
        reached = {}
        for key, tree in trees.items():
            with common.CONSOLE.status(f"{heads}: tokens_per_step of {key[1]}"):
                reached[key] = setup.tokens_per_step(setup.way(heads, tree))
        errors = {key: expected[key] / reached[key] - 1 for key in trees}
        worst = max(errors, key=lambda key: abs(errors[key]))
        remarks.append(
            f"{heads}: τ expected from {args.calibration} prompts against measured on {args.count} others: "
            f"{errors[worst]:+.1%} at most ({worst[1]})"
        )
        print(remarks[-1])
        for batch in args.batch_sizes:
            with common.CONSOLE.status("") as line:
                rates = measure_trees(
                    loaded.model, loaded.drafter, loaded.params, {key[1]: tree for key, tree in trees.items()},
                    setup.measured[: max(args.timed, batch)], Greedy(), batch_size=batch, new_tokens=args.new_tokens,
                    repeats=args.repeats, eos_ids=loaded.eos_ids,
                    on_status=lambda text, at=f"{heads}, batch {batch}": line.update(f"{at}: {text}"),
                )  # fmt: skip
            for key, rate in zip(trees, rates, strict=True):
                fixed = {"drafter": heads, "batch": batch, "family": key[0], "expected": expected[key]}
                fixed["tokens_per_step_when_timed"] = rate.tokens_per_step  # on the few prompts that are timed
                rows.append(rate.as_dict() | fixed | {"tokens_per_step": reached[key]})
            common.speed_rows([rate for key, rate in zip(trees, rates, strict=True) if shown(key, rates)], batch)
    common.write(args, "trees", "hydra figures 7 to 9", "trees over their size", rows, remarks)


def candidates(setup, heads: str, sizes: list[int]) -> dict:
    """``(family, name)`` to tree."""
    found = setup.calibrated(heads)
    proposals = simulated(found.ranks, found.spans, max(sizes))
    grown = [size for size in sizes if size <= proposals.largest]
    trees = {("searched" if size > 1 else "root", f"T_{size}"): proposals.tree(size) for size in grown}
    depth = setup.heads[heads].drafter.depth
    trees |= {("chain", f"chain-{d}"): presets.chain(d) for d in range(1, depth + 1)}
    return trees | {("released", common.RELEASED): setup.released(heads)}


def shown(key: tuple[str, str], rates) -> bool:
    """The fastest tree of every family on the terminal."""
    mine = [rate for rate in rates if family_of(rate.name) == family_of(key[1])]
    return max(mine, key=lambda rate: rate.tokens_per_second).name == key[1]


def family_of(name: str) -> str:
    return name if name == "T_1" else name[:2]


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
