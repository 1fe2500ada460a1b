"""A loaded base with its drafter, parameters, tokenizer and placement, and executors of programs for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jaxtyping import Int

from hydrajax import ops, plugins, processes
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import bucket, encode_prompt, encode_prompts, right_padded
from hydrajax.decoding.request import Request
from hydrajax.decoding.state import Params, ParamsCheck
from hydrajax.drafters.draft_lm_head import CLUSTERED_LM_HEAD, COPIED_LM_HEAD
from hydrajax.drafters.drafter import CORPUS, Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.loading import find_draft
from hydrajax.models.base_model import BaseModel
from hydrajax.models.init import abstract_base
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import Quantized, described
from hydrajax.ops import trace
from hydrajax.sharding import Placement
from hydrajax.text.continuation import Continuation
from hydrajax.text.prompt import OnePrompt
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.smaller import with_size

if TYPE_CHECKING:
    from hydrajax.drafters.corpus import Corpus

Tree = CandidateTree | str | Path | Sequence[Sequence[int]]
LOW_BIT_NODES = 2  # of default trees in few bits on a CPU: a node costs as much arithmetic, and a step fewer bytes
CPU_NODES = 6  # of default trees on a CPU: with released trees of 64 nodes a step takes five times as long as one token


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A base with its drafter.

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
        base_name: by which the base was loaded, as the caller gave it; None if unknown.
        read_params: reads the base's parameters in another program's form (`hydrajax.from_params`), overwriting older
            ones; None for our own form.
        tempered_logprobs: as in `hydrajax.decoding.program.Program`, of the programs that it makes.
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
    base_name: str | None = None
    read_params: Callable[[Any, Any], dict] | None = None
    tempered_logprobs: bool = False
    _executors: dict = field(default_factory=dict, init=False)  # not shared with a model of other parameters

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

    def default_tree(self, batch_size: int = 1, of_one: CandidateTree | None = None) -> CandidateTree:
        """Return the tree for decoding without measurements: the draft's own for this batch size, else its drafter's.

        Sequences share the nodes that a step should have (`hydrajax.ops.step_rows`): larger batches have smaller trees,
        and those with more sequences than half of these nodes have the root alone.

        It is small where nodes are expensive, so that a draft that predicts well is not slower than no draft. On a CPU
        every node costs arithmetic: the drafter's tree is cut to its `CPU_NODES` likeliest nodes. With int8 or int4
        weights there any tree that was not searched for them is cut to the root and one guess, as a step reads fewer
        bytes for the same arithmetic.

        Args:
            batch_size: sequences decoded together.
            of_one: a tree for one sequence to make smaller ones of; None for the default one.

        Raises:
            HydrajaxError: for a batch of no sequences.
        """
        if batch_size < 1:
            raise HydrajaxError(f"batch_size: got {batch_size}, expected at least 1")
        tree = self._nearest_tree(batch_size)
        if batch_size == 1 or self.drafter.spec.window_nodes or tree != self._nearest_tree(1):
            return tree
        nodes = ops.step_rows() // batch_size
        return presets.root() if nodes < 2 else with_size(of_one or tree, nodes)

    def _nearest_tree(self, batch_size: int) -> CandidateTree:
        """Return the tree that was searched for the nearest batch size up to this one, else the drafter's."""
        read = partial(presets.searched, self.draft_directory, batch_size)
        special = presets.special_base(self.model.quantize, self.model.dtype, self.drafter.spec.branch_nodes)
        if special and (for_this := processes.agreed(self.placement.base, lambda: read(special))) is not None:
            return for_this
        found = processes.agreed(self.placement.base, read)
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
        program = Program(self.drafter, tree, eos_ids=self.eos_ids, tempered_logprobs=self.tempered_logprobs)
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

    def with_draft(
        self,
        draft: Drafter | DraftRef | str | Path | None,
        *,
        base_directory: Checkpoint | str | Path | None = None,
        draft_confidence: float | None = None,
        corpus: int | None = None,
        draft_lm_head: str | None = None,
    ) -> Self:
        """Return a model with the same base, sharing its parameters, and another draft.

        Args:
            draft: as in `hydrajax.load`.
            base_directory: the base's directory, to reject heads that record another base; None accepts them.
            draft_confidence: as in `hydrajax.load`.
            corpus: as in `hydrajax.load`.
            draft_lm_head: as in `hydrajax.load`.

        Raises:
            HydrajaxError: as in `hydrajax.load`.
        """
        ref = DraftRef.parse(draft, corpus=corpus is not None)
        found = find_draft(
            ref, self, base_directory=base_directory, confidence=draft_confidence, corpus=corpus, lm_head=draft_lm_head
        )
        params = Params(self.params.base, found.params)
        return replace(self, drafter=found.drafter, params=params, draft_directory=found.directory)

    def update_params(self, params: Any) -> None:
        """Replace the base's parameters by others of the same shapes, for every draft, executor and decode function.

        Nothing is compiled again, and arrays that were copied are overwritten. Call it between calls of programs. A
        draft keeps its own parameters: it may guess worse, and the text is the new base's.

        Args:
            params: as `hydrajax.from_params` took them; of a model that was loaded, the form of ``m.params.base``.

        Raises:
            HydrajaxError: names the first parameter that is missing or has another shape.
        """
        old = self.params.base
        new = params if self.read_params is None else self.read_params(params, old)
        ParamsCheck(self.model, self.drafter)(self.params._replace(base=new))
        replace_leaves(old, new)

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


def make_executor(m: LoadedModel, program: Program, request: Request | None = None, **options: Any) -> Executor:
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


def replace_leaves(old: dict, new: Mapping[str, Any]) -> None:
    """Put new leaves into nested dicts, which models with other drafts and executors share."""
    for name, value in new.items():
        if isinstance(value, Mapping):
            replace_leaves(old[name], value)
        else:
            old[name] = value


def _count(params: Any) -> int:
    """Return the number of parameters, without scales of quantised ones and copies."""
    if isinstance(params, Mapping):
        return sum(
            _count(value) for name, value in params.items() if name not in (COPIED_LM_HEAD, CLUSTERED_LM_HEAD, CORPUS)
        )
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantized))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
