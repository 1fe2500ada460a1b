"""Asking: every question of a set to every contender, in one interleaved run.

All contenders take turns at each turn of a question, so that a busy moment of the machine hits all alike.
"""

from __future__ import annotations

import statistics
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hydrajax.decoding.prompt_batch import bucket
from hydrajax.errors import HydrajaxError
from hydrajax.questions.answer_files import AnswerFiles
from hydrajax.questions.sets import Question
from hydrajax.text.answers import Generation
from hydrajax.text.jsonl import shown


class Contender(Protocol):
    """Whatever answers, named as its answer file: `hydrajax.questions.contenders.Answerer`, or a made-up one."""

    model_id: str

    def decode(self, ids: list[int], seed: int) -> Generation:
        """The answer to a prompt of these token ids."""


@dataclass(frozen=True)
class Prompter:
    """Conversations as token ids.

    encode: messages (``role``, ``content``) to ids up to where the answer begins. A prompt longer than the context less
    ``max_new_tokens`` loses its oldest tokens, but not a leading ``bos_id``: what was asked last stays, and so does the
    mark that every text of the base's training began with.
    """

    encode: Callable[[list[dict[str, str]]], list[int]]
    context: int
    max_new_tokens: int
    bos_id: int | None = None

    def __post_init__(self):
        if self.max_new_tokens > self.context - 2:
            raise HydrajaxError(
                f"max_new_tokens: must be at most {self.context - 2}, found {self.max_new_tokens}: the model's "
                f"context of {self.context} tokens must hold a prompt too"
            )

    @property
    def room(self) -> int:
        """The longest prompt in tokens."""
        return self.context - self.max_new_tokens

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """The prompt's ids, and how many were cut."""
        ids = self.encode(messages)
        cut = max(len(ids) - self.room, 0)
        kept = int(cut > 0 and ids[0] == self.bos_id)
        return ids[:kept] + ids[kept + cut :], cut


def evaluate(
    questions: Sequence[Question],
    contenders: Sequence[Contender],
    prompter: Prompter,
    files: AnswerFiles,
    *,
    repeats: int = 1,
    seed: int = 0,
    on_question: Callable[[], None] = lambda: None,
) -> None:
    """Ask every contender every question that ``files`` has no answer to, and add the answers.

    Which contender goes first changes from turn to turn. Each has a conversation of its own: its own answers stand in
    its later prompts. A prompt of a width that a contender has not met is first decoded untimed. ``on_question`` is
    called for each question that is done, also for those that were done before.
    """
    warm: set[tuple[str, int]] = set()
    for number, question in enumerate(questions):
        if question.question_id not in files.done:
            talks = [Talk(contender, prompter) for contender in contenders]
            for turn, message in enumerate(question.turns):
                # A draw of its own for every turn, the same in every run whatever else is asked.
                own = zlib.crc32(repr((seed, question.question_id, turn)).encode())
                for talk in talks:
                    talk.ask(message, question)
                    width = talk.contender.model_id, bucket(len(talk.ids), prompter.context)
                    if width not in warm:
                        talk.contender.decode(talk.ids, own)
                        warm.add(width)
                for repeat in range(repeats):
                    for place in range(len(talks)):
                        talks[(place + number + repeat) % len(talks)].answer(own)
                for talk in talks:
                    talk.close()
            files.add([talk.record(question) for talk in talks])
        on_question()


class Talk:
    """A contender's conversation about one question: `ask`, `answer` once per repeat, `close`, and so on."""

    def __init__(self, contender: Contender, prompter: Prompter):
        self.contender, self._prompter = contender, prompter
        self.ids: list[int] = []
        self._messages: list[dict[str, str]] = []
        self._cut: list[int] = []
        self._runs: list[Generation] = []
        self._turns: list[list[Generation]] = []

    def ask(self, message: str, question: Question) -> None:
        self._messages.append({"role": "user", "content": message})
        try:
            self.ids, cut = self._prompter(self._messages)
        except HydrajaxError as error:
            raise HydrajaxError(f"question {shown(question.question_id)}: {error}") from None
        self._cut.append(cut)

    def answer(self, seed: int) -> None:
        self._runs.append(self.contender.decode(self.ids, seed))

    def close(self) -> None:
        self._messages.append({"role": "assistant", "content": text_of(self._runs[0])})
        self._turns.append(self._runs)
        self._runs = []

    def record(self, question: Question) -> dict[str, Any]:
        """The line for the file. Lists have an item per turn; ``accept_lengths`` is one list over all turns, and
        ``decoding_steps`` (Spec-Bench) is one more than the last step's index ``idxs`` (Medusa, EAGLE).

        ``wall_time`` is the median of the repeats, ``wall_times`` all of them; the rest is of the first.
        """
        first = [runs[0] for runs in self._turns]
        times = [[run.wall_time for run in runs] for runs in self._turns]
        choice = {
            "index": 0,
            "turns": [text_of(run) for run in first],
            "decoding_steps": [run.steps for run in first],
            "idxs": [run.steps - 1 for run in first],
            "new_tokens": [run.new_tokens for run in first],
            "wall_time": [statistics.median(seconds) for seconds in times],
            "accept_lengths": [length for run in first for length in run.step_lengths],
            # Ours:
            "output_ids": [run.output_ids for run in first],
            "finish_reasons": [run.finish_reason for run in first],
            "prompt_tokens": [len(run.prompt_ids) for run in first],
            "cut_tokens": self._cut,
            "wall_times": times,
            "repeats_agree": all(run.output_ids == runs[0].output_ids for runs in self._turns for run in runs),
        }
        return {
            "question_id": question.question_id,
            "category": question.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": self.contender.model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }


def text_of(answer: Generation) -> str:
    """An answer's text as the published scripts write it, and as their templates put it into the next prompt."""
    return (answer.text or "").strip()
