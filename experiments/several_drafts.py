"""Several drafts in one tree: tokens per step against lookup as a branch, and an agent loop with a suffix corpus.

    python experiments/several_drafts.py [--quick] [--draft DIR]

Trees: the heads with lookup's chain as a branch, and the tree of the most likely nodes of heads and lookup, with the
same number of verified nodes. Loop: an agent attempts a task ten times; before each attempt the prompt gets one more
line about the last error. Greedy, with and without the corpus, whose nodes go to lookup instead. Nothing is timed.
"""

from __future__ import annotations

import sys
from functools import partial

import common
import numpy as np

import hydrajax
from hydrajax import assets
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.state import Params
from hydrajax.drafters.several import Several, with_lookup
from hydrajax.generation import generate
from hydrajax.trees import presets

FULL = {"count": 16, "prompt_tokens": 128, "new_tokens": 96, "added": 5, "attempts": 10, "tasks": 4}
QUICK = {"count": 4, "new_tokens": 48, "tasks": 1}
TREES = ("chain-2", "cartesian-2x2", "dynamic-16-3-4")
CORPUS_NODES = 8


def run(args) -> None:
    base = hydrajax.load(args.base or assets.base(), dtype=args.dtype)
    heads = args.draft[0] if args.draft else assets.path("hydra_pp")
    prompts = common.prompts_of(args, base)
    rows = []
    for tree in TREES:
        rows += args.parts.rows(tree, partial(in_one_tree, args, base.with_draft(heads), tree, prompts))
    rows += args.parts.rows("loop", partial(loop, args, base, heads, prompts[: args.tasks]))
    remarks = ["branch: lookup's chain next to the tree; merged: the most likely nodes of both; see the script"]
    common.write(args, "curve", "", "Several drafts in one tree, tokens per step", rows, remarks)


def in_one_tree(args, m, tree: str, prompts: list[np.ndarray]) -> list[dict]:
    """Compare three ways to use lookup, with equal numbers of verified nodes in the last two."""
    alone, draft = m.drafter, m.params.draft
    merging = Several(alone, sources=Several(alone).sources[:1], branch_nodes=args.added)
    ways = {
        "heads": (alone, draft),
        "branch": (with_lookup(alone, args.added), draft),
        "merged": (merging, draft),
    }
    rows, texts = [], {}
    for name, (drafter, params) in ways.items():
        program = m.program(tree=tree, max_new_tokens=args.new_tokens, drafter=drafter)
        executor = FusedExecutor(m.model, Params(m.params.base, params), program)
        results = list(generate(executor, [ids.tolist() for ids in prompts], batch_size=min(8, len(prompts))))
        texts[name] = [result.output_ids for result in results]
        tau = sum(map(len, texts[name])) / sum(result.steps for result in results)
        mark = "" if texts[name] == texts["heads"] else "  OUTPUT DIFFERS"
        print(f"{tree:16} {name:8} {program.verified_nodes:3} nodes  τ {tau:.3f}{mark}", flush=True)
        rows.append(row(f"{tree}, {name}", "verified nodes", program.verified_nodes, tau))
    return rows


def loop(args, base, heads, tasks: list[np.ndarray]) -> list[dict]:
    """Return the tokens per step of each attempt, of all tasks together."""
    with_corpus = f"lookup-{args.added}+corpus-{CORPUS_NODES}+{heads}"
    drafts = {"with the corpus": with_corpus, "without": f"lookup-{args.added + CORPUS_NODES}+{heads}"}
    rows, texts = [], {}
    for name, draft in drafts.items():
        m = base.with_draft(draft)
        executor = m.executor(m.program(tree=presets.by_name(TREES[0]), max_new_tokens=args.new_tokens))
        for attempt in range(1, args.attempts + 1):
            asked = [[*base.tokenizer.encode(failure(attempt)), *task.tolist()] for task in tasks]
            results = list(generate(executor, asked))
            texts[name, attempt] = [result.output_ids for result in results]
            tau = sum(len(result.output_ids) for result in results) / sum(result.steps for result in results)
            print(f"attempt {attempt:2} {name:16} τ {tau:.2f}", flush=True)
            rows.append(row(f"loop {name}", "attempt", attempt, tau))
    first, second = drafts
    same = all(texts[first, attempt] == texts[second, attempt] for attempt in range(1, args.attempts + 1))
    changed = len({str(texts[first, attempt]) for attempt in range(1, args.attempts + 1)})
    print(f"texts with and without the corpus {'are equal' if same else 'DIFFER'}; {changed} different sets of answers")
    return rows


def row(name: str, over: str, at: int, tau: float) -> dict:
    return {"name": name, "over": over, "at": at, "tokens_per_step": tau}


def failure(attempt: int) -> str:
    """Return what an agent writes before it asks again."""
    return f"# Attempt {attempt}: line {17 * attempt % 89} failed with error {attempt * attempt + 3}, try again.\n"


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
