"""Choose the fastest tree on this device (``--tree auto``); the choice may be to decode without a draft.

The fastest tree depends on the device, the batch size, the heads and the text. A few small trees are timed, and the
result is cached with its date in ``$XDG_CACHE_HOME/hydrajax/trees``, for calls without a tree too. A tree that
``hydrajax tree search --save`` found on this device is used as it is; one found elsewhere is one of the candidates.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import jax
import numpy as np

from hydrajax import processes
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, contest
from hydrajax.bench.contests.tree_search import name_of, usable
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, user_cache
from hydrajax.machine import machine
from hydrajax.text.records import BOOL, NUMBER, OBJECT, TEXT, checked, list_of, read_record
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.tree_json import content_of, read_tree, tree_from

CANDIDATES = ("chain-2", "chain-4", "cartesian-2x2")  # each costs a compilation
DYNAMIC = (60, 7, 10)  # N, D and K of EAGLE-2, for drafters that support dynamic trees
DYNAMIC_ON_CPU = (8, 2, 4)  # a CPU takes longer for more nodes than they save
BEST_FIRST = "best-16"  # for drafts of one pass
NEW_TOKENS = 48
ROUNDS = 6  # of one batch each: trees differ by less than texts, so more texts tell more than more timings of one
# Largest ratios of the ends of 95% intervals: of the speed without a draft, and of the speed-up, which depends on the
# texts too.
AGREEMENT = 1.15, 1.5
REMEMBERED = {"taken": BOOL, "name": TEXT, "speedup": NUMBER, "date": TEXT}
OFF = "HYDRAJAX_MEASURE_TREES"  # 0: neither measure trees nor use earlier measurements


@dataclass(frozen=True)
class FastestTree:
    """A measured choice.

    Attributes:
        tree: None if decoding without a draft is fastest.
        name, speedup: Of the fastest tree, even if it was not taken; relative to decoding without a draft.
        date: Of the measurement, in ISO format; None for just now.
    """

    tree: CandidateTree | None
    name: str
    speedup: float
    date: str | None

    def __str__(self) -> str:
        when = "measured just now" if self.date is None else f"measured on {self.date}"
        if self.tree is not None:
            return f"tree: {self.name}, {self.speedup:.2f}x the speed without a draft ({when}; name a tree to override)"
        return (
            f"tree: none, decoding without the draft: the fastest tree, {self.name}, has {self.speedup:.2f}x the speed "
            f"({when}; name a tree to draft anyway)"
        )


def choose(
    executor: Executor,
    prompts: Iterable[np.ndarray] | None,
    batch_size: int,
    draft_directory: Path | None = None,
    on_status: Callable[[str], None] = lambda text: None,
) -> FastestTree | None:
    """Return the fastest tree for a batch size on this device; measure it if it is not cached.

    Args:
        executor: gives the model, the drafter and the rule; its tree does not matter.
        prompts: token ids; the first ``ROUNDS * batch_size`` are decoded, again from the first if there are fewer.
            None to measure nothing.
        batch_size: sequences per batch.
        draft_directory: directory of the draft, in which ``hydrajax tree search --save`` may have written a tree.
        on_status: called with a line for every stage.

    Returns:
        None without a drafter, with ``HYDRAJAX_MEASURE_TREES=0``, without prompts and a cached choice, and if the
        rounds of the measurement disagree. Cache errors are ignored.
    """
    can = executor.spec.drafter.spec
    if not can.depth or (can.remembers and not can.branch_nodes):  # an empty corpus alone drafts nothing
        return None
    # Times, files and variables may differ between hosts; all decode with the same tree.
    agreed = partial(processes.agreed, executor.mesh)
    if agreed(lambda: os.environ.get(OFF) == "0"):
        return None
    found = agreed(lambda: _searched_here(executor, draft_directory, batch_size))
    if found is not None and _fits(executor, found.tree):
        return found
    if prompts is None and not agreed(cache_folder().is_dir):  # `_key` runs a program
        return None
    trees = _candidates(executor, agreed(lambda: presets.searched(draft_directory, batch_size)))
    path = cache_folder() / f"{_key(executor, trees, batch_size)}.json"
    found = agreed(lambda: _read(path))
    if found is None and prompts is not None:
        measured = _measure(executor, trees, prompts, batch_size, on_status)
        found = agreed(lambda: measured)
        if found is not None:
            _write(path, found)
    return found


def cache_folder() -> Path:
    return user_cache("trees")


def _searched_here(executor: Executor, draft_directory: Path | None, batch_size: int) -> FastestTree | None:
    """The tree that ``hydrajax tree search`` found on this device for this batch size."""
    if draft_directory is None or executor.spec.drafter.spec.branch_nodes:
        return None  # the searched tree is for the draft without the branch
    path = presets.searched_path(draft_directory, batch_size)
    if not path.is_file():
        return None
    tree = read_tree(path)  # raises for a damaged file
    name = name_of(tree)  # in the file
    try:
        found = read_record(path, {"provenance": OBJECT}, "tree")["provenance"]
        origin = checked(found, {"measured": list_of(OBJECT), "machine": OBJECT}, str(path))
        rows = [row for row in origin["measured"] if row.get("name") == name]
        row = checked(rows[0] if len(rows) == 1 else None, {"speedup": NUMBER}, str(path))
    except HydrajaxError:
        return None  # without a measurement
    here = machine()
    if any(origin["machine"].get(fact) != here[fact] for fact in ("device", "cores")):
        return None  # measured elsewhere
    date = origin.get("date")
    return FastestTree(tree, _searched_name(tree), row["speedup"], date if isinstance(date, str) else None)


def _measure(
    executor: Executor, trees: Mapping[str, CandidateTree], prompts, batch_size: int, on_status
) -> FastestTree | None:
    """Time the candidates and decoding without a draft; return None without prompts or if the rounds disagree.

    Typical acceptance gives other text without a draft, so there a tree is chosen even if it is slower.
    """
    plain = executor.with_spec(max_new_tokens=NEW_TOKENS).autoregressive()
    if not (texts := list(islice(prompts, ROUNDS * batch_size))):
        return None
    rows = contest(
        {AUTOREGRESSIVE: plain}
        | {name: executor.with_spec(tree=tree, max_new_tokens=NEW_TOKENS) for name, tree in trees.items()},
        list(islice(cycle(texts), ROUNDS * batch_size)),
        batch_size=batch_size,
        repeats=ROUNDS,
        divided=True,
        on_status=lambda text: on_status(f"finding the fastest tree: {text}"),
    )
    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    rule = executor.spec.rule
    remembers = executor.spec.drafter.spec.remembers  # the corpus was empty
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
    can = executor.spec.drafter.spec
    default = presets.by_name(can.default_tree)
    trees = {} if searched is None else {_searched_name(searched): searched}
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
        if tree not in found.values() and _fits(executor, tree):
            found[name] = tree
    if not found:
        executor.spec.replace(tree=default).check(executor.model.config)  # raises
    return found


def _searched_name(tree: CandidateTree) -> str:
    return f"the searched {tree.name}" if isinstance(tree, DynamicTree) else f"the searched one of {tree.size} nodes"


def _fits(executor: Executor, tree: CandidateTree) -> bool:
    try:
        executor.spec.replace(tree=tree).check(executor.model.config)
    except HydrajaxError:
        return False
    return True


def _key(executor: Executor, trees: Mapping[str, CandidateTree], batch_size: int) -> str:
    """Hash of everything that the choice depends on, with a few numbers of each parameter."""
    here, spec = machine(), executor.spec
    facts = (
        AGREEMENT, *here.values(), batch_size, type(spec.rule).__name__, executor.mesh and dict(executor.mesh.shape),
        str(executor.model), str(spec.drafter), {name: content_of(tree) for name, tree in trees.items()},
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    leaves = jax.tree.leaves(executor.params)
    beginnings = jax.jit(lambda leaves: [leaf[(0,) * (leaf.ndim - 1)][:16] for leaf in leaves])(leaves)
    for leaf, beginning in zip(leaves, processes.fetch(beginnings), strict=True):
        digest.update(repr((leaf.shape, leaf.dtype)).encode() + beginning.tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path) -> FastestTree | None:
    try:
        content = read_record(path, REMEMBERED, "cache")
        tree = tree_from(content.get("tree"), str(path)) if content["taken"] else None
    except HydrajaxError:
        return None
    return FastestTree(tree, content["name"], content["speedup"], content["date"])


def _write(path: Path, choice: FastestTree) -> None:
    content = {
        "tree": None if choice.tree is None else content_of(choice.tree),
        "taken": choice.tree is not None, "name": choice.name, "speedup": choice.speedup,
        "date": datetime.date.today().isoformat(), "machine": machine(),
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with WholeFile(path, "cache") as file:
            file.write_json(content)
    except (OSError, HydrajaxError):
        pass  # measured again next time
