"""Write a base in the formats of other programs, for cpu_peers.py: GGUF for llama.cpp and OpenVINO, and CTranslate2's.

All files are written from the same Hugging Face directory, once, and kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config
from hydrajax.files import whole_directory
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.tensors import open_tensors
from hydrajax.lowbit.gguf import LAYER_TENSORS, TENSORS, check_installed
from hydrajax.models.layout import MODEL, shapes
from hydrajax.models.llama_config import LlamaConfig

WHAT = "cpu_peers"
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
NORMAL, CONTROL = 1, 3  # llama.cpp's kinds of tokens


def random_directory(folder: Path, config: LlamaConfig) -> Path:
    """Return a Hugging Face directory of random weights, with a tokenizer that other programs accept.

    The weights are rounded to float16, so that programs that read no float32 have the same ones. They are drawn one
    tensor at a time: memory holds the file twice.
    """
    if not folder.is_dir():
        random, tensors = np.random.default_rng(0), {}
        for name, shape in shapes(base_layout(config)).items():
            numbers = 0.02 * random.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape)
            tensors[name] = numbers.astype(np.float16)
        fields = from_llama_config(config, WHAT) | {"torch_dtype": "float16", "bos_token_id": None, "eos_token_id": 0}
        with whole_directory(folder, WHAT) as partial:
            save_file(tensors, partial / f"{MODEL}.safetensors", metadata={"format": "pt"})
            made_up_tokenizer(config.vocab_size).save_pretrained(partial)
            (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return folder


def made_up_tokenizer(size: int):
    """Return a byte-level tokenizer of this many tokens; those beyond the bytes and one merge are never produced."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens = [*tokens, *(f"token{i}" for i in range(size))][:size]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("a", "b")] if "ab" in vocabulary else []
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def gguf_file(source: Path, folder: Path, kind: str) -> Path:
    """Return a GGUF file of a LLaMA in a Hugging Face directory; all its matrices have this one type.

    Those whose rows are no whole blocks of the type are in F16.

    Args:
        source: with ``config.json``, weights and ``tokenizer.json``.
        folder: the new file's.
        kind: llama.cpp's name of a type.
    """
    path = folder / f"{kind}.gguf"
    if path.is_file():
        return path
    check_installed(WHAT)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    config = read_config(source)
    names = official_to_gguf(config.n_layers)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    writer = GGUFWriter(partial, "llama", use_temp_file=True)  # else all tensors stay in memory
    add_fields(writer, source, config)
    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    files = open_tensors(source, MODEL, WHAT)
    for name in shapes(base_layout(config)):
        array = np.asarray(files.view(name), np.float32)
        if ".q_proj." in name or ".k_proj." in name:
            array = interleaved(array, config.n_heads if ".q_proj." in name else config.n_kv_heads)
        stored = GGMLQuantizationType[kind] if array.ndim > 1 else GGMLQuantizationType.F32
        if array.shape[-1] % GGML_QUANT_SIZES[stored][0]:
            stored = GGMLQuantizationType.F16  # as llama.cpp's converter does
        writer.add_tensor(names[name], quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)
    return path


def official_to_gguf(n_layers: int) -> dict[str, str]:
    """Return GGUF's name of each of transformers' tensors."""
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in TENSORS.items()}
    for at in range(n_layers):
        for ours, theirs in LAYER_TENSORS.items():
            names[f"model.layers.{at}.{theirs}.weight"] = f"blk.{at}.{ours}.weight"
    return names


def interleaved(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rotary features, as llama.cpp expects them."""
    halves = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def add_fields(writer, source: Path, config: LlamaConfig) -> None:
    """Add a LLaMA's shape and its tokenizer to a GGUF file."""
    if config.rope_scaling is not None or config.qkv_bias or config.qk_norm:
        raise HydrajaxError(f"{WHAT}: {source}: can write plain LLaMA models only, without rope_scaling")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    file = source / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model = content.get("model", {})
    if model.get("type") != "BPE":
        raise HydrajaxError(f"{WHAT}: {file}: got no byte-level BPE tokenizer, which GGUF files here need")
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    by_id = {i: token for token, i in model["vocab"].items()} | {
        token["id"]: token["content"] for token in content["added_tokens"]
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(i, f"unused{i}") for i in range(config.vocab_size)])
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(config.vocab_size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    end = next(iter(Checkpoint(source).eos_ids), min(special, default=0))
    writer.add_bos_token_id(end)  # llama.cpp takes its own default otherwise, which the vocabulary may not have
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def ctranslate2_directory(source: Path, folder: Path, kind: str) -> Path:
    """Return a directory that CTranslate2's own converter has written, which needs torch and transformers."""
    path = folder / f"ctranslate2_{kind}"
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with whole_directory(path, WHAT) as partial:
        command = [sys.executable, "-m", "ctranslate2.converters.transformers", "--model", str(source)]
        command += ["--output_dir", str(partial), "--quantization", kind, "--force"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HydrajaxError(f"{WHAT}: CTranslate2's converter failed: {one_line(done.stderr[-300:])}")
        written = partial / "config.json"  # the converter writes null for tokens that the tokenizer lacks, and the
        fields = json.loads(written.read_text(encoding="utf-8"))  # program accepts texts only
        written.write_text(json.dumps({name: "" if value is None else value for name, value in fields.items()}))
    return path
