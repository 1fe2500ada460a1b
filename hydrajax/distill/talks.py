"""Talks: every seed continued, or answered turn by turn, in batches that one run and a broken-off one share.

What is drawn for a text depends on a seed of its own alone (`own_seed`), never on its batch. Its logits depend on the
batch by rounding, so batches are made in the same way again when a run is taken up: of what is already in the file
nothing is decoded, but it stands in the batches that it stood in.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import bucket
from hydrajax.distill.distill_records import RecordFile
from hydrajax.distill.seeds import Seed, temperature_of
from hydrajax.errors import HydrajaxError
from hydrajax.generation import generate
from hydrajax.text.answers import Generation
from hydrajax.text.templates import Encoder
from hydrajax.text.tokenizer import decode_text
from hydrajax.train.data.conversations import BadRecord

OPEN = 16  # batches' worth of conversations under way at once, to choose those of about one length from


@dataclass(frozen=True)
class Writing:
    """What the base writes.

    draft: the name of the draft in the records; the text is the same with any and without. base: the base's name in the
    records. temperatures: shared out evenly, 0 is greedy. new_tokens: most of every answer.
    """

    draft: str | None
    base: str
    temperatures: Sequence[float]
    new_tokens: int
    batch_size: int
    seed: int

    def room(self, context: int) -> int:
        """The longest prompt in tokens. Raises `HydrajaxError` where there is none."""
        if self.new_tokens > context - 2:
            raise HydrajaxError(
                f"new_tokens: must be at most {context - 2}, found {self.new_tokens}: the model's context of {context} "
                "tokens must hold a prompt too"
            )
        return context - self.new_tokens


@dataclass
class Outcome:
    """Conversations that ended before the user's last turn: too long for the context, or refused by the template."""

    too_long: int = 0
    refused: list[BadRecord] = field(default_factory=list)


def write(
    executor: Executor,
    seeds: Sequence[Seed],
    encoder: Encoder | None,
    writing: Writing,
    file: RecordFile,
    *,
    on_batch: Callable[[list[Generation]], None] = lambda generations: None,
    on_end: Callable[[], None] = lambda: None,
) -> Outcome:
    """Continue or answer every seed, and add to ``file`` what it does not hold yet.

    executor: of the base, with room for ``new_tokens``. encoder: writes conversations as token ids; not needed for
    seeds of token ids. on_batch is told what was decoded, on_end is called for every seed that has come to its end.
    Raises `HydrajaxError` for ``new_tokens`` that leave no room for a prompt.
    """
    outcome, context = Outcome(), executor.model.config.max_positions
    room, size = writing.room(context), min(writing.batch_size, len(seeds))
    waiting = (Talk(number, seed, encoder, writing, executor) for number, seed in enumerate(seeds))
    talks: list[Talk] = []

    def went_on(talk: Talk) -> bool:
        more = talk.ask(room, outcome)
        if not more:
            on_end()
        return more

    while True:
        talks += itertools.islice(filter(went_on, waiting), OPEN * size - len(talks))
        if not talks:
            return outcome
        batch = next_batch(talks, size)
        outputs = [file.output((talk.number, talk.turn), talk.ids) for talk in batch]
        if None in outputs:
            generations = decode(executor, batch, writing, size)
            on_batch(generations)
            file.add([talk.record(generation) for talk, generation in zip(batch, generations, strict=True)])
            outputs = [file.output((talk.number, talk.turn), talk.ids) for talk in batch]
        for talk, output in zip(batch, outputs, strict=True):
            talk.hear(output)
        ended = {talk.number for talk in batch if not went_on(talk)}
        talks = [talk for talk in talks if talk.number not in ended]


class Talk:
    """A seed's conversation, as far as it has come: `ask`, `hear`, `ask` and so on. ``ids`` is the prompt to answer."""

    def __init__(self, number: int, seed: Seed, encoder: Encoder | None, writing: Writing, executor: Executor):
        self.number, self.turn, self.ids, self.width = number, -1, [], 0
        self.temperature = temperature_of(number, writing.temperatures, writing.seed)
        self._seed, self._encoder, self._writing, self._executor = seed, encoder, writing, executor
        self._messages = [] if seed.system is None else [{"role": "system", "content": seed.system}]

    @property
    def own_seed(self) -> int:
        """Of what is drawn for this turn, the same in every run whatever else is written."""
        return zlib.crc32(repr((self._writing.seed, self.number, self.turn)).encode())

    def ask(self, room: int, outcome: Outcome) -> bool:
        """Go on to the next prompt. False where there is none, or none that can be answered, which is noted."""
        self.turn += 1
        if self._seed.ids is not None:
            self.ids = self._seed.ids.tolist()
            more = self.turn == 0
        else:
            more = self.turn < len(self._seed.turns)
            if more:
                self._messages.append({"role": "user", "content": self._seed.turns[self.turn]})
                try:
                    self.ids = self._encoded()
                except HydrajaxError as error:
                    outcome.refused.append(BadRecord(f"{self._seed.source} {self._seed.index}", str(error)))
                    return False
        if more and len(self.ids) > room:
            outcome.too_long += 1
            return False
        self.width = bucket(len(self.ids), self._executor.model.config.max_positions)
        return more

    def hear(self, output: list[int]) -> None:
        """The base's answer, which its next prompt holds."""
        if self._seed.ids is None:
            text = decode_text(self._executor.tokenizer, output).strip()
            self._messages.append({"role": "assistant", "content": text})

    def record(self, generation: Generation) -> dict[str, Any]:
        """The line of the file."""
        return {
            "prompt_ids": self.ids,
            "output_ids": generation.output_ids,
            "finish_reason": generation.finish_reason,
            "source": self._seed.source,
            "index": self._seed.index,
            "conversation": self.number,
            "turn": self.turn,
            "temperature": self.temperature,
            "seed": self.own_seed if self.temperature else None,
            "rule": "exact" if self.temperature else "greedy",
            "draft": self._writing.draft,
            "base": self._writing.base,
        }

    def _encoded(self) -> list[int]:
        for number, message in enumerate(self._messages[-2:], start=max(len(self._messages) - 1, 1)):
            if found := self._encoder.special.search(message["content"]):  # it would become that token
                raise HydrajaxError(f"message {number} holds the text of the special token {found[0]}")
            try:
                message["content"].encode()
            except UnicodeEncodeError:
                raise HydrajaxError(f"message {number} is not valid Unicode text") from None
        return self._encoder.prompt(self._messages)


def next_batch(talks: Sequence[Talk], size: int) -> list[Talk]:
    """What to decode together: of one kind of rule, and of the width that most fill, with the next widths if too few.

    It depends on nothing but the prompts that are open, and so is the same when a run is taken up.
    """
    groups = Counter((talk.temperature > 0, talk.width) for talk in talks)
    (drawn, width), _ = min(groups.items(), key=lambda item: (-min(item[1], size), item[0]))
    same = [talk for talk in talks if (talk.temperature > 0) == drawn]
    return sorted(same, key=lambda talk: (abs(talk.width - width), talk.number))[:size]


def decode(executor: Executor, batch: Sequence[Talk], writing: Writing, size: int) -> list[Generation]:
    """Return the answers to a batch, filled up to ``size`` rows so that one compilation serves all."""
    rows = [batch[row % len(batch)] for row in range(size)]
    specs = [
        executor.spec.replace(
            rule=ExactSampling(talk.temperature) if talk.temperature else Greedy(),
            max_new_tokens=writing.new_tokens if row < len(batch) else 1,
        )
        for row, talk in enumerate(rows)
    ]
    seeds = [talk.own_seed for talk in rows]
    found = generate(executor, [talk.ids for talk in rows], specs=specs, batch_size=size, seed=seeds)
    return list(found)[: len(batch)]
