"""`LanguageModel`, the result of `hydrajax.load`: a base with its drafter, parameters, tokenizer and placement."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import jax
import numpy as np
from jaxtyping import Int

from hydrajax import plugins, processes
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.constraints import as_grammar
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.keywords import Rule, SamplingKeywords, make_request, requests_of_prompts
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import bucket, encode_prompt, encode_prompts, right_padded
from hydrajax.decoding.request import Request
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_lm_head import COPIED_LM_HEAD
from hydrajax.drafters.drafter import CORPUS, Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.generation import Stream, generate, stream
from hydrajax.loading import find_draft
from hydrajax.models.base_model import BaseModel
from hydrajax.models.init import abstract_base
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import Quantized, described
from hydrajax.ops import trace
from hydrajax.sharding import Placement
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.prompt import OnePrompt, Prompt, is_conversation, items
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.smaller import with_size

if TYPE_CHECKING:
    from hydrajax.conversation import Chat
    from hydrajax.drafters.corpus import Corpus
    from hydrajax.stored_trees import FastestTree

Tree = CandidateTree | str | Path | Sequence[Sequence[int]]
AUTO = "auto"  # the tree that is measured to be the fastest
LOW_BIT_NODES = 2  # of default trees in few bits on a CPU: a node costs as much arithmetic, and a step fewer bytes
CPU_NODES = 6  # of default trees on a CPU: with released trees of 64 nodes a step takes five times as long as one token


class Keywords(SamplingKeywords, total=False):
    """Keyword arguments of `LanguageModel.generate`, for type checkers."""

    draft: Drafter | str | Path | None
    tree: Tree | None
    rule: Rule | Sequence[AcceptanceRule] | None
    processors: Sequence[Any]
    max_new_tokens: int | Sequence[int]
    stop: Sequence[str]
    batch_size: int
    seed: int | Sequence[int] | None
    logprobs: int | bool | None
    grammar: Any
    on_status: Callable[[str], None]


def _ignore(status: str) -> None:
    pass


def _at_terminal(status: str) -> None:
    """Tell a user at a terminal about compilations, which take seconds."""
    if "compiling" in status and sys.stderr.isatty():
        print(f"{status} ...", file=sys.stderr)


@dataclass(eq=False, repr=False)
class LanguageModel:
    """A base with its drafter, ready to decode.

    `generate`, `stream` and `chat` share these arguments:

    - ``draft``: another draft, as in `hydrajax.load`, such as ``"lookup"`` or ``"none"``; it is loaded once.
    - ``tree``: a tree, a name such as ``"chain-2"``, a file, or a list of choices. None measures nothing: it takes the
      choice that `autotune` stored for this device and draft, which may be no draft and is printed on stderr; else
      `default_tree`. ``"auto"`` calls `autotune` with the prompts first.
    - ``rule`` and its parameters: a rule, or its name (greedy, exact, typical, rejection). ``temperature=0.7``
      alone samples exactly; 0, the default, is greedy.
    - ``processors``: logits processors, or their parameters: ``repetition_penalty=1.2``,
      ``logit_bias={13: -5.0}``.
    - ``seed``: for sampling rules. None draws one, which is the result's ``seed``.

    Attributes:
        model: the base.
        drafter: the drafter, `hydrajax.drafters.none.NoDrafter` if no draft was loaded.
        params: parameters of base and drafter.
        tokenizer: the base's transformers tokenizer, None if it has none.
        eos_ids: token ids that end generation.
        placement: devices of base and draft.
        draft_directory: directory of the draft's weights, None for a drafter without weights.
        adapter_directory: directory of the base's adapter, also of a merged one.
        base_directory: directory of the base, whose MTP module the draft ``mtp`` is; None if unknown.
    """

    model: BaseModel
    drafter: Drafter
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    placement: Placement = field(default_factory=Placement)
    draft_directory: Path | None = None
    adapter_directory: Path | None = None
    base_directory: Path | None = None
    _executors: dict = field(default_factory=dict, init=False)  # not shared with a model of other parameters
    _drafts: dict = field(default_factory=dict, init=False)  # by name or drafter
    # Drafter, tree and rule, and whether they are for "auto"; by batch size and type of rule.
    _fastest: dict = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        """Describe the model in one line, from shapes: nothing is fetched from a device."""
        config, draft = self.config, _count(self.params.draft)
        base = abstract_base(self.model.clone(quantize=None)) if self.model.quantize else self.params.base
        base = f"{type(self.model).__name__} with {_millions(_count(base))} parameters"
        parts = [
            f"{base}, {described(self.model.dtype.name, self.model.quantize)}",
            title_of(self.drafter) + (f" with {_millions(draft)}" if draft else ""),
            f"vocabulary {config.vocab_size}, context {config.max_positions}",
            "no tokenizer" if self.tokenizer is None else "tokenizer",
        ]
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    @property
    def config(self) -> LlamaConfig:
        """The shape of the base."""
        return self.model.config

    @property
    def corpus(self) -> Corpus | None:
        """The past outputs that the draft reads; None without (`hydrajax.drafters.corpus.Corpus`)."""
        return self.params.corpus

    # --- how to decode ------------------------------------------------------------------------------------------------

    def default_tree(self, batch_size: int = 1) -> CandidateTree:
        """Return the tree for decoding without measurements: the draft's own for this batch size, else its drafter's.

        It is small where nodes are expensive, so that a draft that predicts well is not slower than no draft. On a CPU
        every node costs arithmetic: the drafter's tree is cut to its `CPU_NODES` likeliest nodes. With int8 or int4
        weights there any tree is cut to the root and one guess, as a step reads fewer bytes for the same arithmetic.
        """
        found = processes.agreed(self.placement.base, lambda: presets.searched(self.draft_directory, batch_size))
        tree = found or presets.by_name(self.drafter.spec.default_tree)
        if not trace.on_cpu() or self.drafter.spec.window_nodes:
            return tree
        if self.model.quantize is not None:
            return with_size(tree, LOW_BIT_NODES)
        return found or with_size(tree, CPU_NODES)

    def program(self, *requests: Request, tree: Tree | None = None, **changes: Any) -> Program:
        """Return a `Program` with this model's drafter and EOS ids.

        Args:
            requests: what it serves (`Program.serving`); by default greedy ones without grammars.
            tree: the tree, by default `default_tree`.
            changes: fields of `Program` to set.
        """
        tree = self.default_tree() if tree is None else presets.tree_of(tree)
        program = Program(self.drafter, tree, eos_ids=self.eos_ids)
        return (program.serving(*requests) if requests else program).replace(**changes)

    def executor(self, program: Program | None = None, request: Request | None = None, **choices: Any) -> Executor:
        """Return an executor, which is cached: programs with nearly the same room share one.

        Args:
            program: the compiled configuration, by default ``self.program()``.
            request: the default of calls without a request; None for `Program.request`.
            choices: keyword arguments of `make_executor`.
        """
        program, most = program or self.program(), self.config.max_positions
        request = request or program.request()
        program = program.replace(max_new_tokens=bucket(min(program.max_new_tokens, most), most))
        key = (program, *sorted(choices.items()))
        if key not in self._executors:
            self._executors[key] = make_executor(self, program, request, **choices)
        return self._executors[key].with_request(request)

    def with_tree(
        self,
        program: Program,
        request: Request,
        tree: Tree | None = None,
        batch_size: int = 1,
        prompts: Iterable[np.ndarray] = (),
        on_status: Callable[[str], None] = _ignore,
    ) -> Program:
        """Return the program with a tree, or without a draft if that was measured to be faster; a choice is printed.

        Args:
            program: the compiled configuration, apart from drafter and tree.
            request: what is measured.
            tree: as in `LanguageModel`.
            batch_size: sequences decoded together.
            prompts: token ids, int32 ``[P]``, to measure on for ``"auto"``. Built-in ones follow if there are too few.
            on_status: called with lines of progress.

        Raises:
            HydrajaxError: for a grammar that cannot be used, before anything is measured.
        """
        if tree is not None and tree != AUTO:
            return program.replace(drafter=self.drafter, tree=presets.tree_of(tree))
        program = program.replace(drafter=self.drafter, tree=self.default_tree(batch_size))
        if request.grammar is not None:
            request.grammar.start(self.tokenizer, self.config.vocab_size, self.eos_ids)
        if tree == AUTO:
            choice = self._measured(request, prompts, batch_size, on_status)
        else:
            choice = self.measured_tree(batch_size, request)
        if choice is None:
            return program
        print(choice, file=sys.stderr)
        if choice.tree is None:
            return program.autoregressive().replace(forced_nodes=program.forced_nodes)
        return program.replace(tree=choice.tree)

    def autotune(
        self,
        prompts: OnePrompt | Sequence[OnePrompt] | None = None,
        *,
        draft: Drafter | str | Path | None = None,
        rule: Rule | None = None,
        batch_size: int = 1,
        again: bool = False,
        quiet: bool = False,
        on_status: Callable[[str], None] | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> FastestTree | None:
        """Measure which tree is the fastest on this device, print the choice on stderr, and store it.

        A few small trees and decoding without a draft are timed in interleaved rounds, each after a compilation.
        `generate`, `stream`, `chat` and the commands take the stored choice if they are given no tree.

        Args:
            prompts: as in `generate`, to measure on; built-in prompts follow if there are too few.
            draft, rule, parameters: as in `generate`. Choices are stored for each draft and kind of rule.
            batch_size: prompts decoded together.
            again: measure even if a choice is stored.
            quiet: do not print the choice.
            on_status: called with lines of progress; by default a terminal shows what is compiled.

        Returns:
            The choice, whose ``tree`` is None if decoding without the draft is the fastest. None if nothing can be
            measured: without a draft, with a draft on its own devices, with ``HYDRAJAX_MEASURE_TREES=0``, and if the
            timings disagree as on a busy machine.

        Raises:
            HydrajaxError: for a bad prompt or argument.

        Example:
            ```python
            m.autotune()
            m.generate("def area(")  # drafts with the fastest tree
            ```
        """
        several = [] if prompts is None else [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
        m, request = self._drafting(draft), make_request(rule, **parameters)
        choice = m._measured(request, m.ids_of_prompts(several), batch_size, on_status or _at_terminal, again)
        m._fastest.clear()
        if choice is not None and not quiet:
            print(choice, file=sys.stderr)
        return choice

    def measured_tree(self, batch_size: int = 1, request: Request | None = None) -> FastestTree | None:
        """Return the choice that `autotune` stored for this device and draft (`hydrajax.stored_trees.stored`).

        None without one, and for a draft on its own devices.
        """
        if self.placement.split:
            return None
        from hydrajax.stored_trees import stored

        return stored(self._with_any_tree(request), batch_size, self.draft_directory)

    def _measured(
        self, request: Request, prompts: Iterable[np.ndarray], batch_size: int, on_status, again: bool = False
    ) -> FastestTree | None:
        """Return the stored choice, or measure one."""
        if self.placement.split:
            return None
        if not again and (choice := self.measured_tree(batch_size, request)) is not None:
            return choice
        measure = plugins.find("tuners", "trees")
        texts = itertools.chain(prompts, self.built_in_prompts())
        return measure(self._with_any_tree(request), texts, batch_size, self.draft_directory, on_status)

    def _with_any_tree(self, request: Request | None) -> Executor:
        request = (request or Request()).replace(grammar=None)
        return make_executor(self, self.program(request, tree=presets.root()), request)

    def with_draft(
        self,
        draft: Drafter | DraftRef | str | Path | None,
        *,
        base_directory: Checkpoint | str | Path | None = None,
        draft_confidence: float | None = None,
        corpus: int | None = None,
    ) -> LanguageModel:
        """Return a model with the same base, sharing its parameters, and another draft.

        Args:
            draft: as in `hydrajax.load`.
            base_directory: the base's directory, to reject heads that record another base; None accepts them.
            draft_confidence: as in `hydrajax.load`.
            corpus: as in `hydrajax.load`.

        Raises:
            HydrajaxError: as in `hydrajax.load`.
        """
        ref = DraftRef.parse(draft, corpus=corpus is not None)
        found = find_draft(ref, self, base_directory=base_directory, confidence=draft_confidence, corpus=corpus)
        params = Params(self.params.base, found.params)
        return replace(self, drafter=found.drafter, params=params, draft_directory=found.directory)

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
        grammar: Any = None,
        on_status: Callable[[str], None] | None = None,
        **keywords: Any,
    ) -> Generation | list[Generation]:
        """Generate text for one prompt, or for a list of prompts. See `LanguageModel` for ``draft`` and ``tree``.

        Args:
            prompts: one text, or a list of prompts: texts, lists of token ids, or conversations (lists of messages with
                ``role`` and ``content``, written in the tokenizer's chat template).
            stop: strings that end a text, which ends before the first of them.
            batch_size: prompts decoded together.
            seed: for sampling rules, one or a list with one per prompt.
            logprobs: K, to report each token's log-probability and the K most likely tokens at its position; 0 or True
                for the tokens' own only.
            grammar: the texts that may be generated: a `hydrajax.Grammar`, a JSON schema (a dict) or a pydantic model,
                or a list with one or None per prompt.
            on_status: called with lines of progress; by default a terminal shows what is compiled.
            keywords: ``rule``, ``processors``, ``max_new_tokens`` (default 256) and sampling parameters, one for all
                prompts or a list with one per prompt: ``temperature=[0.2, 1.0]``.

        Returns:
            A `Generation` for one text, a list of them for a list.

        Raises:
            HydrajaxError: for a bad prompt or argument, before decoding starts.

        Example:
            ```python
            m.generate("def area(", max_new_tokens=64).text
            m.generate(["def area(", "class Stack:"], rule="exact", temperature=0.7, batch_size=2)
            ```
        """
        single = isinstance(prompts, (str, Prompt))
        several: list[OnePrompt] = [prompts] if single else items(prompts, "prompts", "a text or a list of prompts")  # type: ignore[list-item]
        if is_conversation(several) and "input_ids" not in several[0]:
            raise HydrajaxError("prompts: got one conversation, expected a list of prompts; write [messages]")
        if several and isinstance(several[0], (int, np.integer)):
            raise HydrajaxError("prompts: got the ids of one prompt, expected a list of prompts; write [ids]")
        grammar = list(map(as_grammar, grammar)) if isinstance(grammar, (list, tuple)) else as_grammar(grammar)
        requests = requests_of_prompts(len(several), grammar=grammar, **keywords)
        if not several:
            return []
        on_status = on_status or _at_terminal
        executor = self._executor_for(several, draft, tree, requests, logprobs, batch_size, on_status)
        requests = [executor.program.fitting(request) for request in requests]
        results = generate(
            executor, several, requests=requests, stop=stop, batch_size=batch_size, seed=seed, on_status=on_status
        )
        return next(results) if single else list(results)

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
        grammar: Any = None,
        on_status: Callable[[str], None] | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> Stream:
        """Generate text for one prompt as a stream. The arguments are those of `generate`.

        Returns:
            An iterator over pieces of text, with the complete `Generation` in ``result`` at the end.

        Raises:
            HydrajaxError: for a bad prompt or argument.

        Example:
            ```python
            for piece in m.stream("def area("):
                print(piece, end="", flush=True)
            ```
        """
        fields = {"max_new_tokens": max_new_tokens, "grammar": as_grammar(grammar), "stop": stop, "seed": seed}
        request = make_request(rule, processors, fields=fields, **parameters)
        on_status = on_status or _at_terminal
        executor = self._executor_for([prompt], draft, tree, [request], logprobs, 1, on_status)
        return stream(executor, prompt, executor.program.fitting(request), on_status=on_status)

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
        grammar: Any = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> Chat:
        """Start a conversation that keeps the KV cache between turns. See `LanguageModel` for the other arguments.

        Args:
            template: chat template, ``auto`` for the tokenizer's own, or the built-in ``vicuna``, ``plain``, ``raw``.
            max_new_tokens: limit of each answer.
            grammar: of every answer, as in `generate`.

        Returns:
            A `Chat`.

        Raises:
            HydrajaxError: for a bad argument, and if the tokenizer does not support the template.
        """
        m, fields = self._drafting(draft), {"max_new_tokens": max_new_tokens, "grammar": as_grammar(grammar)}
        request = make_request(rule, processors, fields=fields, **parameters)
        program = m.with_tree(m.program(request), request, tree)
        from hydrajax.conversation import Chat

        return Chat(m.executor(program, program.fitting(request)), template=template, seed=seed)

    def encode(self, prompts: Sequence[OnePrompt]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """Return token ids, int32 ``[B, P]``, right-padded, and lengths, int32 ``[B]``, for a decode function.

        Raises `HydrajaxError` for a bad prompt.
        """
        ids = list(self.ids_of_prompts(prompts))
        return right_padded(ids, max(map(len, ids), default=0))

    def decode(self, result: DecodeResult) -> list[str]:
        """Return the texts of a decode function's result as they continue a word, without special tokens."""
        if self.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer; use result.ids()")
        return [Continuation(self.tokenizer, None).text(ids) for ids in result.ids()]

    def prompt_ids(self, prompt: OnePrompt, where: str) -> Int[np.ndarray, " P"]:
        """Return the token ids of a prompt, see `hydrajax.decoding.prompt_batch.encode_prompt`."""
        return encode_prompt(prompt, where, self.tokenizer, self.config)

    def ids_of_prompts(self, prompts: Sequence[OnePrompt]) -> Iterator[Int[np.ndarray, " P"]]:
        """Yield the token ids of each prompt, see `hydrajax.decoding.prompt_batch.encode_prompts`."""
        return encode_prompts(prompts, self.tokenizer, self.config)

    def built_in_prompts(self) -> Iterator[Int[np.ndarray, " P"]]:
        """Yield the token ids of the built-in prompts (`hydrajax.text.built_in`) that this base can read."""
        from hydrajax.text.built_in import built_in_prompts

        for prompt in [] if self.tokenizer is None else built_in_prompts(self.tokenizer):
            try:
                yield encode_prompt(prompt, prompt.where, self.tokenizer, self.config)
            except HydrajaxError:  # longer than the context, or not of the vocabulary
                continue

    # --- parts --------------------------------------------------------------------------------------------------------

    def _drafting(self, draft: Drafter | str | Path | None) -> LanguageModel:
        """Return the model with another draft, itself for None."""
        if draft is None:
            return self
        key = draft if isinstance(draft, Drafter) else str(draft)
        if key not in self._drafts:
            self._drafts[key] = self.with_draft(draft)
        return self._drafts[key]

    def _executor_for(
        self,
        prompts: Sequence[OnePrompt],
        draft,
        tree: Tree | None,
        requests: Sequence[Request],
        logprobs: int | bool | None,
        batch_size: int,
        on_status,
    ) -> Executor:
        """Return the executor that serves the requests, with the given tree or the one of `with_tree`."""
        m, key = self._drafting(draft), (batch_size, type(requests[0].rule))
        if tree is not None and tree != AUTO:
            return m.executor(m.program(*requests, tree=tree, logprobs=logprobs))
        if key not in m._fastest or (tree == AUTO and not m._fastest[key][-1]):
            request = next((one for one in requests if one.grammar is not None), requests[0])
            ids = m.ids_of_prompts(prompts)
            found = m.with_tree(m.program(*requests), request, tree, batch_size, ids, on_status)
            m._fastest[key] = {"drafter": found.drafter, "tree": found.tree, "rule": found.rule}, tree == AUTO
        fastest, _ = m._fastest[key]
        return m.executor(m.program(*requests, tree=presets.root(), logprobs=logprobs).replace(**fastest))


def make_executor(m: LanguageModel, program: Program, request: Request | None = None, **options: Any) -> Executor:
    """Return an executor of a program, on the model's devices.

    Args:
        m: the model.
        program: the compiled configuration, with the model's drafter or without a draft.
        request: the default of calls without a request; None for `Program.request`.
        options: for a draft model with its own devices: ``fan_out``, the verification outcomes that it prepares for
            (`hydrajax.ssd.split_executor.SplitExecutor`).

    Raises:
        HydrajaxError: for a drafter that the model was not loaded with, and for arguments that do not fit together.
    """
    drafted = program.drafter == m.drafter
    if not drafted and not isinstance(program.drafter, NoDrafter):
        got, expected = title_of(program.drafter), title_of(m.drafter)
        raise HydrajaxError(f"drafter: got {got}, expected {expected}, which the model was loaded with; use with_draft")
    params = m.params if drafted else Params(m.params.base, {})
    given = m.model, params, program, request
    if m.placement.split and not isinstance(program.drafter, NoDrafter):
        kind = plugins.find("executors", "split")
        return kind(*given, placement=m.placement, tokenizer=m.tokenizer, **options)
    if names := [name for name, value in options.items() if value is not None]:
        raise HydrajaxError(f"{names[0]}: requires a draft model with its own devices (placement)")
    if program.grammars and processes.spans(m.placement.base):
        processes.refuse_several("grammar")
    kind = plugins.find("executors", "stepped" if program.grammars else "fused")
    return kind(*given, tokenizer=m.tokenizer, mesh=m.placement.base)


def _count(params: Any) -> int:
    """Return the number of parameters, without scales of quantised ones and copies."""
    if isinstance(params, Mapping):
        return sum(_count(value) for name, value in params.items() if name not in (COPIED_LM_HEAD, CORPUS))
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantized))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
