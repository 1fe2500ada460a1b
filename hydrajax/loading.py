"""Load a draft, by name or directory, for a loaded base."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hydrajax.drafters.drafter import CORPUS, Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.quantized import quantized_draft
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats import native
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.hub import resolve
from hydrajax.formats.load import is_model, load_draft, load_own_heads
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.ops import trace
from hydrajax.sharding import Placement

SHARED, CLUSTERED = "shared", "clustered"  # ``draft_lm_head``


class LoadedBase(Protocol):
    """The attributes of a `hydrajax.LanguageModel` that a draft needs."""

    model: BaseModel
    params: Any
    tokenizer: Any
    placement: Placement
    base_directory: Path | None
    adapter_directory: Path | None


class LoadedDraft(NamedTuple):
    """A drafter, its parameters, and the directory they were loaded from (None without weights)."""

    drafter: Drafter
    params: Any
    directory: Path | None = None


def find_draft(
    draft: DraftRef,
    m: LoadedBase,
    *,
    base_directory: Checkpoint | str | Path | None = None,
    confidence: float | None = None,
    corpus: int | None = None,
    lm_head: str | None = None,
) -> LoadedDraft:
    """Load a draft for a base.

    Args:
        base_directory: of the base, or its checkpoint, to reject heads that record another base; None accepts them.
        confidence: for a draft model (`hydrajax.drafters.draft_model.DraftModel`) or a draft with a confidence head
            (`hydrajax.drafters.dspark.DSpark`).
        corpus: tokens of a suffix corpus; None for the default size.
        lm_head: `hydrajax.load`'s ``draft_lm_head``.

    Raises:
        HydrajaxError: for a draft that is missing, damaged or made for another base, and for settings that need a draft
            model if the draft is another kind.
    """
    inner = LoadedDraft(NoDrafter(), {})
    if draft.name is not None or not draft.sources:
        inner = _one_draft(draft, m, base_directory, confidence)
    inner = _with_lm_head(inner, m, lm_head)
    drafter, params = draft.wrap(inner.drafter), inner.params
    if drafter.spec.remembers:
        from hydrajax.drafters.corpus import TOKENS, Corpus

        tokens = TOKENS if corpus is None else corpus
        params = {**params, CORPUS: Corpus(tokens, lambda x: m.placement.place_base(x, None))}
    return LoadedDraft(drafter, params, inner.directory)


def _one_draft(ref: DraftRef, m: LoadedBase, base_directory, confidence: float | None) -> LoadedDraft:
    """Load a draft without the sources of text next to it."""
    model, placement, directory, params = m.model, m.placement, None, {}
    if ref.is_own:
        own = base_directory if isinstance(base_directory, Checkpoint) else m.base_directory or base_directory
        if own is None:
            raise HydrajaxError(f"draft: got '{ref.name}', which needs a base that was loaded from a directory")
        own = Checkpoint.of(own)
        directory = own.directory
        drafter, params = load_own_heads(own, model.config, model.dtype, mesh=placement.base)
    elif ref.name is not None:
        directory = resolve(ref.name, "draft", model.config)
        draft = Checkpoint(directory, "draft")
        if is_model(draft):
            return _draft_model(draft, m, confidence)
        drafter, params = load_draft(
            draft, model.config, model.dtype,
            base_directory=base_directory, adapter=m.adapter_directory, mesh=placement.base,
        )  # fmt: skip
        if model.quantize is None and trace.has_few_bits() and native.is_int8(draft.raw):
            params = in_int8(drafter, params, BoundBase(model, m.params.base))
    else:
        drafter = ref.kind.build(model.config, model.dtype) if ref.kind else ref.drafter
    if confidence is not None and getattr(drafter, "confidence_head", None):
        drafter, confidence = dataclasses.replace(drafter, confidence=confidence), None
    for_models = {
        "shard_draft": placement.shard_draft,
        "draft_confidence": confidence is not None,
        "draft_devices": placement.split and not isinstance(drafter, NoDrafter),
    }
    for name, given in for_models.items():
        if given:
            also = " or DSpark with a confidence head" if name == "draft_confidence" else ""
            raise HydrajaxError(f"{name}: requires a draft model{also}, got {title_of(drafter)}")
    return LoadedDraft(drafter, quantized_draft(params, model.quantize), directory)


def _with_lm_head(draft: LoadedDraft, m: LoadedBase, wanted: str | None) -> LoadedDraft:
    """Return a draft that reads the base's lm head with its copy, or its clusters, if it has one."""
    drafter, params, directory = draft
    kind, dash, number = (wanted or "").partition("-")
    if wanted is not None and (kind not in (SHARED, CLUSTERED) or (dash and not number.isdecimal())):
        raise not_allowed("draft_lm_head", wanted, (SHARED, CLUSTERED, f"{CLUSTERED}-N"))
    if not drafter.spec.shared_lm_head:
        if wanted is not None:
            raise HydrajaxError(f"draft_lm_head: requires a draft with the base's lm head, got {title_of(drafter)}")
        return draft
    base = BoundBase(m.model, m.params.base)
    if kind == CLUSTERED or (not kind and drafter.lm_head.clustered):
        if m.placement.base is not None:
            raise HydrajaxError(f"draft_lm_head: got {CLUSTERED}, expected {SHARED} on several devices")
        params = drafter.lm_head.with_clusters(params, base, int(number) if number else None)
    elif m.model.quantize is not None and trace.has_few_bits():
        # A program that selects the tokens from the base's lm head does so in every call.
        params = {**params, **in_int8(drafter, {}, base)}
    return LoadedDraft(drafter, params, directory)


def _draft_model(draft: Checkpoint, m: LoadedBase, confidence: float | None) -> LoadedDraft:
    from hydrajax.formats.draft_model_format import load_draft_model  # most drafts are no models

    drafter, params = load_draft_model(
        draft, m.model, m.params.base, m.tokenizer,
        confidence=confidence or 0.0, place=m.placement.place_draft_model,
    )  # fmt: skip
    if m.placement.base is not None and not m.placement.split and not m.placement.shard_draft:
        drafter = dataclasses.replace(drafter, copied=True)
    return LoadedDraft(drafter, quantized_draft(params, m.model.quantize), draft.directory)


def in_int8(drafter: Drafter, params: Any, base: BoundBase) -> Any:
    """Return the parameters of heads as the CPU kernels for int8 read them (`hydrajax.ops.trace.has_few_bits`).

    A draft need not be exact, so the base's type does not matter.
    """
    return quantized_draft(drafter.lm_head.with_copy(params, base), "int8")
