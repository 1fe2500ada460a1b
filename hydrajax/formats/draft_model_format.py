"""A small model in its own directory as the draft of a base with the same tokenizer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from hydrajax.drafters.draft_model import DraftModel, check_confidence, check_layers
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.base_model import BaseModel
from hydrajax.text.tokenizer import difference, token_ids

WHAT = "draft"


def load_draft_model(
    draft: Checkpoint | str | Path,
    base: BaseModel,
    base_params: Any,
    tokenizer: Any | None = None,
    *,
    confidence: float = 0.0,
    place: Callable | None = None,
) -> tuple[DraftModel, dict]:
    """Load ``(drafter, draft_params)`` in the base's dtype. Warns if the draft is larger than the base.

    Args:
        tokenizer: the base's, None if it has none. Both tokenizers must map tokens to the same ids, while the models'
            vocabularies may be padded differently. If either has no tokenizer, the vocabularies must have equal size.
        confidence: as in `hydrajax.drafters.draft_model.DraftModel`.
        place: as in `hydrajax.formats.huggingface.load_llama`.

    Raises:
        HydrajaxError: another tokenizer, or anything missing, damaged or unsupported.
    """
    draft = Checkpoint.of(draft, WHAT)
    config, own, directory = draft.config, draft.tokenizer(), draft.directory
    if tokenizer is not None and own is not None:
        found = difference(token_ids(tokenizer), token_ids(own), "the base", "the draft")
        if found:
            raise HydrajaxError(f"{WHAT}: {directory} has another tokenizer than the base: {found}")
    elif config.vocab_size != base.config.vocab_size:
        lacks = "the base" if tokenizer is None else "the draft"
        raise HydrajaxError(
            f"{WHAT}: {directory}: vocab_size: got {config.vocab_size}, expected the base's {base.config.vocab_size}; "
            f"other sizes need equal tokenizers, and {lacks} has none"
        )
    check_confidence(confidence)
    check_layers(config)
    model, params = load_llama(draft, base.dtype, place)
    size, base_size = (sum(leaf.size for leaf in jax.tree.leaves(some)) for some in (params, base_params))
    if size > base_size:
        warnings.warn(
            f"hydrajax: {WHAT}: {directory} has {size:,} parameters, more than the base's {base_size:,}; each draft "
            "token costs more than a token of the base",
            stacklevel=2,
        )
    return DraftModel(model, base.config.vocab_size, confidence=confidence), params
