"""A small model from its own directory, as the draft of a base that says the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from hydrajax.drafters.draft_model import DraftModel, check_confidence
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import FAMILIES
from hydrajax.files import check_directory
from hydrajax.formats import native
from hydrajax.formats.draft_registry import FORMATS
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.tensors import holds, open_tensors, read_json
from hydrajax.models.base_model import BaseModel
from hydrajax.models.layout import MODEL
from hydrajax.text.tokenizer import difference, load_tokenizer, token_ids

WHAT = "draft"
LAST_NORM = "model.norm.weight"  # every model of a family has it, and no heads do


def is_model(directory: str | Path) -> bool:
    """Whether a directory holds a whole model of a known family and no draft heads.

    Heads may have a ``config.json`` like a model's (EAGLE), or be in one file with their base (Medusa-2). Raises
    `HydrajaxError` where there is no directory, no ``config.json`` or a damaged file.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    config = read_json(directory / "config.json", WHAT)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES or native.MARK in config:
        return False
    if any(format.recognises(config, set()) for format in FORMATS) or not holds(directory, MODEL):
        return False
    names = set(open_tensors(directory, MODEL, WHAT))
    return LAST_NORM in names and not any(format.recognises(config, names) for format in FORMATS)


def load_draft_model(
    directory: str | Path,
    base: BaseModel,
    base_params: Any,
    tokenizer: Any | None = None,
    *,
    confidence: float = 0.0,
    place: Callable | None = None,
) -> tuple[DraftModel, dict]:
    """Load ``(drafter, draft_params)`` for this base, in its dtype.

    tokenizer: the base's, None if it has none. confidence: see `hydrajax.drafters.draft_model.DraftModel`. place: as in
    `hydrajax.formats.huggingface.load_llama`.

    The two tokenizers must have the same map from tokens to ids; the models' vocabularies may be larger, as padded ones
    are. Where one of them has no tokenizer the vocabularies must be of one size. Warns of a draft that is larger than
    the base. Raises `HydrajaxError` for a draft of another tokenizer, and for anything missing, damaged or unsupported.
    """
    directory = Path(directory)
    config = read_config(directory, WHAT)
    own = load_tokenizer(directory, WHAT)
    if tokenizer is not None and own is not None:
        found = difference(token_ids(tokenizer), token_ids(own), "the base", "the draft")
        if found:
            raise HydrajaxError(f"{WHAT}: {directory} has another tokenizer than the base: {found}")
    elif config.vocab_size != base.config.vocab_size:
        lacks = "the base" if tokenizer is None else "the draft"
        raise HydrajaxError(
            f"{WHAT}: {directory} has a vocabulary of {config.vocab_size} tokens, the base one of "
            f"{base.config.vocab_size}; other sizes are allowed where the tokenizers are the same, and {lacks} has none"
        )
    check_confidence(confidence)
    model, params = load_llama(directory, base.dtype, place, what=WHAT)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(some)) for some in (params, base_params)]
    if sizes[0] > sizes[1]:
        warnings.warn(
            f"hydrajax: {WHAT}: {directory} has {sizes[0]:,} parameters, more than the base's {sizes[1]:,}; every "
            "token it drafts costs more than one of the base's own",
            stacklevel=2,
        )
    return DraftModel(model, base.config.vocab_size, confidence=confidence), params
