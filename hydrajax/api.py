"""`load` and `make_decode_fn`: from names on disk to a model that decodes, for notebooks and the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding import decode
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.keywords import Rule, with_keywords
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import beside_lookup, without_weights
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import Progress, eos_ids, load_llama
from hydrajax.language_model import LanguageModel, Tree
from hydrajax.models.base_model import BaseModel
from hydrajax.models.weights import QUANTIZED
from hydrajax.sharding import Placement
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.trees import presets

AUTO = "auto"
NO_DRAFT = "none"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def make_decode_fn(
    model: BaseModel | LanguageModel,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    rule: Rule | None = None,
    *,
    processors: Sequence[Any] = (),
    max_new_tokens: int = 256,
    eos_ids: Sequence[int] | None = None,
    logprobs: int | bool | None = None,
) -> Callable[..., DecodeResult]:
    """Build ``decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None)``, jitted.

    Args:
        model: the result of `load`, whose drafter, tree and EOS ids are then the defaults: ``make_decode_fn(m)``. Or a
            base model by itself, with a drafter and a tree; generation then ends at no id unless ``eos_ids`` has some.
        drafter: proposes candidates; its parameters are ``params.draft``.
        tree: also by name, such as ``"chain-2"``.
        rule: also by name, such as ``"exact"``; greedy by default.
        processors: logits processors (`hydrajax.decoding.processors`).
        max_new_tokens: the most new tokens of a row.
        eos_ids: token ids that end a row.
        logprobs: K, to return the log-probability of each token and the K most likely tokens in its place; 0 or True
            for the tokens alone.

    Returns:
        The function. Its arguments and result: `hydrajax.decoding.decode.make_decode_fn`.

    Raises:
        HydrajaxError: for parts that do not fit together, and for a model whose draft has devices of its own: base and
            draft are then several programs, which ``m.executor().decode(prompt, lengths)`` runs.
    """
    if isinstance(model, LanguageModel):
        if model.placement.split and drafter is None:
            raise HydrajaxError("placement: a draft with devices of its own needs m.executor(spec).decode(prompt)")
        drafter = model.drafter if drafter is None else drafter
        tree = model.default_tree() if tree is None else tree
        eos_ids = model.eos_ids if eos_ids is None else eos_ids
        model = model.model
    if drafter is None or tree is None:
        missing = "drafter" if drafter is None else "tree"
        raise HydrajaxError(f"{missing}: is needed with a base model alone; what hydrajax.load gives brings its own")
    spec = DecodeSpec(
        drafter,
        presets.tree_of(tree),
        max_new_tokens=max_new_tokens,
        eos_ids=tuple(eos_ids or ()),
        logprobs=logprobs,
    )
    return decode.make_decode_fn(model, with_keywords(spec, rule, processors))


def make_autoregressive_fn(model: BaseModel, rule: Rule | None = None, **keywords: Any) -> Callable[..., DecodeResult]:
    """Build the baseline: the same engine with a one-node tree. Pass ``Params(base, {})``; see `make_decode_fn`."""
    return make_decode_fn(model, NoDrafter(), presets.root(), rule, **keywords)


def load(
    base: str | Path,
    draft: Drafter | str | Path | None = None,
    *,
    dtype: Any = AUTO,
    placement: Placement | Mesh | None = None,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    merge: bool = False,
    force: bool = False,
    draft_confidence: float | None = None,
    on_progress: Progress = lambda done, total: None,
) -> LanguageModel:
    """Load a base and, optionally, a drafter.

    JAX's compilation cache on disk is then on for the whole process (`hydrajax.compilation.use_compilation_cache` says
    where, and how to change that).

    Args:
        base: a Hugging Face directory (``config.json`` and weights; the tokenizer if it holds one), a repository on the
            Hub, ``org/name`` or ``org/name@revision``, or ``"shipped"``, the small model that comes with the package.
        draft: a directory or repository of heads (`hydrajax.formats.load`), or of a small model of any family
            with the base's tokenizer (`hydrajax.formats.draft_model_format`); the name of a drafter without weights
            (`hydrajax.formats.draft_registry`); ``"medusa"``, ``"hydra"`` or ``"hydra++"`` of the shipped base; heads
            or a model after ``"lookup+"``, with lookup's chain as one more branch of their trees
            (``"lookup-8+hydra"``: of 8 nodes; `hydrajax.drafters.with_lookup`); a `Drafter` without weights; or None
            to decode autoregressively.
        dtype: ``"float32"`` or ``"bfloat16"`` (or ``jnp.bfloat16``), of parameters, cache and matmuls; the model's
            ``dtype`` then tells which. ``"auto"`` is float32 on a CPU, elsewhere what most of the base's numbers are
            stored in, with bfloat16 for float16 (`hydrajax.formats.huggingface.default_dtype` says why).
        placement: the devices of base and draft (`hydrajax.sharding.Placement`). A mesh (`hydrajax.sharding.make_mesh`)
            shards the base over it and copies the draft to every device. None is the default device.
        quantize: ``"int8"`` keeps the base's matmul weights in one byte each: half of bfloat16's memory, other logits.
        adapter: a LoRA of the base in PEFT's format, a directory or repository (`hydrajax.formats.peft`). Its
            low-rank weights are kept beside the base's and take part in every forward pass.
        merge: add the adapter to the base's weights instead, before these are quantised; a step then costs what it
            costs without an adapter. The sums are rounded to ``dtype``, so the logits are not bit for bit the same.
        force: load heads that record another base, or the base with another adapter.
        draft_confidence: for a draft model, from 0 up and below 1: stop drafting below tokens whose draft probability
            is less (`hydrajax.drafters.draft_model.DraftModel`).
        on_progress: called with how many of the base's numbers have been loaded, and of how many.

    Returns:
        The model.

    Raises:
        HydrajaxError: for anything missing, damaged, unsupported or made for another base.
    """
    name = _dtype_name(dtype)
    if name not in (AUTO, *DTYPES):
        raise not_allowed("dtype", name, (AUTO, *DTYPES))
    if quantize not in (None, *QUANTIZED):
        raise not_allowed("quantize", quantize, QUANTIZED)
    if merge and adapter is None:
        raise HydrajaxError("merge: means nothing without an adapter")
    placement = placement if isinstance(placement, Placement) else Placement(placement)
    if placement.split and draft in (None, NO_DRAFT):
        raise HydrajaxError("draft_devices: is for a draft model, found no draft")
    use_compilation_cache()
    base = resolve(base, "base")
    if adapter is not None:
        adapter = resolve(adapter, "adapter")
    if beside := beside_lookup(draft):
        resolve(beside.draft, "draft")  # refused before gigabytes are read
    elif isinstance(draft, (str, Path)) and not without_weights(draft):
        draft = resolve(draft, "draft")
    model, params = load_llama(
        base,
        DTYPES.get(name),  # None for "auto"
        placement.place_base,
        quantize=quantize,
        adapter=adapter,
        merge=merge,
        on_progress=on_progress,
    )
    m = LanguageModel(
        model,
        NoDrafter(),
        Params(params, {}),
        load_tokenizer(base),
        eos_ids(base),
        placement,
        adapter_directory=adapter,
    )
    if draft is None and draft_confidence is None and not placement.shard_draft:
        return m
    return m.with_draft(
        NO_DRAFT if draft is None else draft,
        base_directory=None if force else base,
        draft_confidence=draft_confidence,
    )


def _dtype_name(dtype: Any) -> str:
    """Of a dtype that is named, or given as NumPy's and JAX's are."""
    try:
        return str(dtype) if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)
