"""Topologies that are built on the device, one tree per sequence (`hydrajax.trees.topology`)."""

import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.models.arrays import Array
from hydrajax.trees.topology import Topology, at_rows

NDIMS = Topology(1, 1, 2, 2, 2, 1, 1)  # axes of each array for one tree


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
