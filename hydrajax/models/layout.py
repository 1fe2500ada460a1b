"""Key maps: the tensors of another program's files that make up each of our parameters.

A layout is a list of entries. It is declared once and serves both directions, so written files are read back bit for
bit. Layouts are declared in `hydrajax.families` (bases) and `hydrajax.formats` (draft heads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

Path = tuple[str, ...]  # keys of our nested dicts
Shape = tuple[int, ...]

MODEL = "model"  # transformers' name of a model's weights, also in shards or PyTorch files
ADAPTER = "adapter_model"  # PEFT's name of an adapter's weights


@runtime_checkable
class Readable(Protocol):
    """A source of tensors, such as `hydrajax.formats.tensors.TensorFiles`."""

    def read(self, name: str) -> np.ndarray:
        """Return one tensor by its name in the files."""


class Entry(NamedTuple):
    """Some of our parameters and the tensors they consist of.

    Attributes:
        ours: Paths of our parameters.
        theirs: Names and shapes of the tensors in the files.
        join: Builds our arrays: takes one array per name in ``theirs``, returns one per path in ``ours``.
        split: The inverse of ``join``.
        copies: Further names under which the files repeat the (single) tensor. Written, but not read.
    """

    ours: tuple[Path, ...]
    theirs: dict[str, Shape]
    join: Callable[..., tuple[np.ndarray, ...]]
    split: Callable[..., tuple[np.ndarray, ...]]
    copies: tuple[str, ...] = ()


Layout = list[Entry]


def same(path: Path, name: str, *shape: int, copies: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a tensor that equals one of our parameters."""
    return Entry((path,), {name: shape}, lambda x: (x,), lambda x: (x,), copies)


def transposed(path: Path, name: str, outputs: int, inputs: int, copies: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a torch ``Linear``: ``[outputs, inputs]``, ours are ``[inputs, outputs]``."""
    return Entry((path,), {name: (outputs, inputs)}, lambda x: (x.T,), lambda x: (x.T,), copies)


def zeros(path: Path, *shape: int) -> Entry:
    """Return the entry of a parameter that files do not hold: read as zeros, not written."""
    return Entry((path,), {}, lambda: (np.zeros(shape, np.float32),), lambda x: ())


def shapes(layout: Layout) -> dict[str, Shape]:
    """Return the name and shape of every tensor in the files."""
    found = {}
    for entry in layout:
        found |= entry.theirs
        for name in entry.copies:
            found[name] = next(iter(entry.theirs.values()))
    return found


def read(layout: Layout, files: Readable, put: Callable[[Path, np.ndarray], dict] | None = None) -> dict:
    """Read our nested parameters.

    Each is passed to ``put(path, array)`` as soon as it has been read, so the host need not hold them all. ``put``
    returns the values to keep by name; by default the array itself under the last name of its path.
    """
    tree: dict = {}
    for entry in layout:
        for path, array in zip(entry.ours, entry.join(*map(files.read, entry.theirs)), strict=True):
            at = tree
            for name in path[:-1]:
                at = at.setdefault(name, {})
            at |= put(path, array) if put else {path[-1]: array}
    return tree


def leaf(tree: Any, path: Path) -> Any:
    """Return the value at a path through nested dicts."""
    for name in path:
        tree = tree[name]
    return tree


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree in the order of `jax.tree.leaves`, by paths like
    ``opt_state.0.mu.head_0.kernel``.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def write(layout: Layout, params: Any) -> dict[str, np.ndarray]:
    """Return the tensors of the files, by name, from our parameters."""
    tensors = {}
    for entry in layout:
        parts = entry.split(*(np.asarray(leaf(params, path)) for path in entry.ours))
        tensors |= dict(zip(entry.theirs, parts, strict=True))
        tensors |= dict.fromkeys(entry.copies, parts[0])
    return tensors
