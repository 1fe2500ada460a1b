"""`load_draft`: draft heads in any format that we read, told apart by their ``config.json`` and file names."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from hydrajax.checkpoints.fingerprint import check_fingerprint
from hydrajax.checkpoints.heads import native as native_heads
from hydrajax.checkpoints.heads import released as official_heads
from hydrajax.checkpoints.tensors import check_directory, holds_model, open_model, read_json
from hydrajax.errors import HydrajaxError
from hydrajax.models.config import LlamaConfig

WHAT = "--draft"
RECORD = "hydrajax"  # the field of an exported config.json that says what the heads were made for, and how
SUPPORTED = (
    "released Hydra (hydra_lm_head, with 'hydra_num_heads'), Medusa v1 (medusa_lm_head, with 'medusa_num_heads'), "
    "Medusa-2 (medusa_head. beside a base), vLLM's Medusa (model_type 'medusa'), hydrajax's own ('hydrajax_draft')"
)


def load_draft(
    directory: str | Path, base: LlamaConfig, dtype=jnp.float32, *, base_directory: str | Path | None = None
):
    """``(drafter, draft_params)`` for a base of this configuration.

    dtype: of parameters and computation; None keeps that of the files.
    base_directory: where that base lies. Heads that know which base they were made for are then refused for another;
        most released ones do not know.

    Raises `HydrajaxError` for anything missing, damaged, unsupported or made for another base.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    config = read_json(directory / "config.json", WHAT)
    load = _loader(directory, config)
    record = config.get(RECORD)
    if base_directory is not None and isinstance(record, dict) and record.get("base"):
        name = str(config.get("base_model_name_or_path") or "")
        check_fingerprint(record["base"], name, Path(base_directory), f"{WHAT}: {directory}")
    return load(directory, config, base, None if dtype is None else jnp.dtype(dtype))


def _loader(directory: Path, config: dict):
    if native_heads.MARK in config:
        return native_heads.load_native
    if "hydra_num_heads" in config:
        return official_heads.load_hydra
    if "medusa_num_heads" in config:
        return official_heads.load_medusa
    if config.get("model_type") == "medusa":
        return official_heads.load_vllm_medusa
    names = set(open_model(directory, WHAT)) if holds_model(directory) else set()
    if any(name.startswith(official_heads.MEDUSA_2) for name in names):
        return official_heads.load_medusa
    if config.get("model_type") == "eagle" or "fc.weight" in names:
        # EAGLE-3 reads three layers of the base at once and maps a smaller vocabulary.
        third = "d2t" in names or any(name.startswith("midlayer.") for name in names)
        raise HydrajaxError(f"{WHAT}: {directory} holds {'EAGLE-3' if third else 'EAGLE'} heads, which do not load yet")
    raise HydrajaxError(f"{WHAT}: {directory} is no directory of draft heads that loads; those are: {SUPPORTED}")
