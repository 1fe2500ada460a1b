"""Float parameters of a base as a weight type stores them."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np

from hydrajax.models.init import abstract_base
from hydrajax.models.layout import leaf
from hydrajax.models.llama import Llama
from hydrajax.models.weights import Quantized


def quantized(node) -> bool:
    return isinstance(node, Quantized)


def in_few_bits(model: Llama, params: dict, factor: float = 1) -> dict:
    """Return float parameters with the kernels that ``model`` stores in few bits, times a factor, in its classes."""

    def stored(path, wanted):
        path = tuple(key.key for key in path)
        found = leaf(params, path)
        if not quantized(wanted):
            return found
        kernel, kind = np.asarray(found) * factor, type(wanted)
        if path[-2:-1] == ("experts",) and not path[-1].startswith("shared"):
            return jax.tree.map(lambda *parts: np.stack(parts), *map(kind.of, kernel))
        return kind.of(kernel.T / factor if path[-1] == "embedding" else kernel)

    return jax.tree.map_with_path(stored, nn.unbox(abstract_base(model)), is_leaf=quantized)
