"""Random linear layers in the formats of other quantisers, packed number by number as their documentation says.

Each function returns the tensors of one layer by their names without the layer's, and the float32 weights. Numbers are
packed and multiplied in plain loops, independently of `hydrajax.lowbit.files`.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.formats.tensors import open_tensors, save_safetensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Layer = tuple[dict[str, np.ndarray], np.ndarray]


def as_int32(words: list[list[int]]) -> np.ndarray:
    return np.array(words, np.uint32).view(np.int32)


def packed_across(numbers: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Each row's numbers in words, the first in the lowest bits; the last word is filled with zeros."""
    per_word, words = 32 // bits, []
    for row in numbers.tolist():
        words.append([])
        for start in range(0, len(row), per_word):
            word = 0
            for i in range(per_word):
                at = start + (order[i] if order else i)
                word |= (row[at] if at < len(row) else 0) << (bits * i)
            words[-1].append(word)
    return as_int32(words)


def packed_down(numbers: np.ndarray, bits: int) -> np.ndarray:
    return np.ascontiguousarray(packed_across(numbers.T, bits).T)


def products(outputs: int, inputs: int, number: Callable, zero: Callable, scale: Callable) -> np.ndarray:
    """``(number(o, i) - zero(o, i)) * scale(o, i)``, one by one."""
    weights = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            weights[o, i] = np.float32(number(o, i) - zero(o, i)) * np.float32(scale(o, i))
    return weights


def scales_of(rng, shape, bits: int, dtype=np.float16) -> np.ndarray:
    return (rng.uniform(0.5, 1.5, shape) * 0.4 / 2**bits).astype(dtype)


def awq(rng, outputs: int, inputs: int, group_size: int = 32) -> Layer:
    size = inputs if group_size == -1 else group_size
    groups = inputs // size
    numbers, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), 4)
    weights = products(
        outputs, inputs, lambda o, i: numbers[i, o], lambda o, i: zeros[i // size, o], lambda o, i: scales[i // size, o]
    )
    words = {"qweight": packed_across(numbers, 4, AWQ_ORDER), "qzeros": packed_across(zeros, 4, AWQ_ORDER)}
    return words | {"scales": scales}, weights


def gptq(
    rng, outputs: int, inputs: int, group_size: int = 32, bits: int = 4, act: bool = False, minus_one=True, g_idx=True
) -> Layer:
    size = inputs if group_size == -1 else group_size
    groups = inputs // size
    group_of = [i // size for i in range(inputs)]
    if act:
        rng.shuffle(group_of)
    numbers = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(1 if minus_one else 0, 2**bits, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), bits)
    weights = products(
        outputs, inputs,
        lambda o, i: numbers[i, o], lambda o, i: zeros[group_of[i], o], lambda o, i: scales[group_of[i], o],
    )  # fmt: skip
    tensors = {
        "qweight": packed_down(numbers, bits),
        "qzeros": packed_across(zeros - 1 if minus_one else zeros, bits),
        "scales": scales,
    }
    return tensors | ({"g_idx": np.array(group_of, np.int32)} if g_idx else {}), weights


def scale_index(strategy: str, group_size: int | None, block: tuple[int, int] | None) -> Callable:
    """Return ``(o, i) -> index of the scale``."""
    return {
        "tensor": lambda o, i: (0,),
        "channel": lambda o, i: (o, 0),
        "group": lambda o, i: (o, i // group_size),
        "block": lambda o, i: (o // block[0], i // block[1]),
    }[strategy]


def scale_shape(strategy: str, outputs: int, inputs: int, group_size, block) -> tuple[int, ...]:
    if strategy == "tensor":
        return (1,)
    last = scale_index(strategy, group_size, block)(outputs - 1, inputs - 1)
    return tuple(n + 1 for n in last)


def compressed_int(
    rng, outputs: int, inputs: int, bits=4, strategy="group", group_size=32, symmetric=True, packed=True, act=False
) -> Layer:
    index = scale_index(strategy, group_size, None)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    numbers = rng.integers(low, high, (outputs, inputs))
    shape = scale_shape(strategy, outputs, inputs, group_size, None)
    zeros = np.zeros(shape, int) if symmetric else rng.integers(low, high, shape)
    scales = scales_of(rng, shape, bits, jnp.bfloat16)
    place = list(range(inputs))
    if act:
        rng.shuffle(place)
    weights = products(
        outputs, inputs,
        lambda o, i: numbers[o, i], lambda o, i: zeros[index(o, place[i])], lambda o, i: scales[index(o, place[i])],
    )  # fmt: skip
    tensors: dict[str, np.ndarray] = {"weight_scale": scales}
    if packed:
        tensors["weight_packed"] = packed_across(numbers + high, bits)
        tensors["weight_shape"] = np.array([outputs, inputs])
        if not symmetric:
            tensors["weight_zero_point"] = packed_down(zeros + high, bits)
    else:
        tensors["weight"] = numbers.astype(np.int8)
        if not symmetric:
            tensors["weight_zero_point"] = zeros.astype(np.int8)
    if act:
        tensors["weight_g_idx"] = np.array([i // group_size for i in place], np.int32)
    return tensors, weights


def e4m3(byte: int) -> float:
    """The value of a float8_e4m3fn: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def fp8(
    rng, outputs: int, inputs: int, strategy="block", block=(24, 20), name="weight_scale_inv", dtype=np.float32,
    scalar=False,
) -> Layer:  # fmt: skip
    content = rng.integers(0, 0x70, (outputs, inputs)) + 128 * rng.integers(0, 2, (outputs, inputs))  # no NaN
    index = scale_index(strategy, None, block)
    scales = (rng.uniform(0.5, 1.5, scale_shape(strategy, outputs, inputs, None, block)) * 2e-3).astype(dtype)
    weights = products(
        outputs, inputs, lambda o, i: e4m3(int(content[o, i])), lambda o, i: 0, lambda o, i: scales[index(o, i)]
    )
    weight = content.astype(np.uint8).view(jnp.float8_e4m3fn)
    return {"weight": weight, name: scales.reshape(()) if scalar else scales}, weights


def bnb_8(rng, outputs: int, inputs: int) -> Layer:
    numbers = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.2, 0.5, outputs).astype(np.float32)
    weights = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            weights[o, i] = np.float32(numbers[o, i]) * scales[o] * np.float32(1 / 127)
    return {"weight": numbers, "SCB": scales, "weight_format": np.array(0, np.uint8)}, weights


def bnb_4(rng, outputs: int, inputs: int, kind="nf4", nested=False, block=64, storage=np.uint8) -> Layer:
    size = outputs * inputs
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    numbers = rng.integers(0, 16, size).tolist()
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
    n_blocks = math.ceil(size / block)
    tensors = {"weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.31}
        codes = rng.integers(0, 256, n_blocks)
        codebook = rng.uniform(-0.2, 0.2, 256).astype(np.float32)
        outer = rng.uniform(0.5, 1, math.ceil(n_blocks / 16)).astype(np.float32)
        absmax = [codebook[code] * outer[b // 16] + np.float32(0.31) for b, code in enumerate(codes)]
        tensors |= {"weight.absmax": codes.astype(np.uint8), "weight.nested_absmax": outer}
        tensors["weight.nested_quant_map"] = codebook
    else:
        absmax = rng.uniform(0.2, 0.5, n_blocks).astype(np.float32)
        tensors["weight.absmax"] = absmax
    weights = np.array([table[number] * absmax[k // block] for k, number in enumerate(numbers)], np.float32)
    content = []
    for k in range(0, size, 2):
        content.append(numbers[k] << 4 | numbers[k + 1])
    tensors["weight"] = np.array(content, np.uint8).view(storage)[:, None]
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.array(list(text), np.uint8)
    return tensors, weights.reshape(outputs, inputs)


def compressed(format: str, **weights) -> dict:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    defaults = {"type": "int", "symmetric": True, "group_size": None, "block_structure": None, "dynamic": False}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
        "config_groups": {"group_0": group | {"weights": defaults | weights}},
    }  # fmt: skip


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BNB_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"


# ``quantization_config``, the function and its settings.
CASES: dict[str, tuple[dict, Callable, dict]] = {
    "awq": (AWQ | {"group_size": 32}, awq, {}),
    "awq_one_group": (AWQ | {"group_size": -1, "version": "GEMM"}, awq, {"group_size": -1}),
    "gptq": (GPTQ | {"bits": 4}, gptq, {}),
    "gptq_act_order": (GPTQ | {"bits": 4, "desc_act": True}, gptq, {"act": True}),
    "gptq_8_bits": (GPTQ | {"bits": 8, "checkpoint_format": None}, gptq, {"bits": 8}),
    "gptq_one_group": (GPTQ | {"bits": 4, "group_size": -1}, gptq, {"group_size": -1}),
    "gptq_v2": (GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, gptq, {"minus_one": False}),
    "gptq_no_g_idx": (GPTQ | {"bits": 4}, gptq, {"g_idx": False}),
    "packed_4": (compressed(PACKED, num_bits=4, strategy="group", group_size=32), compressed_int, {}),
    "packed_4_zeros": (
        compressed(PACKED, num_bits=4, strategy="group", group_size=32, symmetric=False),
        compressed_int, {"symmetric": False},
    ),
    "packed_4_g_idx": (
        compressed(PACKED, num_bits=4, strategy="group", group_size=32, actorder="group"), compressed_int, {"act": True}
    ),
    "packed_8": (
        compressed(PACKED, num_bits=8, strategy="channel"), compressed_int, {"bits": 8, "strategy": "channel"}
    ),
    "int_8": (
        compressed(INT, num_bits=8, strategy="channel"),
        compressed_int, {"bits": 8, "strategy": "channel", "packed": False},
    ),
    "int_8_tensor_zeros": (
        compressed(INT, num_bits=8, strategy="tensor", symmetric=False),
        compressed_int, {"bits": 8, "strategy": "tensor", "packed": False, "symmetric": False},
    ),
    "naive_8_group": (
        compressed("naive-quantized", num_bits=8, strategy="group", group_size=32),
        compressed_int, {"bits": 8, "packed": False},
    ),
    "float_8_channel": (
        compressed(FLOAT, num_bits=8, type="float", strategy="channel"),
        fp8, {"strategy": "channel", "name": "weight_scale", "dtype": jnp.bfloat16},
    ),
    "float_8_tensor": (
        compressed(FLOAT, num_bits=8, type="float", strategy="tensor"),
        fp8, {"strategy": "tensor", "name": "weight_scale", "dtype": jnp.bfloat16},
    ),
    "float_8_block": (
        compressed(FLOAT, num_bits=8, type="float", strategy="block", block_structure=[24, 20]),
        fp8, {"name": "weight_scale"},
    ),
    "fp8": (FP8 | {"weight_block_size": [24, 20]}, fp8, {}),
    "fp8_tensor": (FP8, fp8, {"strategy": "tensor", "name": "weight_scale", "scalar": True}),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8,
        {"strategy": "channel", "name": "weight_scale"},
    ),
    "bnb_8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, bnb_8, {}),
    "bnb_nf4": (BNB_4, bnb_4, {}),
    "bnb_nf4_nested": (BNB_4 | {"bnb_4bit_use_double_quant": True}, bnb_4, {"nested": True}),
    "bnb_fp4": (BNB_4 | {"bnb_4bit_quant_type": "fp4"}, bnb_4, {"kind": "fp4", "block": 100}),
    "bnb_nf4_in_bfloat16": (BNB_4, bnb_4, {"storage": jnp.bfloat16}),
}  # fmt: skip


UP = "model.layers.0.mlp.up_proj"


def change(directory: Path, parts: dict[str, Any]) -> None:
    """Change the tensors of `UP`; None removes one. ``config`` replaces ``quantization_config``."""
    if "config" in parts:
        raw = json.loads((directory / "config.json").read_text()) | {"quantization_config": parts["config"]}
        (directory / "config.json").write_text(json.dumps(raw))
    tensors = read_all(directory) | {f"{UP}.{part}": x for part, x in parts.items() if part != "config"}
    tensors = {name: np.asarray(x) for name, x in tensors.items() if x is not None}
    save_safetensors(directory / "model.safetensors", tensors)


def read_all(directory: Path) -> dict[str, np.ndarray]:
    files = open_tensors(directory, "model", "base")
    return {name: files.read(name) for name in files}
