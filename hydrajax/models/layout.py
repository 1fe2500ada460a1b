"""Key maps: which tensors of another program's files make up each of our parameters.

A layout is a list of entries. It is declared once and serves both directions, so that what is written is read back bit
for bit. The layouts themselves are declared where a thing is known: those of the bases in `hydrajax.families`, those of
draft heads beside their drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

Path = tuple[str, ...]  # the names that lead to a leaf of our nested dicts
Shape = tuple[int, ...]

MODEL = "model"  # transformers' name for the file of a whole model's weights, which may also be shards or PyTorch files
ADAPTER = "adapter_model"  # PEFT's name for the file of an adapter's weights


@runtime_checkable
class Readable(Protocol):
    """Where the tensors of a layout are read from, such as `hydrajax.formats.tensors.TensorFiles`."""

    def read(self, name: str) -> np.ndarray:
        """One tensor by its name in the files."""


class Entry(NamedTuple):
    """Some of our parameters and the tensors that they are made of.

    ours:   the paths of our parameters.
    theirs: the names and shapes of the tensors in the files.
    join:   makes our arrays of theirs: it takes one array per name in ``theirs`` and returns one per path in ``ours``.
    split:  the inverse of ``join``.
    copies: further names under which the files hold the (single) tensor again. They are written, but not read.
    """

    ours: tuple[Path, ...]
    theirs: dict[str, Shape]
    join: Callable[..., tuple[np.ndarray, ...]]
    split: Callable[..., tuple[np.ndarray, ...]]
    copies: tuple[str, ...] = ()


Layout = list[Entry]


def same(path: Path, name: str, *shape: int, copies: tuple[str, ...] = ()) -> Entry:
    """A tensor that is one of our parameters as it stands."""
    return Entry((path,), {name: shape}, lambda x: (x,), lambda x: (x,), copies)


def transposed(path: Path, name: str, outputs: int, inputs: int, copies: tuple[str, ...] = ()) -> Entry:
    """The matrix of a torch ``Linear``, which is ``[outputs, inputs]`` where ours are ``[inputs, outputs]``."""
    return Entry((path,), {name: (outputs, inputs)}, lambda x: (x.T,), lambda x: (x.T,), copies)


def zeros(path: Path, *shape: int) -> Entry:
    """A parameter of ours that the files do not hold; it is read as zeros and not written."""
    return Entry((path,), {}, lambda: (np.zeros(shape, np.float32),), lambda x: ())


def shapes(layout: Layout) -> dict[str, Shape]:
    """The name and shape of every tensor in the files."""
    found = {}
    for entry in layout:
        found |= entry.theirs
        for name in entry.copies:
            found[name] = next(iter(entry.theirs.values()))
    return found


def read(layout: Layout, files: Readable, put: Callable[[Path, np.ndarray], dict] | None = None) -> dict:
    """Read our nested parameters.

    Each is handed to ``put(path, array)`` as soon as it has been read, so that the host need not hold them all. ``put``
    returns what to keep of it, by name; by default that is the array itself, under the last name of its path.
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
    """What lies at the end of a path through nested dicts."""
    for name in path:
        tree = tree[name]
    return tree


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree in the order of `jax.tree.leaves`, by paths such as ``opt_state.0.mu.head_0.kernel``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def write(layout: Layout, params: Any) -> dict[str, np.ndarray]:
    """Turn our parameters into the tensors of the files, by name."""
    tensors = {}
    for entry in layout:
        parts = entry.split(*(np.asarray(leaf(params, path)) for path in entry.ours))
        tensors |= dict(zip(entry.theirs, parts, strict=True))
        tensors |= dict.fromkeys(entry.copies, parts[0])
    return tensors
