"""Random weights in a published shape, for measuring speed without a checkpoint."""

import jax
import jax.numpy as jnp

from hydrajax.bench.shapes import PRESETS
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.quantized import quantized_draft
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig


def random_base(config: LlamaConfig, dtype=jnp.float32, seed: int = 0, quantize: str | None = None):
    """Return ``(model, base_params)``, made on the device, quantised as in `hydrajax.models.llama.Llama`."""
    model = Llama(config, jnp.dtype(dtype), quantize)

    def init(rng):
        paths, treedef = jax.tree.flatten_with_path(init_base(model, rng))
        leaves = [leaf for _, leaf in paths]
        for i, (path, leaf) in enumerate(paths):  # of quantised kernels; zeros and infinities can be faster
            key = jax.random.fold_in(rng, i)
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                most = int(jnp.iinfo(leaf.dtype).max)
                leaves[i] = jax.random.randint(key, leaf.shape, -most, most + 1).astype(leaf.dtype)
            elif leaf.dtype == jnp.float8_e4m3fn:
                leaves[i] = (64 * jax.random.normal(key, leaf.shape, jnp.bfloat16)).astype(leaf.dtype)
            elif isinstance(path[-1], jax.tree_util.GetAttrKey):  # scales and offsets
                leaves[i] = (1e-3 * leaf).astype(leaf.dtype)
        return jax.tree.unflatten(treedef, leaves)

    return model, jax.jit(init)(jax.random.key(seed))


def random_draft(model: BaseModel, base, kind: str, seed: int = 0):
    """Return ``(drafter, params)``: a new drafter of a kind in `hydrajax.formats.draft_registry.KINDS`."""
    return with_random_params(model, base, KINDS[kind].build(model.config, model.dtype), seed)


def with_random_params(model: BaseModel, base, drafter: Drafter, seed: int = 0):
    """Return ``(drafter, params)`` with new parameters for this base."""
    init = jax.jit(lambda rng, base: drafter.init(rng, BoundBase(model, base)))
    return drafter, Params(base, init(jax.random.key(seed + 1), base))


def random_model(preset: str, kind: str = "none", dtype=jnp.float32, seed: int = 0, quantize: str | None = None):
    """Return ``(model, drafter, params)`` of a shape in `hydrajax.bench.shapes.PRESETS`."""
    model, base = random_base(PRESETS[preset], dtype, seed, quantize)
    drafter, params = random_draft(model, base, kind, seed)
    return model, drafter, params._replace(draft=quantized_draft(params.draft, quantize))
