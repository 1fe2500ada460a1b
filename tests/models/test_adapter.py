"""LoRA adapters: products against NumPy, initial values, dropout and parameter shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.refusals import refusal
from hydrajax.lowbit.quantized import Int8
from hydrajax.models.adapter import TARGETS, Adapter, LowRank, check_adapter, split_adapter, with_adapter
from hydrajax.models.init import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.models.weights import project

RANK, SCALE, WIDTH = 3, 1.5, 8
SHAPE = LlamaConfig(61, 32, 80, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
ONE_LAYER = SHAPE.replace(n_layers=1)
FUSED = (2, 4, 5)  # two key-value heads, each with two queries, a key and a value of 5 features


@pytest.fixture(scope="module")
def random():
    return np.random.default_rng(0)


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(model, params, tokens, rng=None):
    return run_base(model, params, tokens, rng=rng).hidden


@functools.partial(jax.jit, static_argnums=0)
def fresh_params(model):
    return init_base(model, jax.random.key(0))


def noise(random, *shape):
    return random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("adapted", "int8"), [((0, 1, 2), False), ((1,), True), ((0, 2), False), ((0, 2), True)])
def test_product_equals_numpy(random, adapted, int8):
    """Each adapted part of a fused kernel gets its own product; the other parts stay unchanged."""
    kernel = noise(random, WIDTH, *FUSED)
    x, a = noise(random, 3, WIDTH), noise(random, WIDTH, len(adapted), RANK)
    shapes = [(RANK, 2, 2, 5), (RANK, 2, 1, 5), (RANK, 2, 1, 5)]
    b = tuple(noise(random, *shape) if i in adapted else None for i, shape in enumerate(shapes))
    expected = kernel.copy()
    if int8:
        scale = np.abs(kernel).max(axis=0) / 127
        expected = np.rint(kernel / scale) * scale
    for place, part in enumerate(adapted):
        for head in range(2):
            for row, at in enumerate([[0, 1], [2], [3]][part]):
                expected[:, head, at] += SCALE * a[:, place] @ b[part][:, head, row]
    frozen = Int8.of(kernel) if int8 else kernel
    weight = LowRank(jax.tree.map(jnp.asarray, frozen), jnp.asarray(a), jax.tree.map(jnp.asarray, b), SCALE)
    found = project(jnp.asarray(x), weight)
    np.testing.assert_allclose(found, x @ expected.reshape(WIDTH, -1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        weight.delta(), expected - np.asarray(frozen.dequantized() if int8 else kernel), atol=1e-5
    )


def test_float32_results_of_bfloat16_inputs(random):
    """Logits are float32 whatever the dtype of the inputs."""
    kernel, x, a = noise(random, WIDTH, 7), noise(random, 2, WIDTH), noise(random, WIDTH, 1, RANK)
    b = noise(random, RANK, 7)
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in (x, kernel, a, b)]
    found = project(narrow[0], LowRank(narrow[1], narrow[2], (narrow[3],), SCALE), jnp.float32)
    assert found.dtype == jnp.float32
    x, kernel, a, b = (np.asarray(array, np.float32) for array in narrow)
    np.testing.assert_allclose(found, x @ (kernel + SCALE * a[:, 0] @ b), rtol=0.02, atol=0.05)


def test_initial_values_are_those_of_peft():
    """A is uniform within 1 / sqrt(input width) and B is zero, so a fresh adapter changes no bit of the output."""
    model = Llama(ONE_LAYER, adapter=Adapter(rank=16))
    base, adapter = split_adapter(fresh_params(model))
    tokens = np.arange(80).reshape(2, 40) % 61
    fresh = hidden_of(model, with_adapter(base, adapter), tokens)
    np.testing.assert_array_equal(fresh, hidden_of(Llama(ONE_LAYER), base, tokens))
    adapter = jax.device_get(adapter)
    for path, leaf in jax.tree.leaves_with_path(adapter):
        if "_lora_b_" in path[-1].key:
            assert not leaf.any()
        else:
            limit = leaf.shape[0] ** -0.5
            assert 0.97 * limit < np.abs(leaf).max() <= limit
            np.testing.assert_allclose(np.std(leaf), limit / np.sqrt(3), rtol=0.1)


def test_only_targets_are_declared():
    """A kernel has one A for all its targets and a B for each; the base's own parameters stay the same."""
    targets = ("v_proj", "q_proj", "up_proj")
    base, adapter = split_adapter(abstract_base(Llama(SHAPE, adapter=Adapter(4, 8.0, 0.0, targets))))
    assert jax.tree.structure(base) == jax.tree.structure(abstract_base(Llama(SHAPE)))
    assert list(adapter) == ["layers_0", "layers_1"]
    shapes = {name: box.value.shape for name, box in adapter["layers_1"].items()}
    assert shapes == {
        "qkv_lora_a": (32, 2, 4),
        "qkv_lora_b_q_proj": (4, 2, 2, 8),
        "qkv_lora_b_v_proj": (4, 2, 1, 8),
        "gate_up_lora_a": (32, 1, 4),
        "gate_up_lora_b_up_proj": (4, 1, 80),
    }
    assert adapter["layers_0"]["qkv_lora_b_q_proj"].names == (None, "kv_heads", None, None)


def test_dropout_applies_to_the_input_of_a():
    """A random key turns dropout on: part of the input is zero and the rest is scaled up."""
    eye = jnp.eye(400)
    weight = LowRank(jnp.zeros((400, 400)), eye[:, None], (eye,), 1.0, dropout=0.25)
    x = jnp.full((400,), 3.0)
    np.testing.assert_allclose(project(x, weight), x)
    dropped = np.asarray(project(x, weight._replace(rng=jax.random.key(0))))
    np.testing.assert_allclose(dropped[dropped != 0], 4.0, rtol=1e-6)
    assert 0.65 < np.mean(dropped != 0) < 0.85


def test_a_model_drops_only_with_a_key():
    model = Llama(ONE_LAYER, adapter=Adapter(4, 8.0, 0.5))
    params = jax.tree.map(lambda x: x + np.float32(0.1), jax.device_get(fresh_params(model)))
    tokens = np.arange(80).reshape(2, 40) % 61
    first, second = (hidden_of(model, params, tokens, jax.random.key(seed)) for seed in (0, 1))
    assert np.abs(first - second).max() > 1e-3
    never = model.clone(adapter=Adapter(4, 8.0, 0.0))
    with_key = hidden_of(never, params, tokens, jax.random.key(0))
    np.testing.assert_allclose(hidden_of(model, params, tokens), with_key, rtol=1e-5, atol=1e-5)


def test_bad_settings_are_rejected():
    for settings, message in (
        ({"rank": 0}, "adapter.rank: got 0, expected at least 1"),
        ({"alpha": float("nan")}, "adapter.alpha: got nan, expected a positive number"),
        ({"dropout": 1.0}, "adapter.dropout: got 1.0, expected at least 0 and less than 1"),
        ({"targets": ("qkv",)}, f"adapter.targets: got 'qkv', expected one of {', '.join(TARGETS)}"),
        ({"targets": ()}, "adapter.targets: got [], expected different linear layers"),
        ({"targets": ("q_proj",) * 2}, "adapter.targets: got ['q_proj', 'q_proj'], expected different linear layers"),
    ):
        assert refusal(lambda settings=settings: Adapter(**settings)) == message
    tied = refusal(lambda: check_adapter(Adapter(), SHAPE.replace(tied_lm_head=True)))
    assert tied.startswith("adapter.targets: got lm_head, expected none for this base")
