"""Models of a published shape with random weights, for measuring speed where no checkpoint is at hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel, BoundBase, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import PRESETS, LlamaConfig

# Draft lm heads to measure: the released ones, the base's own, a product of rank 512, one of 8000 tokens.
LM_HEADS = {"full": None, "shared": LmHead(shared=True), "low-rank": LmHead(rank=512)}
LM_HEADS |= {"reduced": LmHead(vocabulary=Vocabulary(range(8000)))}


def random_base(config: LlamaConfig, dtype=jnp.float32, seed: int = 0, quantize: str | None = None):
    """``(model, base_params)`` of this shape, made on the device; ``quantize`` as in `hydrajax.models.llama.Llama`."""
    model = Llama(config, jnp.dtype(dtype), quantize)

    def init(rng):
        leaves, treedef = jax.tree.flatten(init_base(model, rng))
        for i, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jnp.integer):  # quantised; never zeros: a device can be faster with them
                most = int(jnp.iinfo(leaf.dtype).max)
                leaves[i] = jax.random.randint(jax.random.fold_in(rng, i), leaf.shape, -most, most + 1).astype(
                    leaf.dtype
                )
        return jax.tree.unflatten(treedef, leaves)

    return model, jax.jit(init)(jax.random.key(seed))


def drafter_for(model: BaseModel, kind: str, lm_head: str = "full") -> Drafter:
    """A drafter of a kind in `hydrajax.formats.draft_registry.KINDS` for a base, heads with this one of `LM_HEADS`.

    Raises `HydrajaxError` for another lm head than a drafter's own where it has no choice of them.
    """
    drafter, chosen = KINDS[kind].build(model.config, model.dtype), LM_HEADS[lm_head]
    if chosen is None:
        return drafter
    if "small_lm_head" not in {field.name for field in dataclasses.fields(drafter)}:
        raise HydrajaxError(f"lm_head: found '{lm_head}', {KINDS[kind].title} has none to choose, only full is allowed")
    return dataclasses.replace(drafter, small_lm_head=chosen)


def random_draft(model: BaseModel, base, kind: str, seed: int = 0, lm_head: str = "full"):
    """``(drafter, params)``: a fresh drafter for a base, see `drafter_for`."""
    return fresh(model, base, drafter_for(model, kind, lm_head), seed)


def fresh(model: BaseModel, base, drafter: Drafter, seed: int = 0):
    """``(drafter, params)`` with fresh parameters for a base."""
    init = jax.jit(lambda rng, base: drafter.init(rng, BoundBase(model, base)))
    return drafter, Params(base, init(jax.random.key(seed + 1), base))


def random_model(preset: str, kind: str = "none", dtype=jnp.float32, seed: int = 0):
    """``(model, drafter, params)`` of a shape in `hydrajax.models.llama_config.PRESETS`."""
    model, base = random_base(PRESETS[preset], dtype, seed)
    return model, *random_draft(model, base, kind, seed)
