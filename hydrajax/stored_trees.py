"""Read and write the fastest tree that was measured on this device (`LanguageModel.autotune`).

A choice is stored with its date in ``$XDG_CACHE_HOME/hydrajax/trees``, for one base, draft, rule, batch size and
device. Without one, a tree that ``hydrajax tree search --save`` measured on this device is the choice.
"""

import datetime
import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from hydrajax import processes
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, user_cache
from hydrajax.machine import machine
from hydrajax.text.records import BOOL, NUMBER, OBJECT, TEXT, checked, list_of, read_record
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.tree_json import content_of, read_tree, tree_from

STORED = {"taken": BOOL, "name": TEXT, "speedup": NUMBER, "date": TEXT}
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


def stored(executor: Executor, batch_size: int, draft_directory: Path | None = None) -> FastestTree | None:
    """Return the fastest tree of earlier measurements on this device, without compiling if there are none.

    Args:
        draft_directory: directory of the draft, in which ``hydrajax tree search --save`` may have written a tree.

    Returns:
        None if nothing is stored, without a drafter, and with ``HYDRAJAX_MEASURE_TREES=0``.
    """
    if not measurable(executor):
        return None
    agreed = partial(processes.agreed, executor.mesh)
    if agreed(cache_folder().is_dir):  # `_path` compiles
        path = _path(executor, batch_size, draft_directory)
        if (found := agreed(lambda: _read(path))) is not None:
            return found
    found = agreed(lambda: _searched_here(executor, draft_directory, batch_size))
    return found if found is not None and fits(executor, found.tree) else None


def store(executor: Executor, batch_size: int, draft_directory: Path | None, choice: FastestTree) -> None:
    """Store a choice for later calls of `stored`. A file that cannot be written is ignored."""
    _write(_path(executor, batch_size, draft_directory), choice)


def measurable(executor: Executor) -> bool:
    """Return whether trees may be measured: there is a drafter, and ``HYDRAJAX_MEASURE_TREES`` is not 0."""
    can = executor.program.drafter.spec
    if not can.depth or (can.remembers and not can.branch_nodes):  # an empty corpus alone drafts nothing
        return False
    # Times, files and variables may differ between hosts; all decode with the same tree.
    return not processes.agreed(executor.mesh, lambda: os.environ.get(OFF) == "0")


def fits(executor: Executor, tree: CandidateTree | None) -> bool:
    """Return whether the executor's model, drafter and rule support a tree."""
    try:
        executor.program.replace(tree=tree).check(executor.model.config)
    except HydrajaxError:
        return False
    return True


def searched_name(tree: CandidateTree) -> str:
    """Return the name of a tree of ``hydrajax tree search`` in a choice."""
    return f"the searched {tree.name}" if isinstance(tree, DynamicTree) else f"the searched one of {tree.size} nodes"


def cache_folder() -> Path:
    """Return the folder of the stored choices."""
    return user_cache("trees")


def _searched_here(executor: Executor, draft_directory: Path | None, batch_size: int) -> FastestTree | None:
    """The tree that ``hydrajax tree search`` found on this device for this batch size."""
    if draft_directory is None or executor.program.drafter.spec.branch_nodes:
        return None  # the searched tree is for the draft without the branch
    path = presets.searched_path(draft_directory, batch_size, presets.searched_weights(executor.model.quantize))
    if not path.is_file():
        return None
    tree = read_tree(path)  # raises for a damaged file
    name = tree.name if isinstance(tree, DynamicTree) else str(tree.size)  # in the file
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
    return FastestTree(tree, searched_name(tree), row["speedup"], date if isinstance(date, str) else None)


def searched_tree(executor: Executor, batch_size: int, draft_directory: Path | None) -> CandidateTree | None:
    """Return the tree that comes with the draft: for this kind of base (`presets.special_base`), else for any."""
    read, model = partial(presets.searched, draft_directory, batch_size), executor.model
    special = presets.special_base(model.quantize, model.dtype, executor.program.drafter.spec.branch_nodes)
    return processes.agreed(executor.mesh, lambda: read(special) or read())


def _path(executor: Executor, batch_size: int, draft_directory: Path | None) -> Path:
    """Return the file of a choice, named by a hash of everything it depends on and a few numbers of each parameter."""
    here, program = machine(), executor.program
    searched = searched_tree(executor, batch_size, draft_directory)
    facts = (
        *here.values(), batch_size, program.rule.__name__, executor.mesh and dict(executor.mesh.shape),
        str(executor.model), str(program.drafter), searched and content_of(searched),
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    leaves = jax.tree.leaves(executor.params)
    beginnings = jax.jit(lambda leaves: [leaf[(0,) * (leaf.ndim - 1)][:16] for leaf in leaves])(leaves)
    for leaf, beginning in zip(leaves, processes.fetch(beginnings), strict=True):
        digest.update(repr((leaf.shape, leaf.dtype)).encode() + beginning.tobytes())
    return cache_folder() / f"{digest.hexdigest()[:32]}.json"


def _read(path: Path) -> FastestTree | None:
    try:
        content = read_record(path, STORED, "cache")
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
