"""Layers of 4 bits keep a file's numbers, scales and zeros, bit by bit, in the storage of our CPU kernels."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.low_bit_layers import AWQ, CASES, GPTQ, Layer, awq, compressed, compressed_int, gptq
from hydrajax.families.family_layout import decoder_layer
from hydrajax.formats.tensors import open_base_tensors, save_safetensors
from hydrajax.lowbit.files.kernels import four_bit_kernel
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta
from hydrajax.ops import trace

WIDTH = 256
LAYER = {entry.ours[0][-1]: entry for entry in decoder_layer((), "", LlamaConfig(97, WIDTH, 24, 1, 4, 2, 4))}
DELTA = LlamaConfig(97, WIDTH, 24, 1, 4, 2, 4, recurrent=GatedDelta(4, 2, 4, 8, 8))
INPUTS = next(entry for entry in decoder_layer((), "", DELTA) if entry.ours[0][-1] == "inputs")
QKV, GATE_UP, DOWN = LAYER["qkv"], LAYER["gate_up"], LAYER["down"]
PACKED = {"num_bits": 4, "strategy": "group"}


def settings_of(method: str, size: int) -> tuple[dict, dict]:
    """Return ``quantization_config`` and the settings of the function that packs."""
    return {
        "awq": (AWQ | {"group_size": size}, {}),
        "gptq": (GPTQ | {"bits": 4, "group_size": size}, {}),
        "packed": (compressed("pack-quantized", group_size=size, **PACKED), {}),
        "packed_zeros": (
            compressed("pack-quantized", group_size=size, symmetric=False, **PACKED), {"symmetric": False}
        ),
    }[method]  # fmt: skip


PACK = {"awq": awq, "gptq": gptq, "packed": compressed_int, "packed_zeros": compressed_int}


def files_of(directory, config: dict, layers: dict[str, Layer]):
    """Return the open files of these layers, and their float32 weights."""
    tensors = {f"{name}.{part}": x for name, (parts, _) in layers.items() for part, x in parts.items()}
    save_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_base_tensors(directory, "base"), {name: weights for name, (_, weights) in layers.items()}


def layers_of(entry, make) -> dict[str, Layer]:
    return {name.removesuffix(".weight"): make(i, *shape) for i, (name, shape) in enumerate(entry.theirs.items())}


def joined(entry, weights: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(entry.join(*weights.values())[0])


def identical(found, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("method", "size"), [("awq", 32), ("awq", 64), ("awq", 128), ("gptq", 64), ("packed", 128), ("packed_zeros", 32)]
)
def test_a_fused_kernel_equals_its_layers(tmp_path, method, size):
    entry = {"awq": GATE_UP, "gptq": INPUTS}.get(method, QKV)
    config, settings = settings_of(method, size)

    def make(seed, *shape):
        return PACK[method](np.random.default_rng(seed), *shape, group_size=size, **settings)

    files, weights = files_of(tmp_path, config, layers_of(entry, make))
    kernel, expected = four_bit_kernel(files, entry), joined(entry, weights)
    identical(kernel.dequantized(), expected)
    outputs = expected[0].size
    tiles = -(-outputs // 64)
    stored = sum(x.nbytes for x in kernel.arrays().values())
    assert stored * 8 / (WIDTH * tiles * 64) == 4 + 24 / size

    check_products(kernel, expected)


def check_products(kernel, expected: np.ndarray) -> None:
    """Compare products of rows that need no rounding, and each row alone."""
    if not trace.has_few_bits():
        return
    outputs = expected[0].size
    x = np.random.default_rng(9).integers(-127, 128, (5, WIDTH)).astype(np.float32)
    first = slice(None, None, 32)
    x[:, first if kernel.order is None else kernel.order[first]] = 127  # is not rounded
    exact = x.astype(np.float64) @ expected.reshape(WIDTH, -1)
    rows = x if kernel.order is None else x[:, kernel.order]
    limit = np.abs(rows) @ (16 * np.abs(kernel_scales(kernel, outputs)))  # numbers and zeros are at most 15
    found = np.asarray(jax.jit(lambda x, kernel: kernel.project(x, jnp.float32))(x, kernel))
    assert np.abs(exact).max() > 10
    assert np.max(np.abs(found - exact) / limit) < 1e-6
    for row in range(5):
        alone = jax.jit(lambda x, kernel: kernel.project(x, jnp.float32))(x[row : row + 1], kernel)
        np.testing.assert_array_equal(alone[0], found[row])


def reordered(seed: int, *shape: int, order: int = 0) -> Layer:
    """Return a random layer of GPTQ with the groups that ``order`` shuffles."""
    rng = np.random.default_rng(seed)
    shuffle = np.random.default_rng(order).shuffle
    return gptq(SimpleNamespace(shuffle=shuffle, integers=rng.integers, uniform=rng.uniform), *shape, act=True)


def test_groups_of_inputs_that_are_apart(tmp_path):
    config = settings_of("gptq", 32)[0] | {"desc_act": True}
    files, weights = files_of(tmp_path, config, layers_of(QKV, reordered))
    kernel, expected = four_bit_kernel(files, QKV), joined(QKV, weights)
    assert kernel.order is not None
    identical(kernel.dequantized(), expected)
    check_products(kernel, expected)


def test_layers_of_a_kernel_with_different_groups(tmp_path):
    config = settings_of("gptq", 32)[0] | {"desc_act": True}
    layers = layers_of(GATE_UP, lambda seed, *shape: reordered(seed, *shape, order=seed))
    files, _ = files_of(tmp_path, config, layers)
    unlike = []
    assert four_bit_kernel(files, GATE_UP, unlike) is None
    assert unlike == [GATE_UP]


def kernel_scales(kernel, outputs: int) -> np.ndarray:
    by_group = np.asarray(kernel.scale, np.float64).swapaxes(0, 1).reshape(kernel.scale.shape[1], -1)[:, :outputs]
    return by_group.repeat(WIDTH // len(by_group), axis=0)


def one_layer(tmp_path, case: str, change=lambda parts: None, inputs: int = 64, **settings):
    """Return the kernel of one random layer of a case, and its weights."""
    config, pack, usual = CASES[case]
    entry = decoder_layer((), "", LlamaConfig(97, 16, inputs, 1, 2, 1, 8))[5]
    layers = layers_of(entry, lambda seed, *shape: pack(np.random.default_rng(seed), *shape, **usual | settings))
    for parts, _ in layers.values():
        change(parts)
    files, weights = files_of(tmp_path, config, layers)
    return four_bit_kernel(files, entry), joined(entry, weights), files.read(f"{next(iter(layers))}.weight").T


@pytest.mark.parametrize(("case", "inputs"), [("awq_one_group", 40), ("gptq_one_group", 96), ("gptq_v2", 64)])
def test_one_group_of_any_size_and_zeros_stored_as_they_are(tmp_path, case, inputs):
    kernel, expected, _ = one_layer(tmp_path, case, inputs=inputs)
    identical(kernel.dequantized(), expected)


@pytest.mark.parametrize("value", [0.1, 1e-7, 1e6])
def test_scales_beyond_float16_stay_float32(tmp_path, value):
    def change(parts):
        parts["scales"] = parts["scales"].astype(np.float32)
        parts["scales"][0, 3] = value

    kernel, _, expected = one_layer(tmp_path, "gptq", change)
    assert kernel.scale.dtype == np.float32
    identical(kernel.dequantized(), np.ascontiguousarray(expected))
    if trace.has_few_bits():
        x = np.full((1, 64), 127, np.float32)
        np.testing.assert_allclose(kernel.project(x, jnp.float32), x @ expected, rtol=1e-4)


def test_layers_that_are_widened_instead(tmp_path):
    def far_zeros(parts):
        parts["weight_zero_point"] = np.full(parts["weight_scale"].shape, -100, np.int8)

    def unequal_groups(parts):
        parts["g_idx"][np.flatnonzero(parts["g_idx"] == 0)[0]] = 1

    assert one_layer(tmp_path, "gptq_act_order", unequal_groups)[0] is None
    assert one_layer(tmp_path, "gptq_8_bits")[0] is None
    assert one_layer(tmp_path, "packed_4", far_zeros)[0] is None
    assert one_layer(tmp_path, "bnb_nf4")[0] is None
    assert one_layer(tmp_path, "fp8")[0] is None
