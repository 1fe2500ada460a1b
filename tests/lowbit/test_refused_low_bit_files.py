"""Damaged bases of other quantisers, and settings that are not supported: one line each."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.low_bit_layers import AWQ, CASES, FP8, GPTQ, UP, change, read_all
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.tensors import open_base_tensors, save_safetensors

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


METHODS = "'awq', 'bitsandbytes', 'compressed-tensors', 'fbgemm_fp8', 'fp8', 'gptq'"
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
