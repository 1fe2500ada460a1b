"""On a CPU a token's hidden state is the same to the last bit in a tree and on its own, and some of its logits equal
their columns of the whole.

With rounded inputs the last bit matters: it decides which of two steps an input takes; logits then differ by tenths.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import append
from hydrajax.models.expert_settings import Experts
from hydrajax.models.init import abstract_base, init_base
from hydrajax.models.layout import leaf
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta, Mamba2, ShortConv
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace

CONFIG = LlamaConfig(97, 80, 112, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, tied_lm_head=True)
PROMPT = 5
PATHS = [[0, 1, 4], [0, 2, 6], [0, 3]]  # nodes of the tree below
PARENTS = [-1, 0, 0, 0, 1, 1, 2]


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


def base_of(dtype, quantize=None, kv_cache=None, window=None, experts=None, recurrent=()) -> BoundBase:
    config = CONFIG.replace(sliding_window=window, experts=experts)
    if recurrent:
        kinds = [*(LayerKind(None, None, recurrent=kind) for kind in recurrent), LayerKind()]
        config = config.replace(n_layers=len(kinds), layer_kinds=tuple(kinds))
    params = jax.jit(lambda: init_base(Llama(config, dtype), jax.random.key(0)))()
    params["embedding"] = params["embedding"] * 20
    if quantize:
        params = in_few_bits(Llama(config, dtype, quantize), params, factor=4)
    return BoundBase(Llama(config, dtype, quantize=quantize, kv_cache=kv_cache), jax.tree.map(jnp.asarray, params))


RECURRENT = GatedDelta(4, 2, 4, 16, 8), Mamba2(4, 2, 4, 8, 32), ShortConv(3, 80)
EXPERTS = Experts(9, 3, 48, shared_width=32, shared_gate=True, normalized=True)


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.quick(
    "weights of 8 bits", "bfloat16", "weights of 4 bits", "experts", "a cache of 8 bits", "recurrent, weights of 8 bits"
)
@pytest.mark.parametrize(
    ("dtype", "batch", "settings"),
    [
        pytest.param(jnp.float32, 3, {"quantize": "int8"}, id="weights of 8 bits"),
        pytest.param(jnp.bfloat16, 3, {}, id="bfloat16"),
        pytest.param(jnp.bfloat16, 1, {"quantize": "int4"}, id="weights of 4 bits"),
        pytest.param(jnp.float32, 3, {"experts": EXPERTS}, id="experts"),
        pytest.param(jnp.bfloat16, 3, {"kv_cache": "int8", "window": 4}, id="a cache of 8 bits"),
        pytest.param(
            jnp.float32,
            3,
            {"quantize": "int8", "recurrent": RECURRENT},
            id="recurrent, weights of 8 bits",
            marks=pytest.mark.slow,
        ),
        pytest.param(jnp.bfloat16, 1, {"quantize": "int4", "recurrent": RECURRENT}, id="recurrent, bfloat16, 4 bits"),
        pytest.param(jnp.float32, 3, {"recurrent": RECURRENT}, id="recurrent"),
        pytest.param(jnp.float32, 1, {}, id="float32"),
        pytest.param(jnp.float32, 3, {"quantize": "int4-128"}, id="groups of 128"),
        pytest.param(jnp.float32, 3, {"experts": EXPERTS, "quantize": "int8"}, id="experts of 8 bits"),
        pytest.param(jnp.bfloat16, 3, {"experts": EXPERTS}, id="experts, bfloat16"),
        pytest.param(jnp.float32, 3, {"kv_cache": "bfloat16"}, id="a cache of bfloat16"),
        pytest.param(jnp.float32, 3, {"kv_cache": "int8"}, id="a cache of 8 bits, float32"),
    ],
)
def test_a_tree_and_one_token_at_a_time(dtype, batch, settings):
    base = base_of(dtype, **settings)
    compare(base, batch)
    if "kv_cache" in settings:
        assert jax.tree.leaves(base.model.init_cache(1, 8).layers)[0].dtype == settings["kv_cache"]


def compare(base: BoundBase, batch: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 97, (batch, PROMPT + len(PARENTS))).astype(np.int32)
    prompt, nodes = tokens[:, :PROMPT], tokens[:, PROMPT:]

    def run(tokens, positions, mask, cache):
        out = base.forward(tokens, positions, mask, cache)
        cache = append(cache, out.block, jnp.full(batch, tokens.shape[1]), after=out.hidden[:, 0, 0])
        return cache, out.hidden, base.logits(out.hidden)

    run = jax.jit(run)
    filled, *_ = run(prompt, np.arange(PROMPT) + 0 * prompt, causal_mask(PROMPT), base.model.init_cache(batch, 32))

    ancestors = np.eye(len(PARENTS), dtype=bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        ancestors[node] |= ancestors[parent]
    depths = ancestors.sum(axis=1) - 1
    together = jax.jit(lambda: base.forward(nodes, PROMPT + depths + 0 * nodes, ancestors, filled))()
    logits = jax.jit(base.logits)(together.hidden)
    for path in PATHS:
        cache = filled
        for depth, node in enumerate(path):
            position = np.full((batch, 1), PROMPT + depth)
            cache, hidden, alone = run(nodes[:, node : node + 1], position, np.ones((1, 1), bool), cache)
            np.testing.assert_array_equal(hidden[:, 0], together.hidden[:, node])
            np.testing.assert_array_equal(alone[:, 0], logits[:, node])


SOME = np.array([40, 3, 7, 96])  # in this order, not sorted


# One row, the kernel for few rows, XLA's product.
@pytest.mark.parametrize(
    ("rows", "tied", "quantize"),
    [(1, True, None), (1, False, "int8"), (5, True, "int4"), (5, False, None), (200, False, None)],
)
def test_columns_of_all_logits(rows, tied, quantize):
    config = LlamaConfig(97, 32, 64, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16, tied_lm_head=tied)
    params = jax.jit(lambda: init_base(Llama(config, jnp.float32), jax.random.key(0)))()
    model = Llama(config, jnp.float32, quantize)
    base = BoundBase(model, in_few_bits(model, params))
    hidden = np.random.default_rng(1).standard_normal((rows, 32), np.float32)
    some, whole = jax.jit(lambda x: (base.logits(x, SOME), base.logits(x)))(hidden)
    assert some.dtype == jnp.float32
    assert np.std(whole) > 0.01
    np.testing.assert_allclose(some, whole[:, SOME], rtol=2e-5, atol=2e-6)
