"""GGUF files of llama.cpp as bases: translate a file's metadata, once, into a Hugging Face directory in the cache.

The directory holds ``config.json``, the tokenizer and an index of the tensors. Weights are not copied: they are read
from the file and dequantised one at a time (`hydrajax.lowbit.gguf_tensors.GgufFiles`).
"""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.families.config_fields import rope_fields, unsupported
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.files import check_file, whole_directory
from hydrajax.formats.tensors import GGUF_INDEX, expect_tensors
from hydrajax.locking import one_at_a_time
from hydrajax.lowbit.gguf_tensors import GGUF_FLOATS, GgufFiles, gguf_directory
from hydrajax.lowbit.gguf_tokenizer import KNOWN_SPLITS, gguf_tokenizer
from hydrajax.models.layout import shapes
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling
from hydrajax.optional_deps import needs
from hydrajax.text.tokenizer import run_tokenizer, without_panic_text

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES = (*GGUF_FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS)
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = LAYER_TENSORS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_27B_LAYERS = 62  # the one size of Gemma 3 whose scores have another scale
ROPE_FACTORS = "rope_freqs.weight"
EXPECTED = {int: "an integer", str: "a text", float: "a number", bool: "a bool", list: "an array"}


def described(file: str | Path, what: str) -> Path:
    """Return the directory that describes a GGUF file, made at its first use.

    Args:
        file: the file. Another size or modification time makes another directory.

    Raises:
        HydrajaxError: the file is damaged or not supported, the cache cannot be written, or gguf is not installed.
    """
    path = Path(os.path.realpath(file))
    check_file(path, what)
    try:
        directory = gguf_directory(path)
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot read {file}: {error.strerror}") from None
    except RuntimeError:
        raise HydrajaxError(f"{what}: found no home directory for the cache: set XDG_CACHE_HOME") from None
    if not directory.is_dir():
        with one_at_a_time(directory, what):
            if not directory.is_dir():  # else another process made it meanwhile
                _describe(path, directory, what)
    return directory


def check_installed(what: str) -> None:
    """Refuse GGUF files without the package gguf; ``what`` begins the message."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise _missing(error, what) from None


def _missing(error: ImportError, what: str) -> HydrajaxError:
    return HydrajaxError(f"{what}: {needs('gguf')} ({one_line(error)})")


def _describe(path: Path, directory: Path, what: str) -> None:
    where = f"{what}: {path}"
    try:
        file = _GgufFile(path)
        config = file.config()
        tensors = file.tensors(config.head_dim)
        fields = from_llama_config(config, what) | file.token_ids()
        if config.n_layers > len(tensors):  # before a wrong number makes us list millions of names
            raise HydrajaxError(f"block_count: got {config.n_layers} layers with {len(tensors)} tensors")
        expect_tensors(GgufFiles(path, tensors, what), shapes(base_layout(config)), where)
        tokenizer = file.tokenizer(config.vocab_size)
    except ImportError as error:  # of gguf
        raise _missing(error, what) from None
    except HydrajaxError as error:
        text = str(error)
        raise HydrajaxError(text if text.startswith(f"{what}: ") else f"{where}: {text}") from None
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot read {path}: {error.strerror or one_line(error)}") from None
    except Exception as error:  # gguf raises many types for a damaged file
        reason = one_line(f"{type(error).__name__}: {error}")
        raise HydrajaxError(f"{where} is damaged or not a GGUF file: {reason}") from None
    with whole_directory(directory, what) as folder:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        (folder / GGUF_INDEX).write_text(json.dumps({"file": str(path), "tensors": tensors}, indent=1) + "\n")


class _GgufFile:
    """A GGUF file's metadata. For a damaged file the methods raise any error; messages do not name the file."""

    def __init__(self, path: Path):
        from gguf import GGUFReader

        class Reader(GGUFReader):
            def _get(self, offset, dtype, count=1, override_order=None):
                # GGUFReader reads empty arrays beyond the end: a damaged length makes it loop for billions of them.
                if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                    raise ValueError("the file ends too early")
                return super()._get(offset, dtype, count, override_order)

        with np.errstate(all="ignore"):  # sums of damaged offsets
            self._reader = Reader(path)
        if self._reader.byte_order != "I":
            raise HydrajaxError("got a big-endian file, expected little-endian numbers")
        parts = self._field("split.count", int, 1)
        if parts > 1:
            raise HydrajaxError(f"split.count: got {parts}, expected one file; join them with llama-gguf-split --merge")
        self._architecture = self._field("general.architecture", str, None)
        if self._architecture not in ARCHITECTURES:
            raise unsupported("general.architecture", self._architecture, " or ".join(map(repr, ARCHITECTURES)))
        self._found = {tensor.name: tensor for tensor in self._reader.tensors}

    def config(self) -> LlamaConfig:
        """Translate the architecture's fields."""
        n_heads = self._own("attention.head_count", int)
        width = self._own("embedding_length", int)
        head_dim = self._own("attention.key_length", int, width // max(n_heads, 1))
        for name in ("attention.value_length", "rope.dimension_count"):
            if (found := self._own(name, int, head_dim)) != head_dim:
                raise unsupported(name, found, f"{head_dim}, the size of a head")
        if not self._own("attention.causal", bool, True):
            raise unsupported("attention.causal", False, "true")
        if "token_embd.weight" not in self._found:
            raise HydrajaxError("missing tensor 'token_embd.weight'")
        is_gemma = self._architecture == "gemma3"
        theta = self._own("rope.freq_base", float, 1e6 if is_gemma else 10_000.0)
        n_layers = self._own("block_count", int)
        fields = {
            "model_type": "gemma3_text" if is_gemma else self._architecture,
            "vocab_size": int(self._found["token_embd.weight"].shape[-1]),
            "hidden_size": width,
            "intermediate_size": self._own("feed_forward_length", int),
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": self._own("attention.head_count_kv", int, n_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._own("context_length", int),
            "rms_norm_eps": self._own("attention.layer_norm_rms_epsilon", float),
            "rope_theta": theta,
            "rope_scaling": rope_fields(self._rope_scaling(head_dim, theta)),
            "tie_word_embeddings": "output.weight" not in self._found,
        }
        if is_gemma:  # llama.cpp has a constant for the scale of scores, which the file lacks
            scalar = width // n_heads if n_layers == GEMMA_27B_LAYERS else head_dim
            window = self._own("attention.sliding_window", int)
            fields |= {"sliding_window": window, "query_pre_attn_scalar": scalar}
        return to_llama_config(fields, "the file")

    def tensors(self, head_dim: int) -> dict[str, dict[str, Any]]:
        """Return the index for `GgufFiles`."""
        found = {}
        for name, tensor in self._found.items():
            if name == ROPE_FACTORS:
                continue
            kind = tensor.tensor_type.name
            if kind not in TYPES:
                raise unsupported(f"tensor '{name}'", kind, ", ".join(TYPES))
            official = official_name(name, GEMMA_TENSORS if self._architecture == "gemma3" else LAYER_TENSORS)
            if official is None:
                raise HydrajaxError(f"unexpected tensor '{name}'")
            found[official] = {
                "type": kind,
                "shape": tensor.shape[::-1].tolist(),
                "offset": int(tensor.data_offset),
                "bytes": int(tensor.n_bytes),
            }
            # llama.cpp's converter interleaves the two halves of each head's rotary features, for llama only.
            if self._architecture == "llama" and ("attn_q." in name or "attn_k." in name):
                found[official]["head_dim"] = head_dim
            if self._architecture == "gemma3" and name.endswith("_norm.weight"):
                found[official]["offset_norm"] = True  # the converter adds 1
        return found

    def token_ids(self) -> dict[str, Any]:
        """Return the special tokens for ``config.json``. End of text, of turn and of message end generation."""
        found = (self._token_id(name) for name in ("eos", "eot", "eom"))
        ends = list(dict.fromkeys(i for i in found if i is not None))
        return {
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": (ends[0] if len(ends) == 1 else ends) if ends else None,
        }

    def _token_id(self, name: str) -> int | None:
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self._field("tokenizer.ggml.model", str, "") == "llama" else {}
        found = self._field(f"tokenizer.ggml.{name}_token_id", int, defaults.get(name, -1))
        return None if found < 0 else found

    def tokenizer(self, vocab_size: int) -> Any | None:
        """Build the transformers tokenizer; None for a file without a vocabulary."""
        splits = self._field("tokenizer.ggml.pre", str, "default")
        if self._field("tokenizer.ggml.model", str, "") == "gpt2" and splits not in KNOWN_SPLITS:
            warnings.warn(
                f"hydrajax: tokenizer.ggml.pre: got '{one_line(splits, 40)}', which is not supported: text is split as "
                "for files without it, and some ids may differ from the original tokenizer's",
                stacklevel=2,
            )
        special = {name: self._token_id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
        with without_panic_text():
            failed = "cannot read the tokenizer"
            return run_tokenizer(gguf_tokenizer, self._field, special, vocab_size, failed=failed)

    def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
        kind = self._own("rope.scaling.type", str, "linear")  # llama.cpp's default, with the factor 1
        if kind not in ("none", "linear"):
            raise unsupported("rope.scaling.type", kind, "'none' or 'linear'")
        factor = self._own("rope.scaling.factor", float, self._own("rope.scale_linear", float, 0.0))
        linear = RopeScaling("linear", factor) if kind == "linear" and factor not in (0.0, 1.0) else None
        if ROPE_FACTORS not in self._found:
            return linear
        if linear is not None:
            raise unsupported("rope.scaling.factor", factor, f"1 with a tensor {ROPE_FACTORS}")
        factors = np.asarray(self._found[ROPE_FACTORS].data, np.float32).ravel()
        scaling = RopeScaling("llama3", float(factors.max(initial=1.0)))
        expected = _llama3_factors(scaling, head_dim, theta)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3, atol=0.0):
            raise HydrajaxError(
                f"{ROPE_FACTORS}: got other factors than those of llama3 scaling with low_freq_factor 1, "
                "high_freq_factor 4 and original_max_position_embeddings 8192, which are the supported ones"
            )
        return scaling if scaling.factor > 1 else None

    def _own(self, name: str, kind: type, *default: Any) -> Any:
        return self._field(f"{self._architecture}.{name}", kind, *default)

    def _field(self, name: str, kind: type, *default: Any) -> Any:
        """Return a field's value; without a default the field is required."""
        field = self._reader.get_field(name)
        if field is None:
            if not default:
                raise HydrajaxError(f"field '{name}' is missing")
            return default[0]
        value = field.contents() if kind is list or len(field.types) == 1 else "an array"
        if kind is float and type(value) in (int, float):
            return float(str(np.float32(value)))  # 1e-05 as in config.json, not 9.999999747378752e-06
        if type(value) is not kind:
            raise unsupported(name, value, EXPECTED[kind])
        if kind is int and abs(value) >= 2**31:
            raise unsupported(name, value, "an integer of 32 bits")
        return value


def official_name(name: str, layer_tensors: dict[str, str] = LAYER_TENSORS) -> str | None:
    """Return transformers' name of a tensor; None if the architecture has no such tensor."""
    *parents, part, kind = name.split(".")
    if kind not in ("weight", "bias"):
        return None
    if not parents and part in TENSORS:
        return f"{TENSORS[part]}.{kind}"
    if len(parents) == 2 and parents[0] == "blk" and parents[1].isdecimal() and part in layer_tensors:
        return f"model.layers.{int(parents[1])}.{layer_tensors[part]}.{kind}"
    return None


def _llama3_factors(scaling: RopeScaling, head_dim: int, theta: float) -> np.ndarray:
    """Return the divisors of the rotary frequencies, as llama.cpp's converter computes and stores them."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
