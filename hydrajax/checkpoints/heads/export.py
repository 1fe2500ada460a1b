"""Saving in the formats that other programs read, and in our own.

The inverse of `hydrajax.checkpoints.base` and `hydrajax.checkpoints.heads.load`, bit for bit. A directory is written
under a temporary name and renamed, so that it is never half-written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from hydrajax.checkpoints.heads import native as native_heads
from hydrajax.checkpoints.heads.card import model_card
from hydrajax.checkpoints.heads.layouts import VLLM_NAMING, heads_layout, hydra_layout, medusa_naming
from hydrajax.checkpoints.heads.load import RECORD
from hydrajax.checkpoints.tensors import save_safetensors, save_torch
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix, heads_of, replace_in_heads
from hydrajax.errors import HydrajaxError
from hydrajax.families.family import from_llama_config
from hydrajax.models.layout import Layout, base_layout, write
from hydrajax.models.llama import Llama

WHAT = "export"
MARK = "hydrajax_export"  # in config.json: the files of the directory, by which a later export knows its own
FORMATS = ("hydra", "medusa", "vllm-medusa", "native")


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
    """Save a base as ``config.json`` and ``model.safetensors`` in the layout of transformers.

    dtype: of the file; None keeps each parameter's own. tokenizer: anything with transformers' ``save_pretrained``.
    extra: more fields for config.json. An earlier export is replaced; a directory that holds anything else only with
    ``overwrite``, and then with all that is in it. The host holds the whole model once.

    Raises `HydrajaxError` if the directory may not be replaced or cannot be written.
    """
    if model.int8:
        raise HydrajaxError(f"{WHAT}: the base is quantised to int8, supported are float weights")
    c = model.config
    with _whole_directory(directory, overwrite) as folder:
        tensors = _cast(write(base_layout(c), params), dtype)
        save_safetensors(folder / "model.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        eos = (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None
        config = from_llama_config(c, WHAT) | {
            "torch_dtype": tensors["model.norm.weight"].dtype.name,
            "bos_token_id": getattr(tokenizer, "bos_token_id", None),
            "eos_token_id": eos,  # null too: transformers' default is id 2
        }
        _write_config(folder, config | (extra or {}))


def export_heads(
    directory: str | Path,
    drafter,
    params: Any,
    *,
    format: str | None = None,
    base_name: str = "",
    base_fingerprint: dict | None = None,
    story: dict[str, Any] | None = None,
    dtype=jnp.bfloat16,
    torch_file: bool = False,
    extra: dict | None = None,
    overwrite: bool = False,
) -> None:
    """Save draft heads with their ``config.json`` and a model card, ``README.md``.

    format: of `FORMATS`; None is hydra or medusa, as the heads are.
        hydra: what the released Hydra code reads, of `HydraHeads` (grounded) and of `MedusaHeads` with
            ``lm_head_bias`` (ungrounded); either may be in `WithPrefix`.
        medusa: what the released Medusa code and TGI read, of `MedusaHeads` without ``lm_head_bias``.
        vllm-medusa: vLLM's, of the same.
        native: an orbax directory, of any.
    base_fingerprint: `hydrajax.checkpoints.fingerprint.fingerprint` of the base; the heads then load onto no other.
    story: ``data``, ``recipe`` (texts) and ``tokens_per_step`` (a number or text), for the card and later exports.
    torch_file: write a ``.pt`` too, where torch is installed: the released code opens no other.

    A shared block is written once per application, as the official code does; the loader takes equal blocks for a
    shared one. The official files also hold copies of the base's embedding, which their code takes from the base
    anyway: they are left out. ``base_name`` becomes ``base_model_name_or_path``; the rest is as at `export_llama`.

    Raises `HydrajaxError` also for drafters that the format cannot express.
    """
    prefix = drafter.config if isinstance(drafter, WithPrefix) else None
    heads = heads_of(drafter)
    if not isinstance(heads, (HydraHeads, MedusaHeads)):
        _refuse(f"drafter is {type(heads).__name__}", "HydraHeads and MedusaHeads, also in WithPrefix")
    if format is None:
        format = "hydra" if isinstance(heads, HydraHeads) or heads.lm_head_bias else "medusa"
    if format not in FORMATS:
        raise HydrajaxError(f"{WHAT}: format is {format!r}, allowed are {', '.join(FORMATS)}")
    stem, config, layout = _LAYOUTS[format](heads, prefix) if format != "native" else ("", {}, [])
    config |= {"base_model_name_or_path": base_name}
    if base_fingerprint or story:
        config[RECORD] = {"base": base_fingerprint, "story": story or {}}
    with _whole_directory(directory, overwrite) as folder:
        if format == "native":
            own = heads.dtype if dtype is None else jnp.dtype(dtype)
            params = jax.tree.map(lambda x: np.asarray(x, own), params)
            config |= native_heads.save_native(folder, replace_in_heads(drafter, dtype=own), params)
        else:
            tensors = _cast(write(layout, params), dtype)
            if format == "vllm-medusa":
                config["torch_dtype"] = next(iter(tensors.values())).dtype.name
            save_safetensors(folder / f"{stem}.safetensors", tensors)
            if torch_file:
                save_torch(folder / f"{stem}.pt", tensors)
        (folder / "README.md").write_text(model_card(drafter, format, base_name, story or {}))
        _write_config(folder, config | (extra or {}))


def _hydra(heads, prefix) -> tuple[str, dict, Layout]:
    grounded = isinstance(heads, HydraHeads)
    if not grounded and not heads.lm_head_bias:
        what = "MedusaHeads without lm_head_bias"
        _refuse(f"drafter is {what if prefix is None else f'WithPrefix({what})'}", "Hydra heads, for format hydra")
    config = {
        "hydra_num_heads": heads.n_heads,
        "hydra_num_layers": heads.n_layers,
        "hydra_head_arch": "mlp" if prefix is None else "prefix-mlp",
        "grounded_heads": grounded,
        "hidden_state_offset": heads.hidden_state_offset,
    }
    return "hydra_lm_head", config, hydra_layout(heads, prefix)


def _medusa(heads, prefix) -> tuple[str, dict, Layout]:
    _check_medusa(heads, prefix)
    config = {"medusa_num_heads": heads.n_heads, "medusa_num_layers": heads.n_layers}
    return "medusa_lm_head", config, heads_layout(heads, medusa_naming(heads.n_layers))


def _vllm_medusa(heads, prefix) -> tuple[str, dict, Layout]:
    """The fields of vllm/transformers_utils/configs/medusa.py; any other name with "num" and "heads" or "layers" in it
    would be taken for one of them.
    """
    _check_medusa(heads, prefix)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.width,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.vocab_size,
        "num_heads": heads.n_heads,
        "num_hidden_layers": heads.n_layers,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    return "model", config, heads_layout(heads, VLLM_NAMING)


_LAYOUTS = {"hydra": _hydra, "medusa": _medusa, "vllm-medusa": _vllm_medusa}


def _check_medusa(heads, prefix) -> None:
    if prefix is not None or not isinstance(heads, MedusaHeads) or heads.lm_head_bias:
        kind = type(heads).__name__ if prefix is None else f"WithPrefix({type(heads).__name__})"
        bias = " with lm_head_bias" if getattr(heads, "lm_head_bias", False) else ""
        _refuse(f"drafter is {kind}{bias}", "MedusaHeads without lm_head_bias, for Medusa's formats")
    if heads.hidden_state_offset:
        _refuse(f"hidden_state_offset of Medusa heads is {heads.hidden_state_offset}", "0")


def _cast(tensors: dict[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, dtype) for name, x in tensors.items()}


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
    present = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    if not present or overwrite:
        return
    try:
        config = json.loads((target / "config.json").read_text())
        own = set(config[MARK]) | set(config.get("files", ()))
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    foreign = sorted(present - own)
    if foreign:
        raise HydrajaxError(
            f"{WHAT}: {target} holds files that are no earlier export, such as '{foreign[0]}'; name another directory"
        )


def _refuse(found: str, allowed: str):
    raise HydrajaxError(f"{WHAT}: {found}, the official layouts allow {allowed}")
