"""Bases of other quantisers: layers bit by bit, layers left in float, damaged files and settings in one line each."""

import copy
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

import hydrajax
from helpers.lora_files import apply_lora, write_lora
from helpers.low_bit_layers import AWQ, CASES, FP8, GPTQ, UP, change, compressed, read_all
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.export_base import export_merged
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.tensors import open_base_tensors, save_safetensors
from hydrajax.lowbit.files import low_bit_tensors
from hydrajax.ops import trace

few_bits = pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")


@pytest.fixture
def floats(float_checkpoint, tmp_path):
    """``floats(weights) -> Path``: the checkpoint with these float weights."""

    def write(weights: dict[str, np.ndarray]) -> Path:
        directory = Path(shutil.copytree(float_checkpoint, tmp_path / "floats", dirs_exist_ok=True))
        save_safetensors(directory / "model.safetensors", weights)
        return directory

    return write


def same_parameters(one: Path, other: Path, **how) -> None:
    ours, theirs = (load_llama(directory, **how)[1] for directory in (one, other))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def identical(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("case", CASES)
def test_layers_and_models_are_widened_exactly(quantised, floats, tmp_path, case):
    config, pack, settings = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    for shape in ((16, 64), (40, 32)):
        parts, expected = pack(np.random.default_rng(1), *shape, **settings)
        assert 0.02 < expected.std() < 1
        save_safetensors(tmp_path / "model.safetensors", {f"a.b.{part}": x for part, x in parts.items()})
        files = open_base_tensors(tmp_path, "base")
        assert list(files) == ["a.b.weight"]
        assert (files.shape("a.b.weight"), files.dtype("a.b.weight")) == (shape, "bfloat16")
        identical(files.read("a.b.weight"), expected)
        identical(files.read("a.b.weight", 3), expected[:3])
    directory, weights = quantised(case)
    same_parameters(directory, floats(weights))


def test_inputs_that_fill_no_whole_word(tmp_path):
    """pack-quantized pads rows with unused bits, and zeros likewise along the outputs."""
    settings = {"strategy": "channel", "symmetric": False}
    parts, expected = CASES["packed_4"][1](np.random.default_rng(0), 13, 27, **settings)
    assert parts["weight_packed"].shape == (13, 4)
    assert parts["weight_zero_point"].shape == (2, 1)
    save_safetensors(tmp_path / "model.safetensors", {f"a.{part}": x for part, x in parts.items()})
    config = compressed("pack-quantized", num_bits=4, **settings)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    identical(open_base_tensors(tmp_path, "base").read("a.weight"), expected)


def test_a_zero_of_0_in_gptq_borrows_from_the_next_number(tmp_path):
    """The writers subtract 1 from each of a word's numbers at once."""
    parts, _ = CASES["gptq"][1](np.random.default_rng(0), 8, 32)
    parts["scales"][:] = 1
    parts["qweight"][:] = 0
    parts["qzeros"] = (np.array([[0x20]], np.uint32) - np.uint32(0x11111111)).view(np.int32)
    save_safetensors(tmp_path / "model.safetensors", {f"a.{part}": x for part, x in parts.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CASES["gptq"][0]}))
    assert open_base_tensors(tmp_path, "base").read("a.weight")[:, 0].tolist() == [0, -2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("case", ["awq", "packed_4", "fp8", "bnb_nf4"])
def test_layers_left_in_float(quantised, floats, tmp_path, case):
    """Without ``skip`` the lm head is quantised too."""
    for skip in ((), (UP, "model.layers.1.self_attn.k_proj")):
        directory, weights = quantised(case, skip)
        same_parameters(directory, floats(weights))
        shutil.rmtree(directory)


@pytest.mark.parametrize(("case", "quantize"), [("awq", "int8"), ("gptq_8_bits", "int4")])
def test_quantised_again(quantised, floats, case, quantize):
    """The same parameters as from a float file with the widened weights."""
    directory, weights = quantised(case)
    same_parameters(directory, floats(weights), quantize=quantize)
    assert fingerprint(directory) == fingerprint(floats(weights))


@few_bits
@pytest.mark.parametrize(("case", "quantize"), [("awq", "int4"), ("packed_4", "int4-128"), ("gptq_act_order", "int4")])
def test_four_bits_keep_the_numbers_of_the_file(quantised, case, quantize):
    """In the layers that the file has in 4 bits; the others are rounded."""
    directory, _ = quantised(case, ("lm_head", UP))
    (_, plain), (_, low) = load_llama(directory), load_llama(directory, quantize=quantize)
    for layer, name in itertools.product(("layers_0", "layers_1"), ("qkv", "out", "gate_up", "down")):
        kernel, expected = low[layer][name], plain[layer][name]
        found = kernel.dequantized()
        if (layer, name) == ("layers_0", "gate_up"):
            assert kernel.offset.dtype == jnp.float16
            assert 0 < np.abs(found - expected).max() < 0.1
        else:
            assert kernel.offset.dtype == jnp.uint8
            identical(np.asarray(found), np.asarray(expected))


@few_bits
@pytest.mark.parametrize("case", ["awq", "gptq", "gptq_8_bits", "packed_4", "int_8", "fp8", "bnb_nf4"])
def test_integers_of_4_bits_are_the_default(quantised, case):
    expected = "int4" if case in ("awq", "gptq", "packed_4") else None
    assert Checkpoint(quantised(case)[0]).weight_type == expected


@few_bits
def test_layers_of_one_kernel_with_different_groups_are_named(quantised, monkeypatch):
    directory, _ = quantised("gptq_act_order")
    monkeypatch.setattr(low_bit_tensors, "four_bit_kernel", lambda files, entry, unlike: unlike.append(entry))
    names = "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight"
    expected = (
        f"hydrajax: base: {directory}: g_idx differs in {names} and in 7 more kernels, whose products share x: they "
        "are widened and rounded to int4"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        load_llama(directory, quantize="int4")


@pytest.mark.parametrize(("case", "same"), [("fp8_tensor", True), ("float_8_channel", True), ("fp8", False)])
def test_fp8_keeps_the_numbers_of_the_file(quantised, case, same):
    """If scales are those of outputs; blocks are rounded again."""
    directory, _ = quantised(case)
    _, plain = load_llama(directory)
    with trace.tracing(platform=trace.Platform("gpu", 1, 8.9)):
        _, low = load_llama(directory, quantize="fp8")
    assert low["lm_head"].values.dtype == jnp.int8
    for name in ("qkv", "out", "gate_up", "down"):
        kernel = low["layers_1"][name]
        assert kernel.values.dtype == jnp.float8_e4m3fn
        found, expected = (np.asarray(x) for x in (kernel.dequantized(), plain["layers_1"][name]))
        assert np.array_equal(found, expected) is same
        np.testing.assert_allclose(found, expected, rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("platform", [trace.Platform("cpu", 1), trace.Platform("gpu", 1, 8.6)])
def test_devices_without_fp8(float_checkpoint, platform):
    expected = "quantize: got fp8, expected an NVIDIA GPU of compute capability 8.9 or higher; without"
    with trace.tracing(platform=platform):
        refusal(lambda: load_llama(float_checkpoint, quantize="fp8"), expected)


@pytest.mark.parametrize("kind", ["bin", "safetensors shards"])
@pytest.mark.parametrize("case", ["gptq", "fp8"])
def test_other_containers(quantised, floats, case, kind):
    """The tensors of a layer are in different shards."""
    directory, weights = quantised(case, kind=kind)
    same_parameters(directory, floats(weights))


def test_activation_scales_are_ignored(quantised, floats):
    directory, weights = quantised("float_8_tensor", kv_cache_scheme={"num_bits": 8, "type": "float"})
    extra = {f"{UP}.input_scale": np.ones(1, np.float32), "model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    save_safetensors(directory / "model.safetensors", read_all(directory) | extra)
    same_parameters(directory, floats(weights))


def test_old_names_of_the_settings(quantised):
    """bitsandbytes without quant_method, and compressed-tensors under compression_config."""
    directory, _ = quantised("bnb_nf4")
    change(directory, {"config": {"load_in_4bit": True}})
    load_llama(directory)
    directory, _ = quantised("int_8")
    raw = json.loads((directory / "config.json").read_text())
    raw["compression_config"] = raw.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(raw))
    load_llama(directory)


def test_biases_of_zeros(quantised):
    directory, _ = quantised("gptq")
    change(directory, {"bias": np.zeros(96, np.float16)})
    load_llama(directory)
    change(directory, {"bias": np.full(96, 0.5, np.float16)})
    refusal(lambda: load_llama(directory), f"base: {directory}: unexpected tensor '{UP}.bias'")


def test_a_merged_adapter(float_checkpoint, quantised, tmp_path):
    """The adapter of an AWQ base is merged into the widened weights, and the sum is exported in 16 bits."""
    directory, weights = quantised("awq")
    model = LlamaForCausalLM.from_pretrained(float_checkpoint)
    model.load_state_dict({name: torch.tensor(x) for name, x in weights.items()})
    adapter = write_lora(tmp_path / "lora", model)
    assert hydrajax.load(directory, adapter=adapter, merge=True).model.quantize is None  # rounding would lose the sum
    export_merged(tmp_path / "merged", directory, adapter)
    assert Checkpoint(tmp_path / "merged").dtype == "bfloat16"
    apply_lora(model, adapter)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, expected in model.state_dict().items():
        np.testing.assert_allclose(merged[name].astype(np.float32), expected.numpy(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_two_groups_of_settings(quantised, mixed):
    """A layer has the settings that fit its tensors."""
    directory, weights = quantised("packed_4")
    parts, expected = CASES["packed_8"][1](np.random.default_rng(5), 96, 32, **CASES["packed_8"][2])
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"]
    groups["group_1"] = {"targets": [f"re:.*{UP}"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    if mixed:
        config["format"] = "mixed-precision"
        for group in groups.values():
            group["format"] = "pack-quantized"
    change(directory, {"config": config, "weight_packed": None} | parts)
    files = open_base_tensors(directory, "base")
    identical(files.read(f"{UP}.weight"), expected)
    down = "model.layers.0.mlp.down_proj.weight"
    identical(files.read(down), weights[down])


INT_8 = CASES["int_8"][0]
STATE = "weight.quant_state.bitsandbytes__nf4"


DAMAGED = [  # a case of `low_bit_layers`, changes of one layer's tensors, the message
    ("awq", {"scales": None}, f"missing tensor '{UP}.scales'"),
    ("awq", {"qweight": None}, f"missing tensor '{UP}.qweight'"),
    ("awq", {"qzeros": np.zeros((2, 12), np.int32)}, f"{UP}.qzeros: got shape [2, 12], expected [1, 12]"),
    ("awq", {"qweight": np.zeros((32, 12))}, f"{UP}.qweight: got dtype float64, expected int32"),
    ("awq", {"qweight": np.zeros(32, np.int32)}, f"{UP}.qweight: got shape [32], expected two dimensions"),
    ("awq", {"scales": np.full((1, 96), np.nan, np.float16)}, f"{UP}.scales: got nan, expected finite numbers"),
    ("awq", {"scales": np.full((1, 96), 1e300)}, f"{UP}.scales: got inf, expected finite numbers"),
    (
        "awq", {"config": AWQ | {"group_size": 48}},
        "model.layers.0.self_attn.q_proj.qweight: got 32 inputs, expected a multiple of group_size 48",
    ),
    (
        "awq", {"qweight": np.zeros((32, 11), np.int32), "qzeros": np.zeros((1, 11), np.int32),
                "scales": np.ones((1, 88), np.float16)},
        f"{UP}.weight: got shape [88, 32], expected [96, 32]",
    ),
    ("gptq", {"g_idx": np.full(32, 1, np.int32)}, f"{UP}.g_idx: got group 1, expected 0 to 0"),
    ("gptq", {"g_idx": np.zeros(31, np.int32)}, f"{UP}.g_idx: got shape [31], expected [32]"),
    ("gptq", {"g_idx": None, "config": GPTQ | {"bits": 4, "desc_act": True}}, f"missing tensor '{UP}.g_idx'"),
    ("gptq", {"qweight": np.zeros((4, 90), np.int32)}, f"{UP}.qweight: got 90 outputs, expected a multiple of 8"),
    ("packed_4", {"weight_scale": None}, f"missing tensor '{UP}.weight_scale'"),
    ("packed_4", {"weight_packed": None}, f"missing tensor '{UP}.weight_packed'"),
    (
        "packed_4", {"weight_shape": np.array([96, 33])},
        f"{UP}.weight_shape: got [96, 33], expected that of [96, 4] words",
    ),
    (
        "packed_4_zeros", {"weight_zero_point": np.zeros((96, 1), np.int32)},
        f"{UP}.weight_zero_point: got shape [96, 1], expected [12, 1]",
    ),
    (
        "int_8", {"weight_scale": np.ones((9, 1))},
        f"{UP}.weight_scale: got shape [9, 1], expected [96, 1] or [96]",
    ),
    ("int_8", {"weight": np.ones((96, 32), np.uint8)}, f"{UP}.weight: got dtype uint8, expected int8"),
    ("fp8", {"weight_scale_inv": None}, f"missing tensor '{UP}.weight_scale_inv'"),
    ("fp8", {"weight_scale_inv": np.ones((4, 3))}, f"{UP}.weight_scale_inv: got shape [4, 3], expected [4, 2]"),
    (
        "fp8", {"weight_scale_inv": np.full((4, 2), -np.inf)},
        f"{UP}.weight_scale_inv: got -inf, expected finite numbers",
    ),
    ("bnb_8", {"SCB": None}, f"missing tensor '{UP}.SCB'"),
    ("bnb_8", {"weight_format": np.array(2, np.uint8)}, f"{UP}.weight_format: got 2, expected 0 (rows)"),
    ("bnb_nf4", {"weight.absmax": None}, f"missing tensor '{UP}.weight.absmax'"),
    (
        "bnb_nf4", {STATE: np.frombuffer(b"{nonsense", np.uint8)},
        f"{UP}.{STATE}: got other bytes, expected a JSON object",
    ),
    (
        "bnb_nf4", {STATE: np.frombuffer(b'{"shape": [96, 32], "blocksize": 0}', np.uint8)},
        f"{UP}.{STATE}: blocksize: got 0, expected a positive integer",
    ),
    (
        "bnb_nf4", {STATE: np.frombuffer(b'{"shape": [96, 64], "blocksize": 64}', np.uint8)},
        f"{UP}.weight: got 1536 bytes, expected 3072",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", dict.fromkeys(case for case, _, _ in DAMAGED))
def test_damaged_layers(quantised, case):
    directory, _ = quantised(case)
    tensors, config = read_all(directory), (directory / "config.json").read_text()
    for changes, message in [row[1:] for row in DAMAGED if row[0] == case]:
        save_safetensors(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text(config)
        change(directory, changes)
        assert refusal(lambda: load_llama(directory)) == f"base: {directory}: {message}"


METHODS = "'awq', 'bitsandbytes', 'compressed-tensors', 'fbgemm_fp8', 'fp8', 'gptq', 'mxfp4'"
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}


def with_weights(**fields) -> dict:
    return INT_8 | {"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | fields}}}


UNSUPPORTED = [
    ({"quant_method": "hqq"}, f"quant_method: got 'hqq', expected one of {METHODS}"),
    ({"bits": 4}, f"quant_method: got None, expected one of {METHODS}"),
    (AWQ | {"bits": 3}, "bits: got 3, expected 4"),
    (AWQ | {"version": "gemv"}, "version: got 'gemv', expected 'gemm'"),
    (AWQ | {"backend": "llm-awq"}, "backend: got 'llm-awq', expected 'autoawq'"),
    (AWQ | {"zero_point": False}, "zero_point: got False, expected True"),
    (AWQ | {"group_size": 0}, "group_size: got 0, expected a positive integer, or -1 for all inputs"),
    (GPTQ | {"bits": 3}, "bits: got 3, expected one of 4, 8"),
    (GPTQ | {"bits": 4, "checkpoint_format": "marlin"},
     "checkpoint_format: got 'marlin', expected one of 'gptq', 'gptq_v2'"),
    (GPTQ | {"bits": 4, "is_marlin_format": True}, "is_marlin_format: got True, expected False"),
    (GPTQ | {"bits": 4, "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}},
     "dynamic.+:.*up.*: got {'bits': 8}, expected only patterns that begin with '-:'"),
    (FP8 | {"fmt": "e5m2"}, "fmt: got 'e5m2', expected 'e4m3'"),
    (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: got [128, 0], expected two positive integers"),
    (INT_8 | {"format": "marlin-24"},
     "format: got 'marlin-24', expected one of 'pack-quantized', 'int-quantized', 'float-quantized', "
     "'naive-quantized', 'mixed-precision'"),
    (INT_8 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
     "sparsity_config.format: got 'sparse-24-bitmask', expected 'dense'"),
    (INT_8 | {"transform_config": {"a": 1}}, "transform_config: got {'a': 1}, expected none"),
    (INT_8 | {"config_groups": {}}, "config_groups: got {}, expected a group with weights"),
    (INT_8 | {"config_groups": {"a": ["Linear"]}}, "config_groups.a: got ['Linear'], expected an object"),
    (with_weights(num_bits=3), "config_groups.a.weights.num_bits: got 3, expected one of 4, 8"),
    (with_weights(type="float"), "config_groups.a.weights.num_bits: got 4, expected 8"),
    (with_weights(strategy="token"),
     "config_groups.a.weights.strategy: got 'token', expected one of 'tensor', 'channel', 'group', 'block'"),
    (with_weights(group_size=None),
     "config_groups.a.weights.group_size: got None, expected a positive integer with the strategy 'group'"),
    (with_weights(strategy="block"),
     "config_groups.a.weights.block_structure: got None, expected two positive integers with the strategy 'block'"),
    ("gptq", ": got 'gptq', expected an object"),
]  # fmt: skip


def test_settings_that_are_not_supported(float_checkpoint, tmp_path):
    directory = Path(shutil.copytree(float_checkpoint, tmp_path / "copy"))
    raw = json.loads((directory / "config.json").read_text())
    for config, message in UNSUPPORTED:
        (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
        dot = "" if message.startswith(":") else "."
        expected = f"base: {directory}/config.json: quantization_config{dot}{message}"
        assert refusal(lambda: read_config(directory)) == expected
        assert refusal(lambda: load_llama(directory)) == expected


VALUES = (None, True, 0, -1, 7, 64, 2**31, 10**40, 1.5, float("nan"), "", "group", [], {}, [1], {"a": 1}, [128, 128])


def objects(node: dict) -> list[dict]:
    return [node, *(inner for value in node.values() if isinstance(value, dict) for inner in objects(value))]


@pytest.mark.parametrize("case", CASES)
def test_random_changes_are_read_or_refused(tmp_path, case):
    """A field of the settings, and the shape or dtype of a tensor."""
    config, pack, settings = CASES[case]
    (parts, _), refusals = pack(np.random.default_rng(0), 16, 64, **settings), []
    for seed in range(30):
        rng, changed, tensors = random.Random(seed), copy.deepcopy(config), dict(parts)
        if seed % 2:
            found = rng.choice([each for each in objects(changed) if each])
            found[rng.choice(list(found))] = rng.choice(VALUES)
        else:
            part = rng.choice(list(parts))
            x = np.atleast_1d(parts[part])
            tensors[part] = rng.choice([x[:0], x[..., :1], x.ravel(), np.full(x.shape, 1e300), np.zeros(())])
        save_safetensors(tmp_path / "model.safetensors", {f"a.{name}": x for name, x in tensors.items()})
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": changed}))
        try:
            files = open_base_tensors(tmp_path, "base")
            for name in files:
                files.read(name)
        except HydrajaxError as error:
            refusals.append(str(error))
    assert refusals
    assert all(line.startswith("base: ") and "\n" not in line for line in refusals)
