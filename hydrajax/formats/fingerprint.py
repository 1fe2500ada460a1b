"""Fingerprint of a base: its shapes and a hash of a few tensors. Heads record the fingerprint of their base."""

import hashlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import NORMS
from hydrajax.formats.checkpoint import MERGED, Checkpoint
from hydrajax.formats.tensors import expect_tensors
from hydrajax.models.llama_config import LlamaConfig

ROWS = 64  # of the embedding; these and the norms distinguish fine-tunes of one model


def fingerprint(base: Checkpoint | str | Path, what: str = "base", adapter: str | Path | None = None) -> dict[str, Any]:
    """Return ``{"shapes": {...}, "sha256": ...}``, and ``"adapter"`` with a hash of the adapter if there is one.

    Numbers are rounded to bfloat16 first, so the fingerprint does not depend on the stored dtype. A base into which an
    adapter was merged (`hydrajax.formats.export_base.export_merged`) has the fingerprint of base and adapter.
    """
    base, digest = Checkpoint.of(base, what), hashlib.sha256()
    config, files, layout = base.config, base.files, {entry.ours[0]: entry.theirs for entry in base.layout}
    last = config.n_layers - 1
    first_norm = next(iter(NORMS[config.of_layer(0).norms]))
    last_norm = {theirs: ours for ours, theirs in NORMS[config.of_layer(last).norms].items()}[
        "post_attention_layernorm" if config.kinds[last].mlp else "input_layernorm"
    ]
    paths = ("embedding",), ("layers_0", first_norm, "scale"), (f"layers_{last}", last_norm, "scale"), ("norm", "scale")
    if config.norm_scales == "none":
        paths = ("embedding",), ("layers_0", "out"), (f"layers_{last}", "out")
    wanted = {name: shape for path in paths for name, shape in layout[path].items()}
    expect_tensors(files, wanted, what, ignored=".*")
    for name in wanted:
        digest.update(np.asarray(files.read(name, ROWS), jnp.bfloat16).tobytes())
    found = {"shapes": shapes_of(config), "sha256": digest.hexdigest()}
    if adapter is not None:
        return found | {"adapter": base.adapter(adapter).sha256}
    merged = base.raw.get(MERGED)
    return found | ({} if merged is None else {"adapter": merged})


def shapes_of(config: LlamaConfig) -> dict[str, int]:
    """Return the shapes that a fingerprint has."""
    return {name: getattr(config, name) for name in ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads")}


def check_fingerprint(
    recorded: Any, name: str, base: Checkpoint | str | Path, what: str, adapter: str | Path | None = None
) -> None:
    """Refuse heads that record another base, ``name``, than this one with this adapter."""
    base = Checkpoint.of(base)
    mine, directory = fingerprint(base, adapter=adapter), base.directory
    if recorded == mine:
        return
    found = recorded if isinstance(recorded, dict) else {}
    if found.get("shapes") != mine["shapes"]:
        # Loading them anyway would fail.
        difference = f"shapes: got {mine['shapes']} in {directory}, expected {found.get('shapes')}"
    elif found.get("sha256") != mine["sha256"]:
        difference = f"{directory} has the same shapes but other weights"
    elif "adapter" not in mine:
        difference = f"they were trained with an adapter of {directory}: pass it as 'adapter'"
    elif "adapter" not in found:
        difference = f"they were made for {directory} without an adapter"
    else:
        difference = "they were trained with another adapter"
    force = "; 'force' loads them" if found.get("shapes") == mine["shapes"] else ""
    raise HydrajaxError(
        f"{what}: the heads were made for another base, {name or 'of unknown name'}: {difference}{force}"
    )
