"""`LanguageModel`, the result of `hydrajax.load`: choose a tree, and generate text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from hydrajax import plugins
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.constraints import as_grammar
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.forbidden import forbidding, token_sequences
from hydrajax.decoding.keywords import Rule, SamplingKeywords, make_request, requests_of_prompts
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.generation import Stream, generate, stream
from hydrajax.loaded_model import LoadedModel, Tree, make_executor
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import OnePrompt, Prompt, is_conversation, items
from hydrajax.trees import presets

if TYPE_CHECKING:
    from hydrajax.conversation import Chat
    from hydrajax.stored_trees import FastestTree

AUTO = "auto"  # the tree that is measured to be the fastest


class Keywords(SamplingKeywords, total=False):
    """Keyword arguments of `LanguageModel.generate`, for type checkers."""

    draft: Drafter | str | Path | None
    tree: Tree | None
    rule: Rule | Sequence[AcceptanceRule] | None
    processors: Sequence[Any]
    max_new_tokens: int | Sequence[int]
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    min_tokens: int
    ignore_eos: bool
    bad_words: Sequence[str]
    batch_size: int
    seed: int | Sequence[int] | None
    logprobs: int | bool | None
    grammar: Any
    on_status: Callable[[str], None]


def _at_terminal(status: str) -> None:
    """Tell a user at a terminal about compilations, which take seconds."""
    if "compiling" in status and sys.stderr.isatty():
        print(f"{status} ...", file=sys.stderr)


@dataclass(eq=False, repr=False)
class LanguageModel(LoadedModel):
    """A base with its drafter, ready to decode.

    `generate`, `stream` and `chat` share these arguments:

    - ``draft``: another draft, as in `hydrajax.load`, such as ``"lookup"`` or ``"none"``; it is loaded once.
    - ``tree``: a tree, a name such as ``"chain-2"``, a file, or a list of choices. None measures nothing: it takes the
      choice that `autotune` stored for this device and draft, which may be no draft and is printed on stderr; else
      `default_tree`. ``"auto"`` calls `autotune` with the prompts first.
    - ``rule`` and its parameters: a rule, or its name (greedy, exact, typical, rejection, traversal,
      block). ``temperature=0.7``
      alone samples exactly; 0, the default, is greedy.
    - ``processors``: logits processors, or their parameters: ``repetition_penalty=1.2``,
      ``logit_bias={13: -5.0}``.
    - ``seed``: for sampling rules. None draws one, which is the result's ``seed``.
    """

    _drafts: dict = field(default_factory=dict, init=False)  # by name or drafter
    # Drafter, tree and rule, and whether they are for "auto", by batch size and type of rule; trees of `for_batch`.
    _fastest: dict = field(default_factory=dict, init=False)

    def with_tree(
        self,
        program: Program,
        request: Request,
        tree: Tree | None = None,
        batch_size: int = 1,
        prompts: Iterable[np.ndarray] = (),
        on_status: Callable[[str], None] = lambda status: None,
    ) -> Program:
        """Return the program with a tree, or without a draft if that was measured to be faster; a choice is printed.

        Without a choice, a batch that is too large for a tree decodes without a draft that has weights, which would
        read the text for nothing. With rules whose output depends on the tree every batch size has the same tree.

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
        rows = batch_size if program.rule.same_output else 1
        program = program.replace(drafter=self.drafter, tree=self.default_tree(rows))
        if request.grammar is not None:
            request.grammar.start(self.tokenizer, self.config.vocab_size, self.eos_ids)
        if tree == AUTO:
            choice = self._measured(request, prompts, batch_size, on_status)
        else:
            choice = self.measured_tree(batch_size, request)
        drafts = program.tree.size > 1 or self.draft_directory is None
        if choice is not None:
            print(choice, file=sys.stderr)
            drafts, program = choice.tree is not None, program.replace(tree=choice.tree or program.tree)
        return program if drafts else program.autoregressive().replace(forced_nodes=program.forced_nodes)

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
            draft: as in `generate`. Choices are stored for each draft and kind of rule.
            rule: as in `generate`.
            parameters: sampling parameters, as in `generate`.
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

    def for_batch(self, executor: Executor, batch_size: int) -> Executor:
        """Return the executor for the last sequences of a larger batch (``executor_for`` of `hydrajax.generate`).

        Its tree is the one that `autotune` stored for this batch size, else `default_tree`. It is ``executor`` itself
        if that decodes without the draft, or if this was measured to be faster.
        """
        program, key = executor.program, (batch_size, executor.program.rule, "tree")
        if program.drafter != self.drafter:
            return executor
        if key not in self._fastest:
            choice = self.measured_tree(batch_size, executor.request)
            self._fastest[key] = self.default_tree(batch_size) if choice is None else choice.tree
        tree = self._fastest[key]
        return executor if tree is None else self.executor(program.replace(tree=tree), executor.request)

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

    # --- text ---------------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str | Prompt, *, n: Literal[1] = 1, **keywords: Unpack[Keywords]) -> Generation: ...

    @overload
    def generate(self, prompts: str | Prompt, *, n: int, **keywords: Unpack[Keywords]) -> list[Generation]: ...

    @overload
    def generate(
        self, prompts: Sequence[OnePrompt], *, n: int = 1, **keywords: Unpack[Keywords]
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        n: int = 1,
        draft: Drafter | str | Path | None = None,
        tree: Tree | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        bad_words: Sequence[str] = (),
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
            n: samples per prompt, which is prefilled once. The results are those of a list with each prompt n times.
            stop: strings that end a text, which ends before the first of them.
            stop_token_ids: tokens that end a text as EOS does.
            include_stop_str_in_output: a text ends after the stop string or token instead.
            min_tokens: tokens without EOS at the start.
            ignore_eos: EOS does not end a text.
            bad_words: strings that no text contains, as the tokenizer writes them with and without a space before.
            batch_size: sequences decoded together (`hydrajax.generate`). Without ``tree``, the last ones of a list are
                decoded with the trees of smaller batches.
            seed: for sampling rules, one or a list with one per result.
            logprobs: K, to report each token's log-probability and the K most likely tokens at its position; 0 or True
                for the tokens' own only.
            grammar: the texts that may be generated: a `hydrajax.Grammar`, a JSON schema (a dict) or a pydantic model,
                or a list with one or None per prompt.
            on_status: called with lines of progress; by default a terminal shows what is compiled.
            keywords: ``rule``, ``processors``, ``max_new_tokens`` (default 256) and sampling parameters, one for all
                prompts or a list with one per prompt: ``temperature=[0.2, 1.0]``.

        Returns:
            A `Generation` for one sample of one text, else a list of them.

        Raises:
            HydrajaxError: for a bad prompt or argument, before decoding starts.

        Example:
            ```python
            m.generate("def area(", max_new_tokens=64).text
            m.generate(["def area(", "class Stack:"], n=4, rule="exact", temperature=0.7, batch_size=8)
            ```
        """
        single = isinstance(prompts, (str, Prompt))
        several: list[OnePrompt] = [prompts] if single else items(prompts, "prompts", "a text or a list of prompts")  # type: ignore[list-item]
        if is_conversation(several) and "input_ids" not in several[0]:
            raise HydrajaxError("prompts: got one conversation, expected a list of prompts; write [messages]")
        if several and isinstance(several[0], (int, np.integer)):
            raise HydrajaxError("prompts: got the ids of one prompt, expected a list of prompts; write [ids]")
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise HydrajaxError(f"n: got {n}, expected at least 1")
        grammar = list(map(as_grammar, grammar)) if isinstance(grammar, (list, tuple)) else as_grammar(grammar)
        given = ignore_eos, stop_token_ids, include_stop_str_in_output, min_tokens, bad_words
        requests = requests_of_prompts(len(several), grammar=grammar, **keywords)
        requests = [self._ending(one, *given) for one in requests]
        if not several:
            return []
        on_status = on_status or _at_terminal
        executor = self._executor_for(several, draft, tree, requests, logprobs, batch_size, on_status)
        requests = [executor.program.fitting(request) for request in requests for _ in range(n)]
        several = [prompt for prompt in several for _ in range(n)]
        executor_for = partial(self._drafting(draft).for_batch, executor) if tree in (None, AUTO) else None
        results = generate(
            executor, several, requests=requests, stop=stop, batch_size=batch_size, seed=seed,
            executor_for=executor_for, on_status=on_status,
        )  # fmt: skip
        return next(results) if single and n == 1 else list(results)

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
        stop_token_ids: Sequence[int] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        bad_words: Sequence[str] = (),
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
        given = ignore_eos, stop_token_ids, include_stop_str_in_output, min_tokens, bad_words
        request = self._ending(make_request(rule, processors, fields=fields, **parameters), *given)
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> Chat:
        """Start a conversation that keeps the KV cache between turns. See `LanguageModel` for the other arguments.

        Args:
            template: chat template: ``auto`` for the tokenizer's, ``vicuna``, ``plain``, ``raw``, or a file in Jinja.
            max_new_tokens: limit of each answer.
            grammar: of every answer, as in `generate`.
            chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``.

        Returns:
            A `Chat`.

        Raises:
            HydrajaxError: for a bad argument, and if the tokenizer does not support the template.
        """
        m, fields = self._drafting(draft), {"max_new_tokens": max_new_tokens, "grammar": as_grammar(grammar)}
        request = make_request(rule, processors, fields=fields, **parameters)
        program = m.with_tree(m.program(request), request, tree)
        from hydrajax.conversation import Chat

        settings = {"template": template, "seed": seed, "chat_template_kwargs": chat_template_kwargs}
        return Chat(m.executor(program, program.fitting(request)), **settings)

    def _ending(self, request: Request, ignore_eos, stop_token_ids, include_stop, min_tokens, bad_words) -> Request:
        """Return the request with these arguments of `generate`."""
        request = request.replace(
            ignore_eos=ignore_eos, stop_token_ids=stop_token_ids, include_stop_str_in_output=include_stop
        )
        return forbidding(request, self.eos_ids, token_sequences(self.tokenizer, bad_words), min_tokens)

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
