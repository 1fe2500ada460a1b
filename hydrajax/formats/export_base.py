"""Write a base in a Hugging Face directory: ``config.json`` and weights as safetensors."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config
from hydrajax.families.tensor_names import in_files
from hydrajax.formats.checkpoint import MERGED, Checkpoint
from hydrajax.formats.directories import WHAT as EXPORT
from hydrajax.formats.directories import cast, exported
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.tensors import save_safetensors
from hydrajax.models.layout import MODEL, write
from hydrajax.models.llama import Llama


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
    """Save a base in transformers' format: the inverse of `load_llama`, bit for bit. Replaces an earlier export.

    Args:
        tokenizer: anything with transformers' ``save_pretrained``.
        dtype: of the file; None keeps each parameter's own.
        eos_ids: the ids that end generation, for ``config.json``.
        extra: more fields for ``config.json``.
        overwrite: replace a directory with any content.

    Raises:
        HydrajaxError: the base is quantised or has an adapter, or the directory may not be replaced or written.
    """
    if model.quantize:
        raise HydrajaxError(f"{EXPORT}: quantize: got a base in {model.quantize}, expected float weights")
    if model.adapter:
        raise HydrajaxError(f"{EXPORT}: adapter: got a base with an adapter; merge it first")
    with exported(directory, overwrite) as (folder, config):
        tensors = cast(write(base_layout(model.config), params), dtype)
        save_safetensors(folder / f"{MODEL}.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        eos = (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None
        config |= from_llama_config(model.config, EXPORT) | {
            "torch_dtype": tensors[in_files("model.embed_tokens.weight", model.config)].dtype.name,
            "bos_token_id": getattr(tokenizer, "bos_token_id", None),
            "eos_token_id": eos,  # written even if null, as transformers' default is id 2
        }
        config |= extra or {}


def export_merged(
    directory: str | Path, base: str | Path, adapter: str | Path, *, dtype=None, overwrite: bool = False
) -> None:
    """Save a base with an adapter merged into its weights, for transformers and ``--base``.

    Args:
        dtype: Of the file, to which the float32 sums are rounded; None for the base's main one. See `export_llama`.
    """
    base = Checkpoint(base)
    # Stays on the host, as nothing is computed with it.
    model, params = load_llama(
        base, dtype or base.dtype, lambda array, _: np.asarray(array), adapter=adapter, merge=True
    )
    extra = {MERGED: base.adapter(adapter).sha256}
    export_llama(
        directory, model, params, tokenizer=base.tokenizer(), dtype=model.dtype, eos_ids=base.eos_ids,
        extra=extra, overwrite=overwrite,
    )  # fmt: skip
