"""Random and abstract parameters of base models."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.ops import trace


def init_boxed(model: BaseModel, rng: Array):
    """Return random parameters with their logical axes (`flax.core.meta` boxes)."""
    position = jnp.zeros((1, 1), jnp.int32)
    return model.init(rng, position, position, np.ones((1, 1), bool))["params"]


def init_base(model: BaseModel, rng: Array) -> dict:
    """Return random base parameters (normal, std 0.02) as a nested dict of arrays."""
    return nn.unbox(init_boxed(model, rng))


def abstract_base(model: BaseModel) -> dict:
    """Return boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the base, without allocation.

    All layers of the same `LayerKind.parameters` are alike, so only one of them is traced, once per model and platform.
    """
    c, found, layers = model.config, {}, {}
    if not c.separable:
        return dict(_abstract(model, trace.platform(), trace.has_few_bits()))
    for kind in {kind.parameters: kind for kind in reversed(c.kinds)}.values():  # of each the first one
        one = c.replace(n_layers=1) if kind == c.kinds[0] else c.of_kind(kind).replace(n_layers=1)
        found = dict(_abstract(model.clone(config=one), trace.platform(), trace.has_few_bits()))
        layers[kind.parameters] = found.pop("layers_0")
    return found | {f"layers_{i}": layers[kind.parameters] for i, kind in enumerate(c.kinds)}


@functools.lru_cache(maxsize=64)
def _abstract(model: BaseModel, traced_for: trace.Platform, in_tiles: bool) -> dict:
    """Return the shapes of a model, by tracing it. The platform decides how quantised weights are stored."""
    return jax.eval_shape(lambda rng: init_boxed(model, rng), jax.random.key(0))
