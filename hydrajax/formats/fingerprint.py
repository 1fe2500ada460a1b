"""Which base some heads were made for: shapes and a hash of a few tensors, read from its directory."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.formats.huggingface import MERGED, read_config
from hydrajax.formats.peft import load_adapter
from hydrajax.formats.tensors import expect_tensors, open_tensors, read_json
from hydrajax.models.layout import MODEL

ROWS = 64  # of the embedding; it and the norms tell fine-tunes of one model apart


def fingerprint(directory: str | Path, what: str = "base", adapter: str | Path | None = None) -> dict[str, Any]:
    """``{"shapes": {...}, "sha256": ...}`` of a base in a Hugging Face directory.

    A base with an ``adapter``, a directory, also has the sha256 of that, ``"adapter"``; so has one into whose weights
    the adapter was merged (`hydrajax.formats.huggingface.export_merged`), which is the same model. No adapter changes
    the tensors that are looked at.

    Numbers are rounded to bfloat16 first, so that a model saved in another dtype is the same model. Raises
    `HydrajaxError`, beginning with ``what``, for files that are missing, damaged or not a base's.
    """
    config = read_config(directory, what)
    files, digest = open_tensors(Path(directory), MODEL, what), hashlib.sha256()
    wanted = {
        "model.embed_tokens.weight": (config.vocab_size, config.width),
        "model.layers.0.input_layernorm.weight": (config.width,),
        f"model.layers.{config.n_layers - 1}.post_attention_layernorm.weight": (config.width,),
        "model.norm.weight": (config.width,),
    }
    expect_tensors(files, wanted, what, ignored=re.compile(".*", re.DOTALL))
    for name in wanted:
        digest.update(np.asarray(files.read_first(name, ROWS), jnp.bfloat16).tobytes())
    shapes = {name: getattr(config, name) for name in ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads")}
    found = {"shapes": shapes, "sha256": digest.hexdigest()}
    if adapter is not None:
        return found | {"adapter": load_adapter(adapter, config).sha256}
    merged = read_json(Path(directory) / "config.json", what).get(MERGED)
    return found | ({} if merged is None else {"adapter": merged})


def check_fingerprint(recorded: Any, name: str, directory: Path, what: str, adapter: str | Path | None = None) -> None:
    """Refuse heads whose record is of another base than the one in ``directory``, with this adapter if one is given."""
    mine = fingerprint(directory, adapter=adapter)
    if recorded == mine:
        return
    found = recorded if isinstance(recorded, dict) else {}
    if found.get("shapes") != mine["shapes"]:
        difference = f"its shapes are {found.get('shapes')}, those of {directory} {mine['shapes']}"
    elif found.get("sha256") != mine["sha256"]:
        difference = f"{directory} has the same shapes but other weights"
    elif "adapter" not in mine:
        difference = f"they were trained with an adapter, which {directory} alone does not have: name it ('adapter')"
    elif "adapter" not in found:
        difference = f"they were made for {directory} without an adapter"
    else:
        difference = "they were trained with another adapter"
    raise HydrajaxError(
        f"{what}: the heads were made for another base, {name or 'of unknown name'}: {difference}; 'force' loads them"
    )
