"""`LanguageModel`, the result of `hydrajax.load`: a base with a drafter, parameters, tokenizer and placement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import numpy as np
from jaxtyping import Int

from hydrajax.autotune.fastest import choose
from hydrajax.conversation import Chat
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.keywords import Numbers, Rule, specs_of_prompts, with_keywords
from hydrajax.decoding.prompt_batch import bucket, encode_prompt, encode_prompts, right_padded
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.decoding.stepped import Between, SteppedExecutor
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.generation import Stream, generate, stream
from hydrajax.loading import find_draft
from hydrajax.models.base_model import BaseModel
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import Placement
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import OnePrompt, Prompt, is_conversation
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

Tree = CandidateTree | str | Path | Sequence[Sequence[int]]


class Keywords(Numbers, total=False):
    """The keywords of `LanguageModel.generate`, for type checkers."""

    draft: Drafter | str | Path | None
    tree: Tree | None
    rule: Rule | Sequence[AcceptanceRule] | None
    processors: Sequence[Any]
    max_new_tokens: int | Sequence[int]
    stop: Sequence[str]
    batch_size: int
    seed: int | Sequence[int] | None
    logprobs: int | bool | None
    on_status: Callable[[str], None]


def _ignore(status: str) -> None:
    pass


@dataclass(eq=False, repr=False)
class LanguageModel:
    """A base with its drafter, ready to decode.

    ``generate``, ``stream`` and ``chat`` share these arguments:

    - tree: a tree, a name such as ``"chain-2"``, a file or a list of choices. None takes the fastest on this device, as
      the commands do: the tree that was searched or measured here before; otherwise a few small trees are timed at the
      first use, which takes some seconds and prints one line on stderr (`hydrajax.autotune.fastest`).
    - draft: another draft than the loaded one: any argument of `hydrajax.load`, such as ``"lookup"`` or ``"none"``. It
      is loaded once.
    - rule, numbers: a rule, or its name (greedy, exact, typical, rejection) with its numbers: ``temperature=0.7``.
    - processors, numbers: logits processors, or their numbers: ``repetition_penalty=1.2``, ``logit_bias={13: -5.0}``.
    - seed: for rules that draw; None draws a seed. The result's ``seed`` tells which.

    Attributes:
        model, params: the base, and the parameters of base and drafter.
        drafter: `hydrajax.drafters.none.NoDrafter` if none was loaded.
        tokenizer: the base's (transformers), None if it has none.
        eos_ids: token ids that end generation.
        placement: where base and draft lie.
        draft_directory: where the heads were loaded from, None for a drafter without files.
        adapter_directory: of the base's adapter, also of one that was merged.
    """

    model: BaseModel
    drafter: Drafter
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    placement: Placement = field(default_factory=Placement)
    draft_directory: Path | None = None
    adapter_directory: Path | None = None
    _executors: dict = field(default_factory=dict)
    _drafts: dict = field(default_factory=dict)  # other drafts of the same base, by name
    _fastest: dict = field(default_factory=dict)  # the fastest tree for so many rows and a kind of rule

    def __repr__(self) -> str:
        """One line, from shapes alone: nothing is fetched from a device."""
        config, draft = self.config, _count(self.params.draft)
        base = f"{type(self.model).__name__} with {_millions(_count(self.params.base))} parameters"
        parts = [
            f"{base}, {self.model.dtype.name}",
            title_of(self.drafter) + (f" with {_millions(draft)}" if draft else ""),
            f"vocabulary {config.vocab_size}, context {config.max_positions}",
            "no tokenizer" if self.tokenizer is None else "tokenizer",
        ]
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    @property
    def config(self) -> LlamaConfig:
        """The shape of the base."""
        return self.model.config

    # --- how to decode ------------------------------------------------------------------------------------------------

    def default_tree(self, batch_size: int = 1) -> CandidateTree:
        """Return the tree that was searched for these heads, else the drafter's own choice."""
        return presets.searched(self.draft_directory, batch_size) or presets.by_name(self.drafter.spec.default_tree)

    def spec(self, wanted: DecodeSpec | None = None, *, tree: Tree | None = None, **changes: Any) -> DecodeSpec:
        """Return a spec for this model: ``wanted`` with the model's drafter and EOS ids.

        Args:
            wanted: the other fields; by default those of `DecodeSpec`.
            tree: None for `default_tree`.
            changes: fields of `DecodeSpec`.
        """
        tree = self.default_tree() if tree is None else presets.tree_of(tree)
        return (wanted or DecodeSpec()).replace(
            **{"drafter": self.drafter, "tree": tree, "eos_ids": self.eos_ids} | changes
        )

    def executor(self, spec: DecodeSpec | None = None, **choices: Any) -> Executor:
        """Return an executor of a spec, by default `spec`; one that shares its compiled programs is made once and kept.

        Its room for new tokens is rounded up, so that other limits compile nothing new. choices: see `make_executor`.
        """
        spec, config = spec or self.spec(), self.config
        room = bucket(min(spec.max_new_tokens, config.max_positions), config.max_positions)
        key = (spec.drafter, spec.tree, spec.eos_ids, spec.logprobs, room, *sorted(choices.items()))
        if key not in self._executors:
            self._executors[key] = make_executor(self, spec, room=room, **choices)
        return self._executors[key].with_spec(spec)

    def fastest(
        self,
        prompts: Iterable[np.ndarray],
        spec: DecodeSpec,
        batch_size: int,
        on_status: Callable[[str], None] = _ignore,
    ) -> DecodeSpec:
        """Return the spec with the fastest tree (`hydrajax.autotune.fastest`), which is printed in a line on stderr.

        Where decoding without a draft is the fastest, that is what the returned spec does.
        """
        choice = None
        if not self.placement.split:  # what would be timed is base and draft in one program
            any_tree = make_executor(self, spec.replace(drafter=self.drafter, tree=presets.root()))
            choice = choose(any_tree, prompts, batch_size, self.draft_directory, on_status)
        if choice is None:
            return spec.replace(tree=self.default_tree(batch_size))
        print(choice, file=sys.stderr)
        return spec.autoregressive() if choice.tree is None else spec.replace(tree=choice.tree)

    def with_draft(
        self,
        draft: Drafter | str | Path,
        *,
        base_directory: str | Path | None = None,
        draft_confidence: float | None = None,
    ) -> LanguageModel:
        """Return the same base, its parameters shared, with another drafter. The arguments are those of `load`.

        base_directory: of the base; heads that record another base are then refused.
        """
        found = find_draft(
            draft, self.model, self.params.base, self.tokenizer, self.placement,
            base_directory=base_directory, adapter_directory=self.adapter_directory, confidence=draft_confidence,
        )  # fmt: skip
        return LanguageModel(
            self.model,
            found.drafter,
            Params(self.params.base, found.params),
            self.tokenizer,
            self.eos_ids,
            self.placement,
            found.directory,
            self.adapter_directory,
        )

    # --- text ---------------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str | Prompt, **keywords: Unpack[Keywords]) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[OnePrompt], **keywords: Unpack[Keywords]) -> list[Generation]: ...

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        stop: Sequence[str] = (),
        batch_size: int = 1,
        seed: int | Sequence[int] | None = None,
        logprobs: int | bool | None = None,
        on_status: Callable[[str], None] | None = None,
        **keywords: Any,
    ) -> Generation | list[Generation]:
        """Generate text: ``m.generate("def area(")``, or a list of prompts for a list of results.

        Args:
            prompts: one text, or a list of prompts: texts, lists of token ids, or conversations (lists of messages with
                ``role`` and ``content``, in the tokenizer's chat template).
            draft: a drafter, a name or a directory, in place of the model's own; see `LanguageModel`.
            tree: by default the fastest; see `LanguageModel`.
            stop: texts; a result ends before the first of them that it would hold.
            batch_size: prompts that are decoded together.
            seed: for rules that draw, or a list with one per prompt; by default one is drawn.
            on_status: called with lines of progress.
            logprobs: K, to report the log-probability of each token, and the K most likely tokens in its place; 0 or
                True for the tokens alone.
            keywords: ``rule``, ``processors``, ``max_new_tokens`` (default 256) and numbers, each for all prompts or a
                list with one per prompt (``temperature=[0.2, 1.0]``).

        Raises:
            HydrajaxError: for what cannot be used.
        """
        single = isinstance(prompts, (str, Prompt))
        several: list[OnePrompt] = [prompts] if single else list(prompts)  # type: ignore[arg-type, list-item]
        if is_conversation(several):
            raise HydrajaxError("prompts: must be a list of prompts, found one conversation; write [messages]")
        if several and isinstance(several[0], (int, np.integer)):
            raise HydrajaxError("prompts: must be a list of prompts, found the ids of one; write [ids]")
        wanted = DecodeSpec(logprobs=logprobs)
        specs = specs_of_prompts(wanted, len(several), **keywords)
        if not several:
            return []
        say = on_status or _ignore
        executor, specs = self._settled(several, draft, tree, specs, batch_size, say)
        found = list(
            generate(executor, several, specs=specs, stop=stop, batch_size=batch_size, seed=seed, on_status=say)
        )
        return found[0] if single else found

    def stream(
        self,
        prompt: OnePrompt,
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        rule: Rule | None = None,
        processors: Sequence[Any] = (),
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int | None = None,
        logprobs: int | bool | None = None,
        on_status: Callable[[str], None] | None = None,
        **numbers: Unpack[Numbers],
    ) -> Stream:
        """Generate text piece by piece: ``for piece in m.stream("def area("): print(piece, end="")``.

        The arguments are those of `generate` for one prompt. The returned iterator is a `hydrajax.Stream`.
        """
        wanted = DecodeSpec(max_new_tokens=max_new_tokens, logprobs=logprobs)
        wanted, say = with_keywords(wanted, rule, processors, **numbers), on_status or _ignore
        executor, _ = self._settled([prompt], draft, tree, [wanted], 1, say)
        return stream(executor, prompt, stop=stop, seed=seed, on_status=say)

    def chat(
        self,
        *,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        rule: Rule | None = None,
        processors: Sequence[Any] = (),
        template: str = "auto",
        max_new_tokens: int = 512,
        seed: int | None = None,
        **numbers: Unpack[Numbers],
    ) -> Chat:
        """Begin a conversation that keeps the KV cache between turns: ``for piece in m.chat().say("Hello"): ...``.

        template: ``auto`` for the tokenizer's own; ``vicuna``, ``plain`` and ``raw`` are built in. For the other
        arguments see `LanguageModel`; without a tree the searched one is taken, or the drafter's own.
        """
        m = self._drafting(draft)
        wanted = with_keywords(DecodeSpec(max_new_tokens=max_new_tokens), rule, processors, **numbers)
        return Chat(m.executor(m.spec(wanted, tree=tree)), template=template, seed=seed)

    def encode(self, prompts: Sequence[OnePrompt]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """Return the prompts as a decode function takes them: token ids, int32, right-padded, and their lengths.

        ``decode_fn(m.params, *m.encode(["def area("]))``. Raises `HydrajaxError` for a prompt that does not fit.
        """
        ids = list(self.ids_of_prompts(prompts))
        return right_padded(ids, max(map(len, ids), default=0))

    def decode(self, result: DecodeResult) -> list[str]:
        """Return the texts of a decode function's result, one per row, without special tokens."""
        if self.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer; result.ids() are the token ids")
        return [decode_text(self.tokenizer, ids) for ids in result.ids()]

    def prompt_ids(self, prompt: OnePrompt, where: str) -> Int[np.ndarray, " P"]:
        """Return `hydrajax.decoding.prompt_batch.encode_prompt` for this model."""
        return encode_prompt(prompt, where, self.tokenizer, self.config)

    def ids_of_prompts(self, prompts: Sequence[OnePrompt]) -> Iterator[Int[np.ndarray, " P"]]:
        """Yield `hydrajax.decoding.prompt_batch.encode_prompts` for this model."""
        return encode_prompts(prompts, self.tokenizer, self.config)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _drafting(self, draft: Drafter | str | Path | None) -> LanguageModel:
        """With this draft in place of the own one, if one is named."""
        if draft is None:
            return self
        key = draft if isinstance(draft, Drafter) else str(draft)
        if key not in self._drafts:
            self._drafts[key] = self.with_draft(draft)
        return self._drafts[key]

    def _settled(
        self, prompts: Sequence[OnePrompt], draft, tree: Tree | None, specs: list[DecodeSpec], batch_size: int, say
    ) -> tuple[Executor, list[DecodeSpec]]:
        """The executor and the spec of each prompt: with the tree that is named, or the fastest."""
        m = self._drafting(draft)
        most = max(specs, key=lambda spec: spec.max_new_tokens)
        if tree is None:
            key = batch_size, type(specs[0].rule)
            if key not in m._fastest:
                first = m.spec(specs[0], tree=presets.root())
                found = m.fastest(m.ids_of_prompts(prompts), first, batch_size, say)
                m._fastest[key] = found.drafter, found.tree
            drafter, tree = m._fastest[key]
            if drafter != m.drafter:  # without a draft
                specs, most = [spec.autoregressive() for spec in specs], most.autoregressive()
                return m.executor(most.replace(eos_ids=m.eos_ids)), specs
        return m.executor(m.spec(most, tree=tree)), specs


def make_executor(
    m: LanguageModel,
    spec: DecodeSpec,
    *,
    room: int | None = None,
    fan_out: FanOut | int | None = None,
    between: Between | None = None,
) -> Executor:
    """Return the executor of a spec for a model, on the devices where it lies.

    Args:
        m: the model.
        spec: how to decode, with the model's drafter or none.
        room: most new tokens of a sequence, by default the spec's.
        fan_out: for a draft model with devices of its own: the outcomes of a verification that it prepares for
            (`SplitExecutor`).
        between: the host's work in every step, such as a grammar's (`SteppedExecutor`).

    Raises:
        HydrajaxError: for a drafter whose parameters the model does not have, and for what does not fit together.
    """
    drafted = spec.drafter == m.drafter
    if not drafted and not isinstance(spec.drafter, NoDrafter):
        found = title_of(spec.drafter)
        raise HydrajaxError(f"drafter: found {found}, the model was loaded with {title_of(m.drafter)}; see with_draft")
    params = m.params if drafted else Params(m.params.base, {})
    split = m.placement.split and not isinstance(spec.drafter, NoDrafter)
    if fan_out is not None and not split:
        raise HydrajaxError("fan_out: is for a draft model with devices of its own (placement)")
    if split:
        if between is not None:
            raise HydrajaxError("between: needs base and draft on the same devices")
        return SplitExecutor(
            m.model, params, spec, placement=m.placement, fan_out=fan_out, tokenizer=m.tokenizer, room=room
        )
    if between is not None:
        return SteppedExecutor(m.model, params, spec, between=between, tokenizer=m.tokenizer, room=room)
    return FusedExecutor(m.model, params, spec, tokenizer=m.tokenizer, room=room)


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
