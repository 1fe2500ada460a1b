"""The base from a Hugging Face directory: ``config.json`` and one or several safetensors files.

Nothing is executed and nothing is guessed: every key of the file must be known and every key of the model present
with the right shape.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from hydrajax.config import LlamaConfig, RopeScaling
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama import Llama, abstract_base

# Buffers that older transformers versions saved; they follow from the config.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one clear line."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise HydrajaxError(f"{what}: no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HydrajaxError(f"{what}: cannot read {path} as JSON: {error}") from None
    if not isinstance(content, dict):
        raise HydrajaxError(f"{what}: {path} must hold a JSON object")
    return content


def check_directory(directory: Path, what: str) -> None:
    """Refuse what is not a directory (by `os.path`: pathlib raises for a name too long or one may not enter)."""
    if not os.path.isdir(directory):
        raise HydrajaxError(f"{what}: no such directory: {directory}")


def llama_config(raw: dict, what: str = "config.json") -> LlamaConfig:
    """Translate ``config.json`` (``what`` in messages); refuse by name what the model does not implement."""

    def refuse(field, found, allowed):
        raise HydrajaxError(f"{what}: {field} is {found!r}, supported is {allowed}")

    if raw.get("model_type") != "llama":
        refuse("model_type", raw.get("model_type"), "'llama'")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", raw["hidden_act"], "'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            refuse(field, raw[field], "false")
    for field in ("quantization_config", "rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(field) or {}, dict):
            refuse(field, raw[field], "an object")
    if raw.get("quantization_config"):
        refuse("quantization_config", raw["quantization_config"].get("quant_method"), "none (float weights)")
    try:
        n_heads = int(raw["num_attention_heads"])
        if n_heads < 1:
            refuse("num_attention_heads", n_heads, "1 or more")
        width = int(raw["hidden_size"])
        rope = raw.get("rope_parameters") or {}
        return LlamaConfig(
            vocab_size=int(raw["vocab_size"]),
            width=width,
            mlp_width=int(raw["intermediate_size"]),
            n_layers=int(raw["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
            head_dim=int(raw.get("head_dim") or width // n_heads),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, raw, what),
            tied_lm_head=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        raise HydrajaxError(f"{what}: field {missing} is missing") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, HydrajaxError):
            raise
        raise HydrajaxError(f"{what}: a field has the wrong type: {error}") from None


def _rope_scaling(scaling: dict, raw: dict, what: str) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise HydrajaxError(f"{what}: rope scaling type is '{kind}', supported are 'linear' and 'llama3'")
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    return RopeScaling(
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )


class TensorFiles:
    """The tensors of one or several safetensors files by name, read one at a time as NumPy (bf16 natively)."""

    def __init__(self, files: list[Path], what: str):
        self._what = what
        self._handles = {}
        self.file_of: dict[str, Path] = {}
        for path in files:
            try:
                handle = safe_open(path, framework="np")
            except FileNotFoundError:
                raise HydrajaxError(f"{what}: no such file: {path}") from None
            except (SafetensorError, OSError) as error:
                raise HydrajaxError(f"{what}: {path} is damaged or not a safetensors file: {error}") from None
            self._handles[path] = handle
            for key in handle.keys():  # noqa: SIM118 (safe_open is not a dict)
                if key in self.file_of:
                    raise HydrajaxError(f"{what}: tensor '{key}' is in both {self.file_of[key].name} and {path.name}")
                self.file_of[key] = path

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._handles[self.file_of[key]].get_slice(key).get_shape())

    def read(self, key: str) -> np.ndarray:
        try:
            return self._handles[self.file_of[key]].get_tensor(key)
        except SafetensorError as error:
            raise HydrajaxError(f"{self._what}: cannot read tensor '{key}': {error}") from None


def safetensors_files(directory: Path, what: str) -> list[Path]:
    """``model.safetensors``, or the shards that its index names; every named shard must lie in the directory."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index, what).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise HydrajaxError(f"{what}: {index} has no 'weight_map' of file names")
        shards = sorted(set(names.values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise HydrajaxError(f"{what}: {index.name} names '{shard}', a path outside the directory")
            if not (directory / shard).is_file():
                raise HydrajaxError(f"{what}: shard {shard} is named in {index.name} but missing from {directory}")
        return [directory / shard for shard in shards]
    if not single.is_file():
        raise HydrajaxError(f"{what}: {directory} has neither model.safetensors nor model.safetensors.index.json")
    return [single]


def expect_keys(
    found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], what: str, ignored=IGNORED
) -> None:
    """Refuse missing, unexpected and misshapen tensors, naming each (the first few, and how many more)."""
    missing = sorted(set(wanted) - set(found))
    extra = sorted(key for key in set(found) - set(wanted) if not ignored.fullmatch(key))
    for problem, keys in (("missing", missing), ("unexpected", extra)):
        if keys:
            raise HydrajaxError(f"{what}: {problem} tensor{'s' * (len(keys) > 1)} {_some(keys)}")
    wrong = [key for key in wanted if tuple(found[key]) != tuple(wanted[key])]
    if wrong:
        lines = [f"{key} has shape {list(found[key])}, expected {list(wanted[key])}" for key in wrong]
        raise HydrajaxError(f"{what}: {_some(lines, quote=False)}")


def _some(items: list[str], most: int = 5, quote: bool = True) -> str:
    shown = ", ".join(f"'{item}'" if quote else item for item in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def decoder_layer(prefix: str, c: LlamaConfig) -> tuple[dict[str, tuple[int, ...]], Callable]:
    """Keys and shapes of one official decoder layer, and a function that assembles our fused parameters from them."""
    q_rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    keys = {
        "self_attn.q_proj.weight": (q_rows, c.width),
        "self_attn.k_proj.weight": (kv_rows, c.width),
        "self_attn.v_proj.weight": (kv_rows, c.width),
        "self_attn.o_proj.weight": (c.width, q_rows),
        "mlp.gate_proj.weight": (c.mlp_width, c.width),
        "mlp.up_proj.weight": (c.mlp_width, c.width),
        "mlp.down_proj.weight": (c.width, c.mlp_width),
        "input_layernorm.weight": (c.width,),
        "post_attention_layernorm.weight": (c.width,),
    }

    def assemble(read: Callable[[str], np.ndarray]) -> dict:
        def get(name):
            return read(f"{prefix}{name}")

        def by_kv_head(name):  # rows of the official matrix are (kv head, query in its group, feature)
            return get(f"self_attn.{name}_proj.weight").reshape(c.n_kv_heads, -1, c.head_dim, c.width)

        qkv = np.concatenate([by_kv_head("q"), by_kv_head("k"), by_kv_head("v")], axis=1)
        return {
            "qkv": qkv.transpose(3, 0, 1, 2),
            "out": get("self_attn.o_proj.weight").T,
            "gate_up": np.stack([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]).transpose(2, 0, 1),
            "down": get("mlp.down_proj.weight").T,
            "attention_norm": {"scale": get("input_layernorm.weight")},
            "mlp_norm": {"scale": get("post_attention_layernorm.weight")},
        }

    return {prefix + name: shape for name, shape in keys.items()}, assemble


def load_llama(directory: str | Path, dtype=jnp.float32, place: Callable | None = None) -> tuple[Llama, dict]:
    """The model and its parameters, cast to ``dtype`` and placed on the device layer by layer.

    ``place(array, logical_axes)`` puts one host array on devices (default: the default device). Host memory holds
    one layer at a time beside the device copy. Raises `HydrajaxError` for a missing, truncated or foreign file.
    """
    directory = Path(directory)
    what = "--base"
    check_directory(directory, what)
    config_file = directory / "config.json"
    config = llama_config(read_json(config_file, what), f"{what}: {config_file}")
    model = Llama(config, jnp.dtype(dtype))
    tensors = TensorFiles(safetensors_files(directory, what), what)

    wanted = {"model.embed_tokens.weight": (config.vocab_size, config.width), "model.norm.weight": (config.width,)}
    assemblers = {}
    for i in range(config.n_layers):
        keys, assemblers[f"layers_{i}"] = decoder_layer(f"model.layers.{i}.", config)
        wanted |= keys
    if not config.tied_lm_head:
        wanted["lm_head.weight"] = (config.vocab_size, config.width)
    # A tied model's file may still hold the copy.
    ignored = re.compile(IGNORED.pattern + "|" + r"lm_head\.weight") if config.tied_lm_head else IGNORED
    expect_keys({key: tensors.shape(key) for key in tensors}, wanted, f"{what}: {directory}", ignored)

    axes = nn.get_partition_spec(abstract_base(model))
    place = place or (lambda array, _: jax.device_put(array))

    def put(subtree, subtree_axes):
        return jax.tree.map(lambda x, a: place(np.asarray(x, dtype), a), subtree, subtree_axes)

    params = {"embedding": put(tensors.read("model.embed_tokens.weight"), axes["embedding"])}
    for name, assemble in assemblers.items():
        params[name] = put(assemble(tensors.read), axes[name])
    params["norm"] = put({"scale": tensors.read("model.norm.weight")}, axes["norm"])
    if not config.tied_lm_head:
        params["lm_head"] = put(tensors.read("lm_head.weight").T, axes["lm_head"])
    return model, params


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids: from ``generation_config.json`` if it names any, else from ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if path.exists():
            found = read_json(path, "--base").get("eos_token_id")
            if found is None:
                continue
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(type(token) is int for token in ids):
                raise HydrajaxError(f"{name}: eos_token_id is {found!r}, supported is an integer or a list of them")
            return ids
    return ()
