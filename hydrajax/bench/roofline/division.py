"""Shard a model over the devices of a mesh that need not exist, by the rules of `hydrajax.sharding`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh

from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import AXES, check_divides, sharding


@dataclass(frozen=True)
class Division:
    """Sizes of a mesh: ``data`` groups share the sequences of a batch, the ``model`` devices of a group the weights."""

    data: int = 1
    model: int = 1

    @property
    def mesh(self) -> AbstractMesh:
        return AbstractMesh((self.data, self.model), **AXES)

    def check(self, config: LlamaConfig) -> None:
        """Raise `HydrajaxError` if the devices cannot share the base's attention heads evenly."""
        check_divides(self.mesh, config)

    def rows(self, batch: int) -> int:
        """Return the sequences of a device: a batch that the groups do not divide evenly is replicated."""
        return batch if batch % self.data else batch // self.data

    def axes(self, boxed: Any) -> list[int | None]:
        """Return the sharded axis of every array, in the order of the pytree's leaves; None for a replicated one."""
        return [_divided(spec) for _, spec in self._leaves(boxed)]

    def nbytes(self, boxed: Any) -> int:
        """Return a device's bytes of arrays that are boxed with their logical axes; others are copied."""
        sizes = ((x.size * x.dtype.itemsize, _divided(spec)) for x, spec in self._leaves(boxed))
        return sum(size if axis is None else size // self.model for size, axis in sizes)

    def all_reduce(self, size: float) -> float:
        """Return the bytes that a device sends to sum ``size`` bytes in a ring: each part goes round twice."""
        return 2 * size * (self.model - 1) / self.model

    def all_gather(self, size: float) -> float:
        """Return the bytes that a device sends to join parts to ``size`` bytes in a ring."""
        return size * (self.model - 1) / self.model

    def _leaves(self, boxed: Any) -> Iterator[tuple[Any, tuple]]:
        mesh = self.mesh
        for leaf in jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)):
            x, names = (leaf.value, leaf.names) if isinstance(leaf, nn.LogicallyPartitioned) else (leaf, None)
            yield x, tuple(sharding(mesh, x.shape, names).spec)


def _divided(spec: tuple) -> int | None:
    return spec.index("model") if "model" in spec else None


ONE_DEVICE = Division()
