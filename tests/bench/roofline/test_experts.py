"""Experts in the roofline: how many a pass wakes, bytes and operations by hand, and smaller trees for mixtures."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.operator_counts import abstract_params, flops, moved
from hydrajax.bench.benchmark import autoregressive_bytes
from hydrajax.bench.device_memory import woken
from hydrajax.bench.roofline.division import Division
from hydrajax.bench.roofline.passes import forward
from hydrajax.models.expert_settings import Experts
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.train.flops import forward_flops

E, K, F, D = 8, 2, 24, 16
EXPERTS = Experts(E, K, F, shared_width=12)
CONFIG = LlamaConfig(50, D, 40, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, experts=EXPERTS)


def test_woken_experts_against_draws():
    draws = np.random.default_rng(0).random((400, 8, 64)).argsort(-1)[..., :8]
    found = np.mean([len(np.unique(draw)) for draw in draws])
    assert woken(64, 8, 8) == pytest.approx(found, rel=0.02)

    assert woken(128, 8, 0) == 0
    assert woken(128, 8, 1) == pytest.approx(8)
    assert woken(128, 8, 2) == pytest.approx(16 - 64 / 128)
    assert woken(128, 8, 1000) == pytest.approx(128)
    assert woken(5, 5, 1) == 5


def of_experts(operators) -> dict:
    return {op.name: op for op in operators if op.kind == "weights" and op.name.startswith("experts")}


def test_operations_and_bytes_by_hand():
    tokens = 3
    found = of_experts(forward(Llama(CONFIG, jnp.bfloat16), 1, tokens, 10))
    pairs, awake = tokens * K, woken(E, K, tokens)
    assert {name: op.flops for name, op in found.items()} == {
        "experts router": 2 * tokens * D * E,
        "experts gate up": 2 * pairs * D * 2 * F,
        "experts down": 2 * pairs * F * D,
        "experts shared gate up": 2 * tokens * D * 24,
        "experts shared down": 2 * tokens * 12 * D,
    }
    expected = {
        "experts gate up": 2 * (awake * D * 2 * F + pairs * D + pairs * 2 * F),
        "experts down": 2 * (awake * F * D + pairs * F) + 4 * pairs * D,  # sums are float32
        "experts shared gate up": 2 * (D * 24 + tokens * D + tokens * 24),
    }
    assert {name: found[name].bytes for name in expected} == pytest.approx(expected)


def test_one_token_reads_its_experts_and_many_read_all():
    """Against the count of `hydrajax bench` from the arrays; activations are the difference."""
    config = CONFIG.replace(width=256, vocab_size=2000, experts=Experts(16, 2, 512), n_layers=2)
    model, shapes = abstract_params(config, jnp.bfloat16)
    one = autoregressive_bytes(model, shapes, 1, 64)
    assert 1 < moved(forward(model, 1, 1, 63)) / one < 1.02
    of_an_expert = 2 * 3 * 256 * 512
    assert autoregressive_bytes(model, shapes, 1, 64, nodes=500) - one == pytest.approx(2 * 14 * of_an_expert)
    rows = [autoregressive_bytes(model, shapes, batch, 0) for batch in (1, 2, 8)]
    assert np.diff(rows) == pytest.approx(
        [2 * of_an_expert * (woken(16, 2, n) - woken(16, 2, m)) for m, n in ((1, 2), (2, 8))], rel=1e-6
    )


def test_dense_layers_are_counted_as_before():
    """A dense layer and one with experts, as in GLM's."""
    kinds = (LayerKind(), LayerKind(experts=EXPERTS))
    both = CONFIG.replace(n_layers=2, layer_kinds=kinds, experts=None)
    dense, sparse, whole = (flops(forward(Llama(c), 1, 4, 8)) for c in (CONFIG.replace(experts=None), CONFIG, both))
    lm_head = 2 * 4 * D * 50
    assert whole == dense + sparse - lm_head


def test_training_and_int8_count_the_experts_of_a_token():
    dense = CONFIG.replace(mlp_width=K * F + 12, experts=None)
    assert forward_flops(Llama(CONFIG), 32).weights == forward_flops(Llama(dense), 32).weights + 2 * D * E
    wide = CONFIG.replace(width=256, experts=Experts(E, K, 512))
    whole, half = (of_experts(forward(Llama(wide, jnp.bfloat16, q), 1, 1, 10))["experts down"] for q in (None, "int8"))
    assert 0.5 < half.bytes / whole.bytes < 0.52
    assert half.flops == whole.flops


def test_devices_have_a_part_of_the_experts_and_one_sum():
    model = Llama(CONFIG, jnp.bfloat16)
    one, two = (forward(model, 1, 4, 8, division=Division(model=n)) for n in (1, 2))
    for name in ("experts gate up", "experts down"):
        whole, part = of_experts(one)[name], of_experts(two)[name]
        assert (part.flops, part.bytes) == (whole.flops / 2, pytest.approx(whole.bytes / 2)), name
    assert of_experts(two)["experts router"] == of_experts(one)["experts router"]
    exchanges = {op.name: op.bytes for op in two if op.kind == "collective" and "experts" in op.name}
    assert exchanges == {"all-reduce experts": 4 * 4 * D, "all-reduce experts shared down": 2 * 4 * D}
    three = forward(model, 1, 4, 8, division=Division(model=3))  # do not divide 8 experts: each has all of them
    assert of_experts(three)["experts down"] == of_experts(one)["experts down"]
