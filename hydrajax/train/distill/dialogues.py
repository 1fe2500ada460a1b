"""Generate a continuation or the answers for every seed, in batches, and resume after an interruption.

A text's draws depend on a seed of its own (`Dialogue.turn_seed`), never on its batch. Its logits depend on the batch by
rounding, so a resumed run forms the same batches: sequences that the file already has are not decoded again, but keep
their place in the batch.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.bench.questions.dialogue import Dialogue
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import bucket
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.generation import generate
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.templates import PromptEncoder
from hydrajax.train.data.conversations import BadRecord
from hydrajax.train.distill.distill_records import RecordFile
from hydrajax.train.distill.seeds import Seed, temperature_of

OPEN = 16  # conversations in progress, in batches; prompts of similar length are batched together


@dataclass(frozen=True)
class DistillSpec:
    """Settings of a distillation run.

    Attributes:
        draft: name of the draft for the records; it does not change the text. None without a draft.
        temperatures: shared evenly among the seeds; 0 is greedy.
    """

    draft: str | None
    base: str
    temperatures: Sequence[float]
    new_tokens: int
    batch_size: int
    seed: int

    def room(self, context: int) -> int:
        """Return the limit of a prompt in tokens. Raises `HydrajaxError` if a prompt has no room."""
        if self.new_tokens > context - 2:
            raise HydrajaxError(
                f"new_tokens: got {self.new_tokens}, expected at most {context - 2}: the model's context of {context} "
                "tokens must also hold a prompt"
            )
        return context - self.new_tokens


@dataclass
class DialogueResult:
    """Conversations that ended early: too long for the context, or refused by the template."""

    too_long: int = 0
    refused: list[BadRecord] = field(default_factory=list)


def write(
    executor: Executor,
    seeds: Sequence[Seed],
    encoder: PromptEncoder | None,
    spec: DistillSpec,
    file: RecordFile,
    *,
    on_batch: Callable[[list[Generation]], None] = lambda generations: None,
    on_end: Callable[[], None] = lambda: None,
) -> DialogueResult:
    """Continue or answer every seed, and add to ``file`` what it does not have yet.

    Args:
        encoder: encodes conversations; None for beginnings.
    """
    result, context = DialogueResult(), executor.model.config.max_positions
    room, size = spec.room(context), min(spec.batch_size, len(seeds))
    waiting = (SeedDialogue(number, seed, encoder, spec, executor) for number, seed in enumerate(seeds))
    dialogues: list[SeedDialogue] = []

    def continues(dialogue: SeedDialogue) -> bool:
        more = dialogue.next_prompt(room, result)
        if not more:
            on_end()
        return more

    while True:
        dialogues += itertools.islice(filter(continues, waiting), OPEN * size - len(dialogues))
        if not dialogues:
            return result
        batch = next_batch(dialogues, size)
        outputs = [file.output((one.number, one.turn), one.ids) for one in batch]
        if None in outputs:
            generations = decode(executor, batch, spec, size)
            on_batch(generations)
            file.add([one.record(generation) for one, generation in zip(batch, generations, strict=True)])
            outputs = [file.output((one.number, one.turn), one.ids) for one in batch]
        for one, output in zip(batch, outputs, strict=True):
            if encoder is not None:
                one.answer(Continuation(executor.tokenizer, one.ids).text(output))
        ended = {one.number for one in batch if not continues(one)}
        dialogues = [one for one in dialogues if one.number not in ended]


class SeedDialogue(Dialogue):
    """The conversation of one seed; a beginning to continue is a conversation of one turn."""

    def __init__(self, number: int, seed: Seed, encoder: PromptEncoder | None, spec: DistillSpec, executor: Executor):
        super().__init__(spec.seed, number, seed.turns if seed.ids is None else [""], seed.system)
        self.number, self.width = number, 0
        self.temperature = temperature_of(number, spec.temperatures, spec.seed)
        self._source, self._encoder, self._spec = seed, encoder, spec
        self._context = executor.model.config.max_positions

    def next_prompt(self, room: int, result: DialogueResult) -> bool:
        """Go to the next prompt. Return False at the end, and note in ``result`` why if it is early."""
        try:
            more = self.ask()
        except HydrajaxError as error:
            result.refused.append(BadRecord(f"{self._source.source} {self._source.index}", str(error)))
            return False
        if more and len(self.ids) > room:
            result.too_long += 1
            return False
        self.width = bucket(len(self.ids), self._context)
        return more

    def encode(self) -> list[int]:
        if self._source.ids is not None:
            return self._source.ids.tolist()
        for number, message in enumerate(self.messages[-2:], start=max(len(self.messages) - 1, 1)):
            if found := self._encoder.special.search(message["content"]):  # it would become that token
                raise HydrajaxError(f"message {number} contains the text of the special token {found[0]}")
            try:
                message["content"].encode()
            except UnicodeEncodeError:
                raise HydrajaxError(f"message {number} is not valid Unicode text") from None
        return self._encoder.prompt(self.messages)

    def record(self, generation: Generation) -> dict[str, Any]:
        """Return the line for the file."""
        return {
            "prompt_ids": self.ids,
            "output_ids": generation.output_ids,
            "finish_reason": generation.finish_reason,
            "source": self._source.source,
            "index": self._source.index,
            "conversation": self.number,
            "turn": self.turn,
            "temperature": self.temperature,
            "seed": self.turn_seed if self.temperature else None,
            "rule": "exact" if self.temperature else "greedy",
            "draft": self._spec.draft,
            "base": self._spec.base,
        }


def next_batch(dialogues: Sequence[SeedDialogue], size: int) -> list[SeedDialogue]:
    """Choose a batch: one kind of rule, the most frequent prompt width, filled up with the nearest widths.

    The choice depends on the open prompts only, so a resumed run repeats it.
    """
    groups = Counter((one.temperature > 0, one.width) for one in dialogues)
    (drawn, width), _ = min(groups.items(), key=lambda item: (-min(item[1], size), item[0]))
    same = [one for one in dialogues if (one.temperature > 0) == drawn]
    return sorted(same, key=lambda one: (abs(one.width - width), one.number))[:size]


def decode(executor: Executor, batch: Sequence[SeedDialogue], spec: DistillSpec, size: int) -> list[Generation]:
    """Return the answers to a batch; repeated sequences fill it up to ``size``, so that one compilation serves all."""
    filled = [batch[at % len(batch)] for at in range(size)]
    requests = [
        Request(ExactSampling(one.temperature), max_new_tokens=spec.new_tokens if at < len(batch) else 1)
        for at, one in enumerate(filled)
    ]
    seeds = [one.turn_seed for one in filled]
    found = generate(executor, [one.ids for one in filled], requests=requests, batch_size=size, seed=seeds)
    return list(found)[: len(batch)]
