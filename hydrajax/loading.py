"""Load a draft, by name or directory, for a loaded base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from hydrajax.drafters.corpus import NAME, TOKENS, Corpus
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.several import Several
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_model_format import is_model, load_draft_model
from hydrajax.formats.draft_registry import naming_corpus, parse_several, title_of, without_weights
from hydrajax.formats.hub import resolve
from hydrajax.formats.load import load_draft, load_own_heads, names_own_heads, stored_in_int8
from hydrajax.lowbit.types import quantized_draft
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.ops import trace
from hydrajax.sharding import Placement


class LoadedDraft(NamedTuple):
    """A drafter, its parameters, and the directory they were loaded from (None without weights)."""

    drafter: Drafter
    params: Any
    directory: Path | None = None


def find_draft(
    draft: Drafter | str | Path,
    model: BaseModel,
    base_params: Any,
    tokenizer: Any,
    placement: Placement,
    *,
    base_directory: str | Path | None = None,
    adapter_directory: Path | None = None,
    confidence: float | None = None,
    own_directory: Path | None = None,
    corpus: int | None = None,
) -> LoadedDraft:
    """Load a draft for a base.

    Args:
        draft: as in `hydrajax.load`.
        model: the base.
        base_params: its parameters.
        tokenizer: its tokenizer, None if it has none.
        placement: devices of the base and the draft.
        base_directory: the base's directory, to reject heads that record another base; None accepts them.
        adapter_directory: the directory of the base's adapter, which heads may record too.
        confidence: for a draft model (`hydrajax.drafters.draft_model.DraftModel`) or a draft with a confidence head
            (`hydrajax.drafters.dspark.DSpark`).
        own_directory: the base's directory, which may have an MTP module (the draft ``mtp``); None if unknown.
        corpus: tokens of a suffix corpus, which is added if the draft names none; None for the default size of a named
            one.

    Raises:
        HydrajaxError: for a draft that is missing, damaged or made for another base, and for settings that need a draft
            model if the draft is another kind.
    """
    if corpus is not None:
        draft = naming_corpus(draft)
    if several := parse_several(draft):
        inner = LoadedDraft(NoDrafter(), {})
        if several.draft is not None:
            inner = find_draft(
                several.draft, model, base_params, tokenizer, placement,
                base_directory=base_directory, adapter_directory=adapter_directory, confidence=confidence,
                own_directory=own_directory,
            )  # fmt: skip
        drafter, params = several.wrap(inner.drafter), inner.params
        if isinstance(drafter, Several):
            params = {"draft": params}
        return LoadedDraft(drafter, _remembering(drafter, params, corpus, placement), inner.directory)
    directory, params = None, {}
    if kind := without_weights(draft):
        draft = kind.build(model.config, model.dtype)
        params = _remembering(draft, params, corpus, placement)
    if names_own_heads(draft):
        directory = base_directory if own_directory is None else own_directory
        if directory is None:
            raise HydrajaxError(f"draft: got '{draft}', which needs a base that was loaded from a directory")
        directory = Path(directory)
        draft, params = load_own_heads(directory, model.config, model.dtype, mesh=placement.base)
    if isinstance(draft, (str, Path)):
        directory = resolve(draft, "draft", model.config)
        if is_model(directory):
            loaded = load_draft_model(
                directory, model, base_params, tokenizer,
                confidence=confidence or 0.0, place=placement.place_draft_model,
            )  # fmt: skip
            drafter, params = loaded
            if placement.base is not None and not placement.split and not placement.shard_draft:
                drafter = dataclasses.replace(drafter, copied=True)
            return LoadedDraft(drafter, quantized_draft(params, model.quantize), directory)
        draft, params = load_draft(
            directory, model.config, model.dtype,
            base_directory=base_directory, adapter=adapter_directory, mesh=placement.base,
        )  # fmt: skip
        if model.quantize is None and trace.has_few_bits() and stored_in_int8(directory):
            params = in_int8(draft, params, BoundBase(model, base_params))
    if confidence is not None and getattr(draft, "confidence_head", None):
        draft, confidence = dataclasses.replace(draft, confidence=confidence), None
    for_models = {
        "shard_draft": placement.shard_draft,
        "draft_confidence": confidence is not None,
        "draft_devices": placement.split and not isinstance(draft, NoDrafter),
    }
    for name, given in for_models.items():
        if given:
            also = " or DSpark with a confidence head" if name == "draft_confidence" else ""
            raise HydrajaxError(f"{name}: requires a draft model{also}, got {title_of(draft)}")
    return LoadedDraft(draft, quantized_draft(params, model.quantize), directory)


def _remembering(drafter: Drafter, params: Any, tokens: int | None, placement: Placement) -> Any:
    """Return a draft's parameters with an empty corpus, if it drafts from one."""
    if not drafter.spec.remembers:
        return params
    return {**params, NAME: Corpus(TOKENS if tokens is None else tokens, lambda x: placement.place_base(x, None))}


def in_int8(drafter: Drafter, params: Any, base: BoundBase) -> Any:
    """Return the parameters of heads as the CPU kernels for int8 read them (`hydrajax.ops.trace.has_few_bits`).

    A draft need not be exact, so the base's type does not matter. With SmolLM2 in float32 on 2 cores of an Intel Xeon,
    a step with its Hydra++ heads takes 28.7 ms in place of 31.1.
    """
    return quantized_draft(drafter.lm_head.with_copy(params, base), "int8")
