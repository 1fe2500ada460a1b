"""Models of a published shape with random weights, for measuring speed where no checkpoint is at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hydrajax.decoding.state import Params
from hydrajax.drafters.registry import KINDS
from hydrajax.models.base import BaseModel, BoundBase, init_base
from hydrajax.models.config import PRESETS, LlamaConfig
from hydrajax.models.llama import Llama


def random_base(config: LlamaConfig, dtype=jnp.float32, seed: int = 0):
    """``(model, base_params)`` of this shape, made on the device."""
    model = Llama(config, jnp.dtype(dtype))
    return model, jax.jit(lambda rng: init_base(model, rng))(jax.random.key(seed))


def random_draft(model: BaseModel, base, kind: str, seed: int = 0):
    """``(drafter, params)``: a fresh drafter of a kind in `hydrajax.drafters.registry.KINDS` for a base."""
    drafter = KINDS[kind].build(model.config, model.dtype)
    init = jax.jit(lambda rng, base: drafter.init(rng, BoundBase(model, base)))
    return drafter, Params(base, init(jax.random.key(seed + 1), base))


def random_model(preset: str, kind: str = "none", dtype=jnp.float32, seed: int = 0):
    """``(model, drafter, params)`` of a shape in `hydrajax.models.config.PRESETS`."""
    model, base = random_base(PRESETS[preset], dtype, seed)
    return model, *random_draft(model, base, kind, seed)
