"""GGUF files of tiny transformers models, written as llama.cpp's converter does."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


def interleaved(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """Permute the rows of a query or key projection: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def llama3_factors(head_dim: int, theta: float, factor: float, low=1.0, high=4.0, context=8192) -> np.ndarray:
    """Return the content of ``rope_freqs.weight``, by the loop of the same converter."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any = None,
    kind: str = "F32",
    *,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write a file and return its path.

    Args:
        model: of transformers: LLaMA, Qwen2, Qwen3 or Gemma 3, text.
        tokenizer: a byte-level one.
        kind: llama.cpp's name of the type of the matrices; vectors are float32.
        fields: changes: values by key. None leaves a field out.
        extra: further tensors.
    """
    config, name = model.config, model.config.model_type.removesuffix("_text")
    gemma3 = name == "gemma3"
    rope = config.rope_parameters["full_attention"] if gemma3 else config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        f"{name}.block_count": config.num_hidden_layers, f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size, f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads, f"{name}.attention.key_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": float(rope["rope_theta"]), f"{name}.rope.dimension_count": head_dim,
        f"{name}.vocab_size": config.vocab_size, "general.name": "tiny",
    }  # fmt: skip
    if tokenizer is not None:
        values |= tokenizer_fields(tokenizer)
    if gemma3:
        values[f"{name}.attention.sliding_window"] = config.sliding_window
    values |= fields or {}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", name), endianess=endian)
    for key, value in values.items():
        if value is not None:
            add_field(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.detach().float().numpy()
        if name == "llama" and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            array = interleaved(array, heads)
        if gemma3 and key.endswith("norm.weight"):
            array = array + 1
        tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(array)
    for key, array in (tensors | (extra or {})).items():
        stored = Type[kind] if array.ndim > 1 else Type.F32
        writer.add_tensor(key, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def tokenizer_fields(tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a byte-level tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in tokenizer.all_special_tokens else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id, "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.unknown_token_id": tokenizer.unk_token_id, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }  # fmt: skip
