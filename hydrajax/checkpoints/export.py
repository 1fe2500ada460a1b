"""Saving in the formats that other programs read: Hugging Face LLaMA directories, official Hydra and Medusa heads.

The inverse of `hydrajax.checkpoints.llama_hf` and `hydrajax.checkpoints.official_heads`, bit for bit. A directory is
written under a temporary name and renamed, so that it is never half-written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hydrajax.config import LlamaConfig
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama import Llama

WHAT = "export"
MARK = "hydrajax_export"  # in config.json: the files of the directory, by which a later export knows its own
Tensors = dict[str, np.ndarray]


def export_llama(
    directory: str | Path,
    model: Llama,
    params: Any,
    *,
    tokenizer=None,
    dtype=jnp.bfloat16,
    eos_ids: tuple[int, ...] = (),
    extra: dict | None = None,
    overwrite: bool = False,
) -> None:
    """Save a base as ``config.json`` and ``model.safetensors`` in the layout of transformers' LlamaForCausalLM.

    dtype: of the file; None keeps each parameter's own. tokenizer: anything with transformers' ``save_pretrained``.
    extra: more fields for config.json. An earlier export is replaced; a directory that holds anything else only with
    ``overwrite``, and then with all that is in it. The host holds the whole model once.

    Raises `HydrajaxError` if the directory may not be replaced or cannot be written.
    """
    c = model.config
    with _whole_directory(directory, overwrite) as folder:
        tensors = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]["scale"]}
        for i in range(c.n_layers):
            tensors |= _split_layer(f"model.layers.{i}.", params[f"layers_{i}"], c)
        if not c.tied_lm_head:
            tensors["lm_head.weight"] = params["lm_head"].T
        found = _save(folder / "model.safetensors", tensors, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        eos = (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None
        config = _hf_config(c) | {
            "torch_dtype": found,
            "bos_token_id": getattr(tokenizer, "bos_token_id", None),
            "eos_token_id": eos,  # null too: transformers' default is id 2
        }
        _write_config(folder, config | (extra or {}))


def export_heads(
    directory: str | Path,
    drafter,
    params: Any,
    *,
    base_name: str = "",
    dtype=jnp.bfloat16,
    extra: dict | None = None,
    overwrite: bool = False,
) -> None:
    """Save draft heads as the official Hydra or Medusa code lays them out, in safetensors.

    `HydraHeads` are grounded Hydra heads; `MedusaHeads` are Medusa v1 heads, or with ``lm_head_bias`` ungrounded
    Hydra heads; either kind of Hydra heads may be in `WithPrefix`. A shared block is written once per application, as
    the official code does; the loader takes equal blocks for a shared one. The official files also hold copies of the
    base's embedding, which their code takes from the base anyway: they are left out. ``base_name`` becomes
    ``base_model_name_or_path``; the rest is as at `export_llama`.

    Raises `HydrajaxError` also for drafters that the official layouts cannot express.
    """
    heads, prefix = (drafter.heads, drafter.config) if isinstance(drafter, WithPrefix) else (drafter, None)
    if not isinstance(heads, (HydraHeads, MedusaHeads)):
        _refuse(f"drafter is {type(heads).__name__}", "HydraHeads and MedusaHeads, also in WithPrefix")
    grounded = isinstance(heads, HydraHeads)
    if grounded or heads.lm_head_bias:
        stem = "hydra_lm_head"
        config = {
            "hydra_num_heads": heads.n_heads,
            "hydra_num_layers": heads.n_layers,
            "hydra_head_arch": "mlp" if prefix is None else "prefix-mlp",
            "grounded_heads": grounded,
            "hidden_state_offset": heads.hidden_state_offset,
        }
    else:
        if prefix is not None:
            _refuse("drafter is WithPrefix(MedusaHeads) without lm_head_bias", "MedusaHeads with it behind a prefix")
        if heads.hidden_state_offset:
            _refuse(f"hidden_state_offset of Medusa heads is {heads.hidden_state_offset}", "0")
        stem = "medusa_lm_head"
        config = {"medusa_num_heads": heads.n_heads, "medusa_num_layers": heads.n_layers}

    with _whole_directory(directory, overwrite) as folder:
        tensors: Tensors = {}
        if prefix is not None:
            layer, params = params["prefix"], params["heads"]
            tensors |= _split_layer("prefix_embeding_layer.layers.0.", layer["layer"], prefix)
            tensors["prefix_embeding_layer.norm.weight"] = layer["norm"]["scale"]
        for k in range(heads.n_heads):
            head = params[f"head_{k}"]
            if stem == "medusa_lm_head":
                block_names, lm_head = [f"{k}.{i}" for i in range(heads.n_layers)], f"{k}.{heads.n_layers}"
            else:  # with a prefix, a dropout lies before every block and lm head
                indices = [i if prefix is None else 2 * i + 1 for i in range(heads.n_layers)]
                block_names = [f"hydra_mlp.{k}.{i}" for i in indices]
                lm_head = f"hydra_lm_head.{k}" + ("" if prefix is None else ".1")
            if grounded:
                tensors |= _split_conditioned(block_names.pop(0), head["conditioned"])
            for i, name in enumerate(block_names):
                block = head["blocks_0" if heads.share_blocks else f"blocks_{i}"]
                tensors |= {f"{name}.linear.weight": block["kernel"].T, f"{name}.linear.bias": block["bias"]}
            tensors[f"{lm_head}.weight"] = head["lm_kernel"].T
            if grounded or heads.lm_head_bias:
                tensors[f"{lm_head}.bias"] = head["lm_bias"]
        _save(folder / f"{stem}.safetensors", tensors, dtype)
        _write_config(folder, config | {"base_model_name_or_path": base_name} | (extra or {}))


def _split_layer(name: str, layer: dict, c: LlamaConfig) -> Tensors:
    """Our fused decoder layer as the official matrices; see `hydrajax.checkpoints.llama_hf.decoder_layer`."""
    # [width, kv head, its queries then its key and its value, feature]
    qkv, gate_up = layer["qkv"], layer["gate_up"]
    parts = {"q": qkv[:, :, :-2], "k": qkv[:, :, -2], "v": qkv[:, :, -1]}
    tensors = {f"self_attn.{part}_proj.weight": kernel.reshape(c.width, -1).T for part, kernel in parts.items()}
    tensors |= {
        "self_attn.o_proj.weight": layer["out"].T,
        "mlp.gate_proj.weight": gate_up[:, 0].T,
        "mlp.up_proj.weight": gate_up[:, 1].T,
        "mlp.down_proj.weight": layer["down"].T,
        "input_layernorm.weight": layer["attention_norm"]["scale"],
        "post_attention_layernorm.weight": layer["mlp_norm"]["scale"],
    }
    return {name + key: tensor for key, tensor in tensors.items()}


def _split_conditioned(name: str, block: dict) -> Tensors:
    """W and R of a `ConditionedBlock` under the official names."""
    kernels = [block[part] for part in ("shared_kernel", "path_kernel") if part in block]
    tensors = {}
    for i, part in enumerate(("linear", "res_connection")):
        tensors[f"{name}.{part}.weight"] = np.concatenate([np.asarray(kernel[:, i]) for kernel in kernels]).T
        tensors[f"{name}.{part}.bias"] = block["bias"][i]
    return tensors


def _hf_config(c: LlamaConfig) -> dict:
    """Fields that transformers 4 and 5 both read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": c.tied_lm_head,
    }
    if c.rope_scaling is not None:
        scaling = config["rope_scaling"] = {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
        if c.rope_scaling.kind == "llama3":
            scaling["low_freq_factor"] = c.rope_scaling.low_freq_factor
            scaling["high_freq_factor"] = c.rope_scaling.high_freq_factor
            scaling["original_max_position_embeddings"] = c.rope_scaling.original_max_position
    return config


def _save(path: Path, tensors: Tensors, dtype) -> str:
    """Write a safetensors file that transformers opens; returns the dtype of its first tensor."""
    arrays = {name: np.ascontiguousarray(np.asarray(x, dtype)) for name, x in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"})
    return next(iter(arrays.values())).dtype.name


def _write_config(folder: Path, config: dict) -> None:
    files = sorted({path.name for path in folder.iterdir()} | {"config.json"})
    (folder / "config.json").write_text(json.dumps(config | {MARK: files}, indent=2) + "\n")


@contextmanager
def _whole_directory(directory: str | Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling to fill, renamed to ``directory`` at the end; removed if anything fails."""
    target = Path(os.path.realpath(directory))
    _check_replaceable(target, overwrite)
    partial, old = (target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.is_dir():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise HydrajaxError(f"{WHAT}: cannot write {directory}: {reason}") from None
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if os.path.exists(target) and not os.path.isdir(target):
        raise HydrajaxError(f"{WHAT}: {target} is a file, the name of a directory is needed")
    present = set(os.listdir(target)) if os.path.isdir(target) else set()
    if not present or overwrite:
        return
    try:
        own = set(json.loads((target / "config.json").read_text())[MARK])
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    foreign = sorted(present - own)
    if foreign:
        raise HydrajaxError(
            f"{WHAT}: {target} holds files that are no earlier export, such as '{foreign[0]}'; name another directory"
        )


def _refuse(found: str, allowed: str):
    raise HydrajaxError(f"{WHAT}: {found}, the official layouts allow {allowed}")
