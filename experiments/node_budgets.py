"""Bound the gain of choosing among compiled node budgets in every step, by an oracle that knows what will be accepted.

    python experiments/node_budgets.py --base smollm2 --draft dspark --prompts mt_bench_question.jsonl --every 4

The trees of the budgets contain each other. Their accepted tokens at every place of the base's own text come from one
teacher-forced pass, and their step times are measured. A batch decodes in lockstep, with one budget for all sequences.
Compared with the fastest fixed budget are two oracles: `smallest` takes the smallest budget with all accepted nodes of
the largest one in any sequence; `best` takes the budget with the most accepted tokens for its time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import ceilings
import common
import numpy as np
from jaxtyping import Float, Int

import hydrajax
from hydrajax import assets
from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.rounds import medians
from hydrajax.bench.trees.simulation import accepted_lengths

FULL = {"count": 16, "every": 4, "new_tokens": 96, "prompt_tokens": 64, "sizes": [4, 8, 16, 32]}
FULL |= {"batch_sizes": [1, 8], "rounds": 5, "context": 256}
QUICK = {"count": 2, "every": 1, "new_tokens": 16, "sizes": [2, 4], "batch_sizes": [1, 2], "rounds": 1}
Choose = Callable[[Int[np.ndarray, "budgets rows"]], int]


def decoded(
    accepted: Sequence[Int[np.ndarray, "budgets n"]], batch: int, times: Float[np.ndarray, " budgets"], choose: Choose
) -> tuple[int, float, int]:
    """Return the tokens, milliseconds and steps of decoding texts in batches until the first of a batch ends.

    Args:
        accepted: of each text, the tokens after the root that a step accepts if it begins at a place.
        choose: returns the budget of a step from what each accepts in each sequence.
    """
    tokens = steps = 0
    milliseconds = 0.0
    for start in range(0, len(accepted) - batch + 1, batch):
        rows, at = accepted[start : start + batch], np.zeros(batch, int)
        while all(place < row.shape[1] for place, row in zip(at, rows, strict=True)):
            here = np.stack([row[:, place] for place, row in zip(at, rows, strict=True)], axis=1)
            budget = choose(here)
            at += 1 + here[budget]
            tokens += int((1 + here[budget]).sum())
            milliseconds += times[budget]
            steps += 1
    return tokens, milliseconds, steps


def smallest(here: Int[np.ndarray, "budgets rows"]) -> int:
    """Return the first budget with which every sequence accepts as much as with the last."""
    return int(np.argmax((here == here[-1]).all(axis=1)))


def compared(
    accepted: Sequence[Int[np.ndarray, "budgets n"]], batch: int, times: Float[np.ndarray, " budgets"]
) -> dict:
    """Return the gains of the oracles over the fastest fixed budget."""

    def rate(choose: Choose) -> float:
        tokens, milliseconds, _ = decoded(accepted, batch, times, choose)
        return tokens / milliseconds

    fixed = [rate(lambda here, budget=budget: budget) for budget in range(len(times))]
    best = max(fixed)
    for _ in range(5):  # Dinkelbach: a budget is worth its tokens minus its time at the rate reached so far
        best = max(best, rate(lambda here, reached=best: int(np.argmax((1 + here).sum(axis=1) - reached * times))))
    tokens, milliseconds, steps = decoded(accepted, batch, times, smallest)
    gains = {"smallest": tokens / milliseconds / max(fixed) - 1, "best": best / max(fixed) - 1}
    return {"fixed": int(np.argmax(fixed)), "steps": steps, **gains}


def run(args: argparse.Namespace) -> None:
    base = hydrajax.load(args.base or assets.base(), dtype=args.dtype, quantize=args.quantize)
    measured, others = ceilings.prompts_of(args, base)
    decode = {"max_new_tokens": args.new_tokens, "batch_size": ceilings.BATCH, "seed": 1}
    decode |= {"tree": "root", "rule": "exact", "temperature": args.temperature}
    rows = []
    with common.CONSOLE.status("the base's own text") as line:
        texts = base.generate(measured, **decode)
        found = base.generate(others, **decode)
        for name in args.draft:
            m = base.with_draft(name)
            along = ceilings.Along(m, min(m.drafter.spec.depth, ceilings.DEEPEST), 1)
            trees = ceilings.trees_of(along(found, args.temperature), found, args.sizes, along.depth)
            trees = [tree for label, tree in trees.items() if not label.startswith("chain")]
            along(texts, args.temperature)
            accepted = np.stack([accepted_lengths(tree, along.ranks) for tree in trees])
            ends = [text.new_tokens - along.depth - 1 for text in texts]
            accepted = [accepted[:, row, :end] for row, end in enumerate(ends) if end > 0]
            for batch in args.batch_sizes:
                line.update(f"{name}, batch {batch}: step times")
                executors = [m.executor(m.program(tree=tree)) for tree in trees]
                timed = {n: step_timer(each, batch, args.context).step() for n, each in enumerate(executors)}
                times = np.array([*medians(timed, args.rounds).values()])
                found_here = compared(accepted, batch, times)
                row = {"draft": name, "temperature": args.temperature, "batch": batch} | found_here
                row |= {"fixed": trees[found_here["fixed"]].size, "nodes": [tree.size for tree in trees]}
                row["step_ms"] = times.tolist()
                rows.append(row)
                gains = f"smallest {row['smallest']:+.1%}, best {row['best']:+.1%} over {row['fixed']} nodes"
                of_nodes = f"milliseconds {times.round(1)} of {row['nodes']} nodes"
                print(f"{name}, batch {batch}: {gains}; {of_nodes}", flush=True)
    common.write(args, "budgets", "", "gain of an oracle that chooses among node budgets in every step", rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0, metavar="T", help="default %(default)s, greedy")
    parser.add_argument("--quantize", metavar="TYPE", help="weights of the base (default: as hydrajax.load)")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
