"""Latent attention: its two forms, and caches of fewer bits. `test_families` compares it with transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.family_pairs import EXAMPLES, N_TOKENS, TOKENS, random_pair
from helpers.lab import quick_jit
from hydrajax.models.attention import causal_mask
from hydrajax.models.cache import KVCache, append, init_cache


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return random_pair(tmp_path_factory.mktemp("latent"), "deepseek_v3", EXAMPLES["deepseek_v3"])


@pytest.mark.parametrize(("kv_cache", "differ"), [(None, 1e-5), ("int8", 0.1)])
def test_a_text_by_its_latents_is_the_text_by_keys_and_values(pair, kv_cache, differ):
    """An empty cache leads to the first form. Both read what a cache keeps, which is one array per layer."""
    model = pair.model.clone(kv_cache=kv_cache)
    positions = np.broadcast_to(np.arange(N_TOKENS), TOKENS.shape)

    @quick_jit
    def run(params, cache):
        given = params, TOKENS, positions, causal_mask(N_TOKENS)
        both = [model.apply({"params": given[0]}, *given[1:], cache) for cache in (None, cache)]
        return [found.hidden for found in both], both[0].block

    cache = init_cache(model.config, 2, N_TOKENS, jnp.float32, kv_cache)
    (expanded, by_latents), block = run(pair.params, cache)
    assert np.abs(expanded).max() > 1
    np.testing.assert_allclose(expanded, by_latents, atol=differ)
    assert {len(layer) for layer in (*cache.layers, *block)} == {1}
    assert isinstance(append(cache, block, np.full(2, N_TOKENS, np.int32)), KVCache)
