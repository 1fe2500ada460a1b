"""The lm head for some tokens alone gives their columns of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.few_bits import in_few_bits
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig

TOKENS = np.array([40, 3, 7, 96])  # in this order, not sorted


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
    some, whole = jax.jit(lambda x: (base.logits(x, TOKENS), base.logits(x)))(hidden)
    assert some.dtype == jnp.float32
    assert np.std(whole) > 0.01
    np.testing.assert_allclose(some, whole[:, TOKENS], rtol=2e-5, atol=2e-6)
