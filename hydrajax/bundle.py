"""`Bundle`: a base, a drafter, their parameters and the tokenizer, all that turning prompts into text needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import make_engine
from hydrajax.decoding.loop import Bursts
from hydrajax.decoding.prompts import bucket, check_prompt
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.registry import title_of
from hydrajax.errors import HydrajaxError
from hydrajax.models.base import BaseModel
from hydrajax.ssd.decode import ApartFn, are_apart, make_apart_fn
from hydrajax.text.prompt import Prompt
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree


@dataclass(eq=False, repr=False)
class Bundle:
    """A base with its drafter, ready to decode.

    tokenizer: the directory's tokenizer (transformers), None if it has none. eos_ids: ids that end generation.
    draft_directory: where the heads were loaded from, None for a drafter that was not. compiled: which programs
    `hydrajax.generation` has compiled, for which shapes.
    """

    model: BaseModel
    drafter: Drafter
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    draft_directory: Path | None = None
    compiled: set = field(default_factory=set)
    _bursts: dict = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line, from shapes alone: nothing is fetched from a device."""
        config, draft = self.model.config, _count(self.params.draft)
        base = f"{type(self.model).__name__} with {_millions(_count(self.params.base))} parameters"
        parts = [
            f"{base}, {self.model.dtype.name}",
            title_of(self.drafter) + (f" with {_millions(draft)}" if draft else ""),
            f"vocabulary {config.vocab_size}, context {config.max_positions}",
            "no tokenizer" if self.tokenizer is None else "tokenizer",
        ]
        return f"<{type(self).__name__}: {'; '.join(parts)}>"

    def bursts(
        self,
        tree: CandidateTree,
        rule: AcceptanceRule,
        max_new_tokens: int,
        logprobs: bool = False,
        top_logprobs: int = 0,
    ) -> Bursts | ApartFn:
        """An engine for this tree, this *kind* of rule and at least as many new tokens, made once and kept.

        So a rule with other numbers, or another limit that the same power of two covers, compiles nothing new. Raises
        `HydrajaxError` for what does not fit together.
        """
        room = bucket(max_new_tokens, self.model.config.max_positions)
        key = (tree, jax.tree.structure(rule), room, logprobs, top_logprobs)
        if key not in self._bursts:
            settings = {"max_new_tokens": room, "eos_ids": self.eos_ids}
            settings |= {"logprobs": logprobs, "top_logprobs": top_logprobs}
            if are_apart(self.params):
                self._bursts[key] = make_apart_fn(self.model, self.drafter, tree, rule, **settings)
            else:
                self._bursts[key] = Bursts(make_engine(self.model, self.drafter, tree, rule, **settings))
        return self._bursts[key]

    def default_tree(self, batch_size: int = 1) -> CandidateTree:
        """The tree that was searched for these heads, else the drafter's own choice."""
        return presets.searched(self.draft_directory, batch_size) or presets.by_name(self.drafter.spec.default_tree)

    def prompt_ids(self, prompt: str | Sequence[int] | Sequence[dict] | Prompt, where: str) -> np.ndarray:
        """Token ids of one prompt, int32 ``[P]``, checked against the model.

        prompt: text, ids, the messages of a conversation, or a `Prompt`. ``where`` names it in messages unless it
        brings a name. Raises `HydrajaxError` for a prompt that is empty, too long or not of these kinds.
        """
        if not isinstance(prompt, Prompt):
            prompt = Prompt(prompt, where)
        ids = np.asarray(prompt.ids(self.tokenizer), object)  # object: an id may exceed 64 bits, and is refused here
        check_prompt(ids, prompt.where, self.model.config)
        return ids.astype(np.int32)

    def ids_of_prompts(self, prompts: Sequence[Any]) -> Iterator[np.ndarray]:
        """`prompt_ids` of each, named in messages by its number; one that is not asked for is not encoded."""
        if isinstance(prompts, str):
            raise HydrajaxError("prompts: must be a list of prompts, found one text; write [text]")
        for row, prompt in enumerate(prompts):
            yield self.prompt_ids(prompt, f"prompt {row}")


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
