"""Find the fastest tree on this device, for `LanguageModel.autotune` and ``--tree auto``.

The fastest tree depends on the device, the batch size, the draft and the text. A few small trees are timed against
decoding without a draft, which may be the fastest.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, islice
from pathlib import Path

import jax
import numpy as np

from hydrajax import processes
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, contest
from hydrajax.bench.contests.tree_search import usable
from hydrajax.decoding.executor import Executor
from hydrajax.stored_trees import FastestTree, fits, measurable, searched_name, searched_tree, store
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

CANDIDATES = ("chain-2", "chain-4", "cartesian-2x2")  # each costs a compilation
DYNAMIC = (60, 7, 10)  # N, D and K of EAGLE-2, for drafters that support dynamic trees
DYNAMIC_ON_CPU = (8, 2, 4)  # a CPU takes longer for more nodes than they save
BEST_FIRST = "best-16"  # for drafts of one pass
NEW_TOKENS = 48
ROUNDS = 6  # of one batch each: trees differ by less than texts, so more texts tell more than more timings of one
# Largest ratios of the ends of 95% intervals: of the speed without a draft, and of the speed-up, which depends on the
# texts too.
AGREEMENT = 1.15, 1.5


def measure(
    executor: Executor,
    prompts: Iterable[np.ndarray],
    batch_size: int,
    draft_directory: Path | None = None,
    on_status: Callable[[str], None] = lambda text: None,
) -> FastestTree | None:
    """Time a few trees and store the fastest for `hydrajax.stored_trees.stored`.

    Args:
        executor: gives the model, the drafter and the rule; its tree does not matter.
        prompts: token ids; the first ``ROUNDS * batch_size`` are decoded, again from the first if there are fewer.
        draft_directory: directory of the draft; a tree searched elsewhere is one of the candidates.

    Returns:
        None without a drafter, with ``HYDRAJAX_MEASURE_TREES=0``, without prompts, and if the rounds disagree.
    """
    if not measurable(executor):
        return None
    searched = searched_tree(executor, batch_size, draft_directory)
    measured = _fastest(executor, _candidates(executor, searched), prompts, batch_size, on_status)
    found = processes.agreed(executor.mesh, lambda: measured)  # times differ between hosts
    if found is not None:
        store(executor, batch_size, draft_directory, found)
    return found


def _fastest(
    executor: Executor, trees: Mapping[str, CandidateTree], prompts, batch_size: int, on_status
) -> FastestTree | None:
    """Time the candidates and decoding without a draft; return None without prompts or if the rounds disagree.

    Typical acceptance gives other text without a draft, so there a tree is chosen even if it is slower.
    """
    plain = executor.with_program(max_new_tokens=NEW_TOKENS).autoregressive()
    if not (texts := list(islice(prompts, ROUNDS * batch_size))):
        return None
    rows = contest(
        {AUTOREGRESSIVE: plain}
        | {name: executor.with_program(tree=tree, max_new_tokens=NEW_TOKENS) for name, tree in trees.items()},
        list(islice(cycle(texts), ROUNDS * batch_size)),
        batch_size=batch_size,
        repeats=ROUNDS,
        divided=True,
        on_status=lambda text: on_status(f"finding the fastest tree: {text}"),
    )
    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    rule = executor.request.rule
    remembers = executor.program.drafter.spec.remembers  # the corpus was empty
    taken = best.speedup >= 1 or remembers or type(rule.baseline()) is not type(rule)
    low, high = best.speedup_low or 0.0, best.speedup_high or 0.0
    if (rows[0].high or 0.0) > AGREEMENT[0] * (rows[0].low or 0.0) or high > AGREEMENT[1] * low:
        print(f"tree: the draft's own, as timings disagree ({best.name}: {low:.2f}x to {high:.2f}x)", file=sys.stderr)
        return None
    return FastestTree(trees[best.name] if taken else None, best.name, best.speedup, None)


def _candidates(executor: Executor, searched: CandidateTree | None) -> dict[str, CandidateTree]:
    """Return the trees to time: one searched elsewhere, the drafter's default, and a few that suit many drafters.

    Raises `HydrajaxError` if none can be used.
    """
    can = executor.program.drafter.spec
    default = presets.by_name(can.default_tree)
    trees = {} if searched is None else {searched_name(searched): searched}
    trees |= {name: presets.by_name(name) for name in CANDIDATES}
    if can.one_pass:
        trees[BEST_FIRST] = presets.by_name(BEST_FIRST)
    elif can.supports_dynamic_tree:
        size, expansions, top_k = DYNAMIC_ON_CPU if jax.default_backend() == "cpu" else DYNAMIC
        grown = usable(size, min(expansions, can.depth - 1), top_k)
        trees[grown.name] = grown
    trees[can.default_tree] = default
    found: dict[str, CandidateTree] = {}
    for name, tree in trees.items():
        if tree not in found.values() and fits(executor, tree):
            found[name] = tree
    if not found:
        executor.program.replace(tree=default).check(executor.model.config)  # raises
    return found
