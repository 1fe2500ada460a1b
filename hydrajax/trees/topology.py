"""The arrays of a tree that the decode step reads.

A static tree (`hydrajax.trees.static_tree.TreeTopology`) gives NumPy constants, the same for all sequences, which XLA
folds into the program. A tree that is built on the device gives jax arrays with a leading batch axis, one tree per
sequence with the same number of nodes. `take` and `Topology.at` read either kind, so the step and the rules exist once.
"""

from __future__ import annotations

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


NDIMS = Topology(1, 1, 2, 2, 2, 1, 1)  # axes of each array for one tree


def at_rows(array: Array, index: Int[Array, " B"]) -> Array:
    """Return ``array[b, index[b]]`` for every b."""
    return array[jnp.arange(len(index)), index]


def take(values: Array, nodes: Int[Array, "*B n"]) -> Array:
    """Return ``values[b, nodes[n]]``, or ``values[b, nodes[b, n]]`` with nodes per sequence; values ``[B, N, ...]``."""
    if nodes.ndim == 1:
        return values[:, nodes]
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *(1,) * (values.ndim - 2)), axis=1)


def from_parents(parents: Int[Array, "B N"], depth: int, most_children: int) -> Topology:
    """Build the trees with these parents, on the device.

    Args:
        parents: int32 ``[B, N]``; a parent precedes its children.
        depth: K, the maximum length of a path.
        most_children: C, the maximum number of children. The program is compiled before the shape is known, so
            ``inner`` lists every node.
    """
    n_nodes = parents.shape[1]
    nodes = jnp.arange(n_nodes, dtype=jnp.int32)
    is_child = parents[:, :, None] == nodes  # [B, child, parent]
    mask = is_child | jnp.eye(n_nodes, dtype=bool)
    reached = 1
    while reached < depth:  # each matmul doubles the length of the paths
        mask = jnp.einsum("bij,bjk->bik", mask.astype(jnp.float32), mask.astype(jnp.float32)) > 0
        reached *= 2
    depths = jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1
    # Each of these reductions selects at most one node; on a CPU a maximum is several times as fast as argmax.
    wanted = jnp.minimum(jnp.arange(depth + 1), depths[:, :, None])  # [B, N, K+1]: the depth of each position of a path
    on_path = mask[:, :, None, :] & (depths[:, None, None, :] == wanted[..., None])
    paths = jnp.max(jnp.where(on_path, nodes, 0), axis=-1)
    earlier = jnp.tri(n_nodes, k=-1, dtype=bool) & (parents[:, :, None] == parents[:, None])  # [B, child, sibling]
    place = jnp.sum(earlier, axis=2, dtype=jnp.int32)
    is_nth = is_child[:, :, :, None] & (place[:, :, None, None] == jnp.arange(most_children))  # [B, child, parent, C]
    children = jnp.max(jnp.where(is_nth, nodes[:, None, None], -1), axis=1)
    inner = jnp.broadcast_to(nodes, parents.shape)
    return Topology(parents, depths, mask, paths, children, inner, jnp.maximum(parents, 0))


def with_chain(tree: Topology, at: Int[Array, " B"], length: int) -> Topology:
    """Append a chain of ``length`` nodes below node ``at`` of each tree.

    Cheaper than `from_parents` because the relations of the tree's own nodes are known. Paths become ``length`` longer,
    also if the chain begins at the root.
    """
    batch, size = len(at), tree.size
    own = Topology(*(jnp.broadcast_to(x, (batch, *x.shape[-ndim:])) for x, ndim in zip(tree, NDIMS, strict=True)))
    chain = jnp.arange(size, size + length, dtype=jnp.int32)
    above = jnp.concatenate([at[:, None], jnp.broadcast_to(chain[:-1], (batch, length - 1))], axis=1)
    depth, line = at_rows(own.depths, at)[:, None, None], at_rows(own.paths, at)
    sees = jnp.broadcast_to(at_rows(own.mask, at)[:, None], (batch, length, size))
    itself = jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
    # A path of the chain leads to its first node's parent, then along the chain to the node, which repeats.
    place, node = jnp.arange(tree.depth + length + 1), jnp.arange(length)[:, None]
    line = jnp.pad(line, ((0, 0), (0, length)), mode="edge")[:, None]
    paths = jnp.where(place <= depth, line, size + jnp.minimum(place - depth - 1, node))
    # The first node is the last child of ``at``; each other node is the only child of the one before.
    n_children = jnp.sum(own.children >= 0, axis=2, keepdims=True)
    is_new = (jnp.arange(size) == at[:, None])[:, :, None] & (jnp.arange(own.children.shape[2] + 1) == n_children)
    children = jnp.where(is_new, size, jnp.pad(own.children, ((0, 0), (0, 0), (0, 1)), constant_values=-1))
    below = jnp.full((batch, length, children.shape[2]), -1, jnp.int32).at[:, :-1, 0].set(chain[1:])
    slots = jnp.arange(own.inner.shape[1], own.inner.shape[1] + length, dtype=jnp.int32)
    return Topology(
        parents=jnp.concatenate([own.parents, above], axis=1),
        depths=jnp.concatenate([own.depths, depth[:, 0] + 1 + jnp.arange(length, dtype=jnp.int32)], axis=1),
        mask=jnp.concatenate(
            [jnp.pad(own.mask, ((0, 0), (0, 0), (0, length))), jnp.concatenate([sees, itself], axis=2)], axis=1
        ),
        paths=jnp.concatenate(
            [jnp.pad(own.paths, ((0, 0), (0, 0), (0, length)), mode="edge"), paths.astype(jnp.int32)], axis=1
        ),
        children=jnp.concatenate([children, below], axis=1).astype(jnp.int32),
        inner=jnp.concatenate([own.inner, above], axis=1),
        parent_slot=jnp.concatenate([own.parent_slot, jnp.broadcast_to(slots, (batch, length))], axis=1),
    )
