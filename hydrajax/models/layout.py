"""Key maps: the tensors of another program's files that make up each of our parameters.

A layout is a list of entries. It is declared once and serves both directions, so written files are read back bit for
bit. Layouts are declared in `hydrajax.families` (bases) and `hydrajax.formats` (draft heads).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array

Path = tuple[str, ...]  # keys of our nested dicts
Shape = tuple[int, ...]
Index = tuple[slice, ...]  # along the first axes of an array

MODEL = "model"  # transformers' name of a model's weights, also in shards or PyTorch files
ADAPTER = "adapter_model"  # PEFT's name of an adapter's weights


@runtime_checkable
class Readable(Protocol):
    """A source of tensors, such as `hydrajax.formats.tensors.TensorFiles`."""

    def view(self, name: str) -> Array:
        """Return one tensor by its name in the files, which may be read only when it is copied."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """One of our parameters before it is read: ``parameter[index]`` and ``np.asarray(parameter)`` read and copy it.

    Joining views of tensors costs nothing. A slice of the parameter is joined from the same slice of each view, so a
    device's part is all that is read for it.

    Attributes:
        parts: views of tensors, of equal shape except along ``axis``; JAX arrays in `hydrajax.integrations.params`.
        axis: the axis along which the parts are concatenated.
        order: the axes of the concatenation in the order of ours; by default it stays as it is. The copy keeps the
            order of the file in memory, so that rows are copied and not single numbers.
        dtype: of the numbers that are read; None for the files' own.
    """

    parts: tuple[Array, ...]
    axis: int = 0
    order: tuple[int, ...] | None = None
    dtype: Any = None

    @property
    def shape(self) -> Shape:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape[axis] for axis in self._order)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def _order(self) -> tuple[int, ...]:
        return tuple(range(self.parts[0].ndim)) if self.order is None else self.order

    def astype(self, dtype: Any) -> Parameter:
        """Return the parameter that is converted when it is read."""
        return dataclasses.replace(self, dtype=dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        theirs = [slice(None)] * self.parts[0].ndim
        for axis, some in zip(self._order, index, strict=False):
            theirs[axis] = some
        joined = self.parts[0][tuple(theirs)]
        if len(self.parts) > 1:  # the axis of the parts is read whole: no mesh divides it
            some, theirs[self.axis] = theirs[self.axis], slice(None)
            joined = np.concatenate([part[tuple(theirs)] for part in self.parts], self.axis)
            joined = joined[(slice(None),) * self.axis + (some,)]
        # A view of a mapped file must be copied: JAX could use it in place, and the file may change.
        dtype = joined.dtype if self.dtype is None else self.dtype
        with np.errstate(over="ignore"):
            found = joined.transpose(self._order).astype(dtype, copy=len(self.parts) == 1)
        if found.dtype == np.float16 and joined.dtype != np.float16 and not np.isfinite(found).all():
            raise HydrajaxError("dtype: got a weight that float16 cannot hold, expected numbers up to 65,504")
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return (self if dtype is None else self.astype(dtype))[()]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Parameters of one shape side by side along a new first axis, such as those of experts. Slices are read alone."""

    parts: tuple[Parameter, ...]

    @property
    def shape(self) -> Shape:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def astype(self, dtype: Any) -> Stack:
        """Return the parameters that are converted when they are read."""
        return Stack(tuple(part.astype(dtype) for part in self.parts))

    def __getitem__(self, index: Index) -> np.ndarray:
        first, *rest = index or (slice(None),)
        wanted = self.parts[first]
        each = wanted[0][tuple(rest)]
        found = np.empty((len(wanted), *each.shape), each.dtype)
        for i, part in enumerate(wanted):
            found[i] = each if i == 0 else part[tuple(rest)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return (self if dtype is None else self.astype(dtype))[()]


class Entry(NamedTuple):
    """Some of our parameters and the tensors they consist of.

    Attributes:
        ours: Paths of our parameters.
        theirs: Names and shapes of the tensors in the files.
        join: Takes a view of each tensor in ``theirs``, returns a parameter for each path in ``ours``.
        split: The inverse of ``join``, on arrays.
        copies: Further names under which the files repeat the (single) tensor. Written, but not read.
    """

    ours: tuple[Path, ...]
    theirs: dict[str, Shape]
    join: Callable[..., tuple[Parameter | Stack, ...]]
    split: Callable[..., tuple[np.ndarray, ...]]
    copies: tuple[str, ...] = ()


Layout = list[Entry]


def same(path: Path, name: str, *shape: int, copies: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a tensor that equals one of our parameters."""
    return Entry((path,), {name: shape}, lambda x: (Parameter((x,)),), lambda x: (x,), copies)


def transposed(path: Path, name: str, outputs: int, inputs: int, copies: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a torch ``Linear``: ``[outputs, inputs]``, ours are ``[inputs, outputs]``."""
    return Entry((path,), {name: (outputs, inputs)}, lambda x: (Parameter((x.T,)),), lambda x: (x.T,), copies)


def zeros(path: Path, *shape: int) -> Entry:
    """Return the entry of a parameter that files do not hold: read as zeros, not written."""
    return Entry((path,), {}, lambda: (Parameter((np.zeros(shape, np.float32),)),), lambda x: ())


def shapes(layout: Layout) -> dict[str, Shape]:
    """Return the name and shape of every tensor in the files."""
    found = {}
    for entry in layout:
        found |= entry.theirs
        for name in entry.copies:
            found[name] = next(iter(entry.theirs.values()))
    return found


def read(
    layout: Layout,
    files: Readable,
    put: Callable[[Path, Parameter | Stack], Any] = lambda path, parameter: np.asarray(parameter),
    take: Callable[[Entry], Any] = lambda entry: None,
) -> dict:
    """Read our nested parameters.

    Each is passed to ``put(path, parameter)`` in turn, which reads what it needs of it, so the host need not hold them
    all. ``put`` returns what to keep, by default the whole array. ``take(entry)`` may return the value of an entry of
    one parameter itself; its tensors are then not viewed.
    """
    tree: dict = {}

    def keep(path: Path, value: Any) -> None:
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value

    for entry in layout:
        taken = take(entry)
        if taken is not None:
            keep(entry.ours[0], taken)
            continue
        for path, parameter in zip(entry.ours, entry.join(*map(files.view, entry.theirs)), strict=True):
            keep(path, put(path, parameter))
        del parameter  # before the next one is read
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
