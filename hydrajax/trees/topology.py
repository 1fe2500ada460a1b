"""The arrays of a tree that the decode step reads.

A static tree (`hydrajax.trees.static_tree.TreeTopology`) gives NumPy constants, the same for all sequences, which XLA
folds into the program. A tree that is built on the device gives jax arrays with a leading batch axis, one tree per
sequence with the same number of nodes. `take` and `Topology.at` read either kind, so the step and the rules exist once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Int

from hydrajax.models.arrays import Array


class Topology(NamedTuple):
    """A tree of N nodes and depth K, or one per sequence. Node 0 is the root; a parent precedes its children.

    Attributes:
        parents: int32 ``[*B, N]``, -1 for the root and for a node that can never be accepted (such as a node of a
            lookahead window).
        depths: int32 ``[*B, N]`` offset of each node's position from the root's.
        mask: bool ``[*B, N, N]`` whether node i attends to node j during verification; a node that can be accepted
            attends to itself and its ancestors only.
        paths: int32 ``[*B, N, K+1]`` nodes from the root to each node, which repeats beyond its depth.
        children: int32 ``[*B, N, C]`` children of each node in the order of their ranks or draws, then -1.
        inner: int32 ``[*B, P]`` the nodes that may have children.
        parent_slot: int32 ``[*B, N]`` index into ``inner`` of each node's parent; 0 without a parent.
    """

    parents: Int[Array, "*B N"]
    depths: Int[Array, "*B N"]
    mask: Bool[Array, "*B N N"]
    paths: Int[Array, "*B N path"]
    children: Int[Array, "*B N C"]
    inner: Int[Array, "*B P"]
    parent_slot: Int[Array, "*B N"]

    @property
    def size(self) -> int:
        return self.parents.shape[-1]

    @property
    def depth(self) -> int:
        return self.paths.shape[-1] - 1

    @property
    def of_each_row(self) -> bool:
        """True if every sequence has its own tree."""
        return self.parents.ndim == 2

    @property
    def attention_mask(self) -> Bool[Array, "..."]:
        """``mask`` in the form of `hydrajax.models.attention.attend`."""
        return self.mask[:, None, None] if self.of_each_row else self.mask

    def at(self, array: Array, node: Int[Array, " B"]) -> Array:
        """Return an array's value at one node per sequence: ``array[b, node[b]]``, or ``array[node[b]]`` of one
        tree.
        """
        return at_rows(array, node) if self.of_each_row else jnp.asarray(array)[node]


def at_rows(array: Array, index: Int[Array, " B"]) -> Array:
    """Return ``array[b, index[b]]`` for every b."""
    return array[jnp.arange(len(index)), index]


def take(values: Array, nodes: Int[Array, "*B n"]) -> Array:
    """Return ``values[b, nodes[n]]``, or ``values[b, nodes[b, n]]`` with nodes per sequence; values ``[B, N, ...]``."""
    if nodes.ndim == 1:
        return values[:, nodes]
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *(1,) * (values.ndim - 2)), axis=1)
