"""The tree to decode with where the user names none: the fastest that was measured on this device, which may be none.

What is fastest depends on the device, the number of rows, the heads and how well they know the text. So a few small
trees are tried at the first use and the result is kept, with its date, in a cache of this device's
(``$XDG_CACHE_HOME/hydrajax/trees``). A tree that ``hydrajax tree search --save`` has found here is taken as it is.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from hydrajax.autotune.contest import AUTOREGRESSIVE, contest
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.machine import machine
from hydrajax.text.records import BOOL, NUMBER, OBJECT, TEXT, checked, list_of, read_record
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.tree_json import content_of, read_tree, tree_from

CANDIDATES = ("chain-2", "chain-4", "cartesian-2x2")  # beside the drafter's own; each costs a compilation
GROWN = "dynamic-60-7-10"  # where the drafter can grow trees: the numbers of EAGLE-2
NEW_TOKENS, REPEATS = 48, 3
REMEMBERED = {"taken": BOOL, "name": TEXT, "speedup": NUMBER, "date": TEXT}
OFF = "HYDRAJAX_MEASURE_TREES"  # set to 0: take the drafter's own tree and measure nothing


@dataclass(frozen=True)
class Choice:
    """A tree, None where decoding without a draft is the fastest, and why.

    name: of the fastest tree, taken or not. speedup: of that tree against decoding without a draft. date: when it was
    measured, in ISO format; None for just now.
    """

    tree: CandidateTree | None
    name: str
    speedup: float
    date: str | None

    def __str__(self) -> str:
        when = "measured just now" if self.date is None else f"measured on {self.date}"
        if self.tree is not None:
            return (
                f"tree: {self.name}, {self.speedup:.2f} times the speed without a draft here ({when}; or name a tree)"
            )
        return (
            f"tree: none, decoding without the draft: the fastest tree, {self.name}, has {self.speedup:.2f} times the "
            f"speed here ({when}; name a tree to draft all the same)"
        )


def choose(
    executor: Executor,
    prompts: Iterable[np.ndarray],
    batch_size: int,
    draft_directory: Path | None = None,
    on_status: Callable[[str], None] = lambda text: None,
) -> Choice | None:
    """Return the fastest tree for so many sequences on this device, measured on the first prompts if not known yet.

    Args:
        executor: of any tree; its drafter and rule count.
        prompts: token ids, of which twice the batch size are decoded.
        batch_size: sequences that are decoded together.
        draft_directory: where the heads were loaded from, and `hydrajax tree search --save` may have left a tree.
        on_status: called with a line for every stage.

    Returns:
        None where there is nothing to choose: without a drafter, and where the environment has
        ``HYDRAJAX_MEASURE_TREES=0``. Errors of the cache are ignored.
    """
    if not executor.spec.drafter.spec.depth or os.environ.get(OFF) == "0":
        return None
    found = _searched_here(executor, draft_directory, batch_size)
    if found is not None and _fits(executor, found.tree):
        return found
    path = cache_folder() / f"{_key(executor, batch_size)}.json"
    found = _read(path)
    if found is None:
        found = _measure(executor, prompts, batch_size, on_status)
        _write(path, found)
    return found


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydrajax" / "trees"


def _searched_here(executor: Executor, draft_directory: Path | None, batch_size: int) -> Choice | None:
    """The tree that `hydrajax tree search` has found for so many rows, if it was on this device."""
    if draft_directory is None or executor.spec.drafter.spec.branch_nodes:
        return None  # what was searched there is for the draft without the branch
    path = presets.searched_path(draft_directory, batch_size)
    if not path.is_file():
        return None
    tree = read_tree(path)  # refuses a file that is no tree
    grown = isinstance(tree, DynamicTree)
    name = tree.name if grown else str(tree.size)  # as the search calls it
    try:
        found = read_record(path, {"provenance": OBJECT}, "tree")["provenance"]
        origin = checked(found, {"measured": list_of(OBJECT), "machine": OBJECT}, str(path))
        rows = [row for row in origin["measured"] if row.get("name") == name]
        row = checked(rows[0] if len(rows) == 1 else None, {"speedup": NUMBER}, str(path))
    except HydrajaxError:
        return None  # written by hand
    here = machine()
    if any(origin["machine"].get(fact) != here[fact] for fact in ("device", "cores")):
        return None  # measured elsewhere
    shown, date = f"the searched {name}" if grown else f"the searched one of {name} nodes", origin.get("date")
    return Choice(tree, shown, row["speedup"], date if isinstance(date, str) else None)


def _measure(executor: Executor, prompts, batch_size: int, on_status) -> Choice:
    """A contest of the candidates, the drafter's own tree and none. Typical acceptance means another text without a
    draft, so there the fastest tree is taken in any case."""
    can, rule = executor.spec.drafter.spec, executor.spec.rule
    candidates = [*CANDIDATES, *([GROWN] if can.supports_dynamic_tree else []), can.default_tree]
    trees = {name: presets.by_name(name) for name in dict.fromkeys(candidates)}
    entrants = {
        name: executor.with_spec(tree=tree, max_new_tokens=NEW_TOKENS)
        for name, tree in trees.items()
        if _fits(executor, tree)
    }
    if not entrants:
        executor.spec.replace(tree=trees[can.default_tree]).check(executor.model.config)  # raises: it does not fit
    plain = executor.with_spec(max_new_tokens=NEW_TOKENS).autoregressive()
    rows = contest(
        {AUTOREGRESSIVE: plain} | entrants,
        list(islice(prompts, 2 * batch_size)),
        batch_size=batch_size,
        repeats=REPEATS,
        on_status=lambda text: on_status(f"finding the fastest tree: {text}"),
    )
    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    taken = best.speedup >= 1 or type(rule.baseline()) is not type(rule)
    return Choice(trees[best.name] if taken else None, best.name, best.speedup, None)


def _fits(executor: Executor, tree: CandidateTree) -> bool:
    try:
        executor.spec.replace(tree=tree).check(executor.model.config)
    except HydrajaxError:
        return False
    return True


def _key(executor: Executor, batch_size: int) -> str:
    """A hash of all that the choice depends on; of the parameters a few numbers each."""
    here, spec = machine(), executor.spec
    facts = (
        *here.values(), batch_size, type(spec.rule).__name__,
        str(executor.model), str(spec.drafter), CANDIDATES, GROWN,
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    leaves = jax.tree.leaves(executor.params)
    beginnings = jax.jit(lambda leaves: [leaf[(0,) * (leaf.ndim - 1)][:16] for leaf in leaves])(leaves)
    for leaf, beginning in zip(leaves, jax.device_get(beginnings), strict=True):
        digest.update(repr((leaf.shape, leaf.dtype)).encode() + beginning.tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path) -> Choice | None:
    try:
        content = read_record(path, REMEMBERED, "cache")
        tree = tree_from(content.get("tree"), str(path)) if content["taken"] else None
    except HydrajaxError:
        return None
    return Choice(tree, content["name"], content["speedup"], content["date"])


def _write(path: Path, choice: Choice) -> None:
    content = {
        "tree": None if choice.tree is None else content_of(choice.tree),
        "taken": choice.tree is not None, "name": choice.name, "speedup": choice.speedup,
        "date": datetime.date.today().isoformat(), "machine": machine(),
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with WholeFile(path, "cache") as file:
            file.write_text(json.dumps(content, indent=1) + "\n")
    except (OSError, HydrajaxError):
        pass  # measured again next time
