"""Drafters with one of several draft lm heads, to compare what each costs."""

from __future__ import annotations

import dataclasses

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel

# The released one, the base's own, a product of rank 512, and one of 8000 tokens.
LM_HEADS = {"full": None, "shared": LmHead(shared=True), "low-rank": LmHead(rank=512)}
LM_HEADS |= {"reduced": LmHead(vocabulary=Vocabulary(range(8000)))}


def drafter_for(model: BaseModel, kind: str, lm_head: str = "full") -> Drafter:
    """Return a drafter of a kind in `hydrajax.formats.draft_registry.KINDS` with one of `LM_HEADS`.

    Raises:
        HydrajaxError: the drafter has no choice of lm heads.
    """
    drafter, chosen = KINDS[kind].build(model.config, model.dtype), LM_HEADS[lm_head]
    if chosen is None:
        return drafter
    if "small_lm_head" not in {field.name for field in dataclasses.fields(drafter)}:
        raise HydrajaxError(f"lm_head: got '{lm_head}', expected full: {KINDS[kind].title} has no other")
    return dataclasses.replace(drafter, small_lm_head=chosen)
