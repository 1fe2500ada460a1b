"""`load`: from names on disk to a model that decodes, for notebooks and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from hydrajax.bundle import Bundle
from hydrajax.chat import Chat
from hydrajax.checkpoints.base import Progress, eos_ids, load_llama
from hydrajax.checkpoints.draft_model import is_model, load_draft_model
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.checkpoints.hub import resolve
from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding import decode
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.prompts import right_padded
from hydrajax.decoding.rules import Numbers, one_rule, rules_for
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.registry import beside_lookup, title_of, without_weights
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.generation import Stream, generate, stream
from hydrajax.measure.fastest import choose
from hydrajax.measure.way import baseline_rule
from hydrajax.models.base import BaseModel
from hydrajax.sharding import last_devices, placer
from hydrajax.ssd.decode import are_apart, make_apart_fn
from hydrajax.ssd.fan_out import FanOut
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import Prompt, is_conversation
from hydrajax.text.tokenizer import decode_text, load_tokenizer
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

AUTO = "auto"
NO_DRAFT = "none"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
QUANTIZED = ("int8",)

Conversation = Sequence[Mapping[str, str]]
OnePrompt = str | Sequence[int] | Conversation | Prompt
Tree = CandidateTree | str | Path | Sequence[Sequence[int]]
Rule = AcceptanceRule | str


class Settings(Numbers, total=False):
    """The keywords of `Loaded.generate`, for type checkers."""

    draft: Drafter | str | Path | None
    tree: Tree | None
    rule: Rule | Sequence[AcceptanceRule] | None
    max_new_tokens: int | Sequence[int]
    stop: Sequence[str]
    batch_size: int
    seed: int | Sequence[int] | None
    logprobs: bool
    top_logprobs: int
    on_status: Callable[[str], None] | None


@dataclass(eq=False, repr=False)
class Loaded(Bundle):
    """A base with its drafter, as `load` gives it. What its methods take as text means what it means to the commands.

    ``generate``, ``stream`` and ``chat`` share these arguments:

    tree: a tree, a name such as ``"chain-2"``, a file or a list of choices. None takes the fastest on this device, as
        the commands do: what was searched or measured here before, else a few small trees are timed at the first use,
        which takes some seconds and is said in one line on stderr (`hydrajax.measure.fastest`).
    draft: another draft than the loaded one: what `load` takes, such as ``"lookup"`` or ``"none"``. Kept once loaded.
    rule, numbers: a rule, or its name (greedy, exact, typical, rejection) with its numbers: ``temperature=0.7``.
    seed: of what a rule draws; None draws one. The result's ``seed`` says which it was.
    """

    adapter_directory: Path | None = None  # of the base's adapter, also of one that was merged
    _drafts: dict = field(default_factory=dict)  # other drafts of the same base, by name
    _fastest: dict = field(default_factory=dict)  # what was found for so many rows and a kind of rule

    @overload
    def generate(self, prompts: str | Prompt, **settings: Unpack[Settings]) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[OnePrompt], **settings: Unpack[Settings]) -> list[Generation]: ...

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        rule: Rule | Sequence[AcceptanceRule] | None = None,
        max_new_tokens: int | Sequence[int] = 256,
        stop: Sequence[str] = (),
        batch_size: int = 1,
        seed: int | Sequence[int] | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        on_status: Callable[[str], None] | None = None,
        **numbers: Unpack[Numbers],
    ) -> Generation | list[Generation]:
        """Texts from prompts: ``m.generate("def area(")``, or a list of prompts for a list of results.

        prompts: one text, or a list of prompts: texts, lists of token ids, or conversations (lists of messages with
            ``role`` and ``content``, in the tokenizer's chat template).
        batch_size: prompts that are decoded at once.
        logprobs: whether results have their tokens' log-probabilities under the base; top_logprobs: of how many of its
            likeliest tokens, besides.
        rule, max_new_tokens, seed, numbers: for all prompts, or a list with one for each (``temperature=[0.2, 1.0]``).

        For the others see `Loaded` and `hydrajax.generate`, which also gives the results one by one. Raises
        `HydrajaxError` for what cannot be used.
        """
        single = isinstance(prompts, (str, Prompt))
        several: list[OnePrompt] = [prompts] if single else list(prompts)  # type: ignore[arg-type, list-item]
        if is_conversation(several):
            raise HydrajaxError("prompts: must be a list of prompts, found one conversation; write [messages]")
        if several and isinstance(several[0], (int, np.integer)):
            raise HydrajaxError("prompts: must be a list of prompts, found the ids of one; write [ids]")
        rules = rules_for(rule, len(several), **numbers)
        if not several:
            return []
        bundle, tree, rules = self._settled(several, draft, tree, rules, batch_size, on_status)
        found = list(
            generate(
                bundle, several, tree=tree, rule=rules, max_new_tokens=max_new_tokens, stop=stop,
                batch_size=batch_size, seed=seed, logprobs=logprobs, top_logprobs=top_logprobs,
                on_status=on_status,
            )
        )  # fmt: skip
        return found[0] if single else found

    def stream(
        self,
        prompt: OnePrompt,
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        rule: Rule | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        on_status: Callable[[str], None] | None = None,
        **numbers: Unpack[Numbers],
    ) -> Stream:
        """The text of one prompt, piece by piece: ``for piece in m.stream("def area("): print(piece, end="")``.

        For the arguments see `Loaded` and `hydrajax.stream`.
        """
        rule = one_rule(rule, **numbers)
        bundle, tree, rule = self._settled([prompt], draft, tree, rule, 1, on_status)
        settings = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed}
        settings |= {"logprobs": logprobs, "top_logprobs": top_logprobs}
        return stream(bundle, prompt, tree=tree, rule=rule, on_status=on_status, **settings)

    def chat(
        self,
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        rule: Rule | None = None,
        template: str = "auto",
        max_new_tokens: int = 512,
        seed: int | None = None,
        **numbers: Unpack[Numbers],
    ) -> Chat:
        """A conversation that keeps the cache between turns: ``for piece in m.chat().say("Hello"): ...``.

        template: ``auto`` is the tokenizer's own; ``vicuna`` and ``plain`` are built in. For the other arguments see
        `Loaded`; where no tree is named and none was searched for these heads, the drafter's own is taken.
        """
        bundle = self._drafting(draft)
        tree = None if tree is None else presets.tree_of(tree)
        settings = {"template": template, "max_new_tokens": max_new_tokens, "seed": seed}
        return Chat(bundle, tree=tree, rule=one_rule(rule, **numbers), **settings)

    def encode(self, prompts: Sequence[OnePrompt]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """What a decode function takes: token ids, int32, right-padded, and the prompts' lengths.

        ``decode_fn(m.params, *m.encode(["def area("]))``. Raises `HydrajaxError` for a prompt that does not fit.
        """
        ids = list(self.ids_of_prompts(prompts))
        return right_padded(ids, max(map(len, ids), default=0))

    def decode(self, result: DecodeResult) -> list[str]:
        """The texts of a decode function's result, a row each, without special tokens."""
        if self.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer; result.ids() are the token ids")
        return [decode_text(self.tokenizer, ids) for ids in result.ids()]

    def with_draft(
        self,
        draft: Drafter | str | Path,
        *,
        base_directory: str | Path | None = None,
        mesh: Mesh | None = None,
        shard_draft: bool = False,
        draft_confidence: float | None = None,
        draft_devices: int | None = None,
    ) -> Loaded:
        """The same base, its parameters shared, with another drafter. The arguments are those of `load`.

        base_directory: where the base lies; heads that say they were made for another base are then refused.
        """
        if beside := beside_lookup(draft):
            settings = {"base_directory": base_directory, "mesh": mesh}
            settings |= {"shard_draft": shard_draft, "draft_confidence": draft_confidence}
            inner = self.with_draft(beside.draft, **settings)
            return self._with(beside.around(inner.drafter), inner.params.draft, inner.draft_directory)
        directory, params = None, {}
        if kind := without_weights(draft):
            draft = kind.build(self.model.config, self.model.dtype)
        if isinstance(draft, (str, Path)):
            directory = resolve(draft, "draft")
            place = placer(mesh)
            if is_model(directory):
                model = self.model, self.params.base, self.tokenizer
                settings: dict[str, Any] = {"confidence": draft_confidence or 0.0}
                if draft_devices is not None:
                    settings["place"] = placer(last_devices(draft_devices, mesh))
                else:
                    settings["place"] = place if shard_draft else lambda array, _: place(array, None)
                return self._with(*load_draft_model(directory, *model, **settings), directory)
            made_for = {"base_directory": base_directory, "adapter": self.adapter_directory}
            draft, params = load_draft(directory, self.model.config, self.model.dtype, **made_for)
            params = jax.tree.map(lambda x: place(x, None), params)
        asked = {"shard_draft": shard_draft or None, "draft_confidence": draft_confidence}
        for setting, value in (asked | {"draft_devices": draft_devices}).items():
            if value is not None:
                raise HydrajaxError(f"{setting}: is for a draft model, found {title_of(draft)}")
        return self._with(draft, params, directory)

    def _with(self, draft: Drafter, params: Any, directory: Path | None) -> Loaded:
        shared = {"tokenizer": self.tokenizer, "eos_ids": self.eos_ids, "adapter_directory": self.adapter_directory}
        return Loaded(self.model, draft, Params(self.params.base, params), draft_directory=directory, **shared)

    def fastest(
        self,
        prompts: Iterable[np.ndarray],
        rule: AcceptanceRule,
        batch_size: int,
        on_status: Callable[[str], None] = lambda text: None,
    ) -> tuple[Loaded, CandidateTree, AcceptanceRule]:
        """What to decode with where no tree was named (`hydrajax.measure.fastest`), said in one line on stderr."""
        # What would be timed is base and draft in one program.
        choice = None if are_apart(self.params) else choose(self, prompts, rule, batch_size, on_status)
        if choice is None:
            return self, self.default_tree(batch_size), rule
        print(choice, file=sys.stderr)
        if choice.tree is None:
            return self._drafting(NO_DRAFT), presets.root(), baseline_rule(rule)
        return self, choice.tree, rule

    def _drafting(self, draft: Drafter | str | Path | None) -> Loaded:
        """With this draft in place of the own one, if one is named."""
        if draft is None:
            return self
        key = draft if isinstance(draft, Drafter) else str(draft)
        if key not in self._drafts:
            self._drafts[key] = self.with_draft(draft)
        return self._drafts[key]

    def _settled(
        self, prompts: Sequence[OnePrompt], draft, tree, rules, batch_size: int, on_status
    ) -> tuple[Loaded, CandidateTree, Any]:
        """The model, the tree and the rules to decode with: what was named, or the fastest."""
        loaded = self._drafting(draft)
        if tree is not None:
            return loaded, presets.tree_of(tree), rules
        listed = isinstance(rules, list)
        first = rules[0] if listed else rules
        key = batch_size, type(first)
        if key not in loaded._fastest:
            ids = loaded.ids_of_prompts(prompts)
            loaded._fastest[key] = loaded.fastest(ids, first, batch_size, on_status or (lambda text: None))[:2]
        chosen, tree = loaded._fastest[key]
        if chosen is not loaded:  # without the draft
            rules = [baseline_rule(rule) for rule in rules] if listed else baseline_rule(rules)
        return chosen, tree, rules


def make_decode_fn(
    model: BaseModel | Loaded,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    rule: Rule | None = None,
    *,
    max_new_tokens: int = 256,
    eos_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    fan_out: FanOut | Sequence[int] | int | None = None,
) -> Callable[..., DecodeResult]:
    """Build ``decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None) -> DecodeResult``, jitted.

    model: what `load` gave, and then its drafter, tree and EOS ids are the defaults: ``make_decode_fn(m)``. Or a base
        model by itself, with a drafter and a tree; generation then ends at no id unless ``eos_ids`` names some.
    tree, rule: also by name, ``"chain-2"`` and ``"greedy"``.
    logprobs: whether results have the tokens' log-probabilities; top_logprobs: of how many of the base's likeliest
        tokens, besides.
    fan_out: of what was loaded with ``draft_devices``: how many outcomes of a verification the draft prepares for
        (`hydrajax.ssd.decode.make_apart_fn`); 0 for base and draft in turn. The function is then driven by the host.

    The function's arguments and result: `hydrajax.decoding.decode.make_decode_fn`. Raises `HydrajaxError` for parts
    that do not fit together.
    """
    apart = isinstance(model, Loaded) and are_apart(model.params)
    if isinstance(model, Loaded):
        drafter = model.drafter if drafter is None else drafter
        tree = model.default_tree() if tree is None else tree
        eos_ids = model.eos_ids if eos_ids is None else eos_ids
        model = model.model
    if drafter is None or tree is None:
        missing = "drafter" if drafter is None else "tree"
        raise HydrajaxError(f"{missing}: is needed with a base model alone; what hydrajax.load gives brings its own")
    settings = {"max_new_tokens": max_new_tokens, "eos_ids": tuple(eos_ids or ())}
    settings |= {"logprobs": logprobs, "top_logprobs": top_logprobs}
    if apart:
        return make_apart_fn(model, drafter, presets.tree_of(tree), one_rule(rule), fan_out=fan_out, **settings)
    if fan_out is not None:
        raise HydrajaxError("fan_out: is for what was loaded with draft_devices")
    return decode.make_decode_fn(model, drafter, presets.tree_of(tree), one_rule(rule), **settings)


def load(
    base: str | Path,
    draft: Drafter | str | Path | None = None,
    *,
    dtype: Any = AUTO,
    mesh: Mesh | None = None,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    merge: bool = False,
    force: bool = False,
    shard_draft: bool = False,
    draft_confidence: float | None = None,
    draft_devices: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Loaded:
    """Load a base and, optionally, a drafter.

    base:  a Hugging Face directory (``config.json`` and weights; the tokenizer if it holds one), a repository on the
        Hub, ``org/name`` or ``org/name@revision``, or ``"shipped"``, the small model that comes with the package.
    draft: a directory or repository of heads (`hydrajax.checkpoints.heads.load`), or of a small model of any family
        with the base's tokenizer (`hydrajax.checkpoints.draft_model`); the name of a drafter without weights
        (`hydrajax.drafters.registry`); ``"medusa"``, ``"hydra"`` or ``"hydra++"`` of the shipped base; heads or a model
        after ``"lookup+"``, with lookup's chain as one more branch of their trees (``"lookup-8+hydra"``: of 8 nodes;
        `hydrajax.drafters.with_lookup`); a `Drafter` without weights; or None to decode autoregressively.
    dtype: ``"float32"`` or ``"bfloat16"`` (or ``jnp.bfloat16``), of parameters, cache and matmuls; the model's
        ``dtype`` then says which. ``"auto"`` is float32 on a CPU, elsewhere what most of the base's numbers are stored
        in, with bfloat16 for float16 (`hydrajax.checkpoints.base.default_dtype` says why).
    mesh:  from `hydrajax.sharding.make_mesh`; the base is sharded over it, the draft replicated.
    quantize: ``"int8"`` keeps the base's matmul weights in one byte each: half of bfloat16's memory, other logits.
    adapter: a LoRA of the base in PEFT's format, a directory or repository (`hydrajax.checkpoints.adapter` says what
        is read of it). Its low-rank weights are kept beside the base's and take part in every forward pass.
    merge: add them to the base's weights instead, before these are quantised; a step then costs what it costs without
        an adapter. The sums are rounded to ``dtype``, so the logits are not bit for bit the same.
    force: load heads that say they were made for another base, or for the base with another adapter.
    shard_draft: shard a draft model over the mesh like the base.
    draft_confidence: of a draft model, from 0 up and below 1: draft no further below tokens that it finds less likely
        (`hydrajax.drafters.draft_model.DraftModel`).
    draft_devices: put a draft model on the last so many devices (sharded over them), where it drafts ahead while the
        base verifies on others: speculative speculative decoding (`hydrajax.ssd`, docs/ssd.md).
    on_progress: told how many of the base's numbers have been loaded.

    JAX's compilation cache on disk is then on for the whole process (`hydrajax.compilation.use_compilation_cache` says
    where, and how to have another or none).

    Raises `HydrajaxError` for anything missing, damaged, unsupported or made for another base.
    """
    name = _dtype_name(dtype)
    if name not in (AUTO, *DTYPES):
        raise not_allowed("dtype", name, (AUTO, *DTYPES))
    if quantize not in (None, *QUANTIZED):
        raise not_allowed("quantize", quantize, QUANTIZED)
    if merge and adapter is None:
        raise HydrajaxError("merge: means nothing without an adapter")
    if draft_devices is not None:
        last_devices(draft_devices, mesh)  # refused before gigabytes are read
        if shard_draft:
            raise HydrajaxError("shard_draft: says nothing with draft_devices, over which a draft model is sharded")
    use_compilation_cache()
    base = resolve(base, "base")
    if adapter is not None:
        adapter = resolve(adapter, "adapter")
    if beside := beside_lookup(draft):
        resolve(beside.draft, "draft")  # refused before gigabytes are read
    elif isinstance(draft, (str, Path)) and not without_weights(draft):
        draft = resolve(draft, "draft")
    compute = DTYPES.get(name)  # None for "auto"
    made = {"int8": quantize == "int8", "adapter": adapter, "merge": merge, "on_progress": on_progress}
    model, base_params = load_llama(base, compute, placer(mesh), **made)
    text = {"tokenizer": load_tokenizer(base), "eos_ids": eos_ids(base)}
    loaded = Loaded(model, NoDrafter(), Params(base_params, {}), **text, adapter_directory=adapter)
    settings = {"shard_draft": shard_draft, "draft_confidence": draft_confidence, "draft_devices": draft_devices}
    if draft is None and draft_confidence is None and draft_devices is None and not shard_draft:
        return loaded
    draft = NO_DRAFT if draft is None else draft
    return loaded.with_draft(draft, base_directory=None if force else base, mesh=mesh, **settings)


def _dtype_name(dtype: Any) -> str:
    """Of a dtype that is named, or given as NumPy's and JAX's are."""
    try:
        return str(dtype) if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)
