"""Models of a published shape with random weights, for measuring speed where no checkpoint is at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hydrajax.decoding.step import Params
from hydrajax.drafters.drafter import BoundBase
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.models.config import PRESETS, LlamaConfig
from hydrajax.models.llama import Llama, init_base

N_HEADS = 4  # as released


def _medusa(c: LlamaConfig, dtype):
    return MedusaHeads(N_HEADS, c.width, c.vocab_size, dtype=dtype)


def _hydra(c: LlamaConfig, dtype, n_layers: int = 1):
    return HydraHeads(N_HEADS, c.width, c.vocab_size, n_layers, dtype=dtype)


DRAFTERS = {
    "none": lambda c, dtype: NoDrafter(),
    "medusa": _medusa,
    "hydra": _hydra,
    "hydra++": lambda c, dtype: WithPrefix(_hydra(c, dtype, n_layers=4), c),
}


def random_model(preset: str, drafter: str = "none", dtype=jnp.float32, seed: int = 0):
    """``(model, drafter, params)`` of a shape in `hydrajax.models.config.PRESETS`, made on the device."""
    dtype = jnp.dtype(dtype)
    model = Llama(PRESETS[preset], dtype)
    base = jax.jit(lambda rng: init_base(model, rng))(jax.random.key(seed))
    return model, *random_draft(model, base, drafter, seed)


def random_draft(model: Llama, base, drafter: str, seed: int = 0):
    """``(drafter, params)``: fresh draft heads of a named kind for a base."""
    draft = DRAFTERS[drafter](model.config, model.dtype)
    init = jax.jit(lambda rng, base: draft.init(rng, BoundBase(model, base)))
    return draft, Params(base, init(jax.random.key(seed + 1), base))
