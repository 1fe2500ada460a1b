"""Ask every question of a set to every contender, in one interleaved run."""

import statistics
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydrajax.bench.questions.answer_files import AnswerFiles
from hydrajax.bench.questions.contenders import Answerer
from hydrajax.bench.questions.dialogue import Dialogue
from hydrajax.bench.questions.sets import Question
from hydrajax.bench.rounds import in_rounds
from hydrajax.decoding.prompt_batch import bucket
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation
from hydrajax.text.jsonl import shown


@dataclass(frozen=True)
class Prompter:
    """Encode conversations as prompts of at most ``context - max_new_tokens`` tokens.

    Attributes:
        encode: messages (``role``, ``content``) to token ids, up to the start of the answer. A prompt that is too long
            loses its oldest tokens, except a leading BOS: the last question stays whole.
    """

    encode: Callable[[list[dict[str, str]]], list[int]]
    context: int
    max_new_tokens: int
    bos_id: int | None = None

    def __post_init__(self):
        if self.max_new_tokens > self.context - 2:
            raise HydrajaxError(
                f"max_new_tokens: got {self.max_new_tokens}, expected at most {self.context - 2}: the model's context "
                f"of {self.context} tokens must also hold a prompt"
            )

    @property
    def room(self) -> int:
        """Limit of a prompt in tokens."""
        return self.context - self.max_new_tokens

    def __call__(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """Return the prompt's token ids, and the number of tokens cut."""
        ids = self.encode(messages)
        cut = max(len(ids) - self.room, 0)
        kept = int(cut > 0 and ids[0] == self.bos_id)
        return ids[:kept] + ids[kept + cut :], cut


def evaluate(
    questions: Sequence[Question],
    contenders: Sequence[Answerer],
    prompter: Prompter,
    files: AnswerFiles | None,
    *,
    done: Collection[int | str] | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_question: Callable[[], None] = lambda: None,
) -> None:
    """Ask every contender every unanswered question, and add the answers to ``files``.

    All contenders answer a turn before the next is asked, in an order that rotates, so that a busy moment of the
    machine affects all alike. Each has its own conversation: its later prompts contain its own answers. A prompt width
    that is new to a contender is first decoded untimed.

    Args:
        files: None in a process other than the main one, which writes nothing.
        done: ids of the questions that are answered; by default those in ``files``.
        on_question: called for each finished question, also for those of an earlier run.
    """
    done, warm = files.done if done is None else done, set[tuple[str, int]]()
    for number, question in enumerate(questions):
        if question.question_id not in done:
            dialogues = [ContenderDialogue(contender, question, prompter, seed) for contender in contenders]
            for _ in question.turns:
                for dialogue in dialogues:
                    dialogue.ask()
                    width = dialogue.contender.model_id, bucket(len(dialogue.ids), prompter.context)
                    if width not in warm:
                        dialogue.decode()
                        warm.add(width)
                runs = in_rounds(
                    {dialogue: lambda _, dialogue=dialogue: dialogue.decode() for dialogue in dialogues},
                    repeats,
                    order=partial(_rotated, number),
                )
                for dialogue in dialogues:
                    dialogue.close(runs[dialogue])
            if files is not None:
                files.add([dialogue.record() for dialogue in dialogues])
        on_question()


def _rotated(question: int, repeat: int, count: int) -> list[int]:
    return [(place + question + repeat) % count for place in range(count)]


class ContenderDialogue(Dialogue):
    """One contender's conversation about one question."""

    def __init__(self, contender: Answerer, question: Question, prompter: Prompter, seed: int):
        super().__init__(seed, question.question_id, question.turns)
        self.contender, self._question, self._prompter = contender, question, prompter
        self._cut: list[int] = []
        self._answers: list[list[Generation]] = []  # repeats of every turn

    def encode(self) -> list[int]:
        try:
            ids, cut = self._prompter(self.messages)
        except HydrajaxError as error:
            raise HydrajaxError(f"question {shown(self._question.question_id)}: {error}") from None
        self._cut.append(cut)
        return ids

    def decode(self) -> Generation:
        return self.contender.decode(self.ids, self.turn_seed)

    def close(self, runs: list[Generation]) -> None:
        """End the turn with the runs of all repeats."""
        self.answer(runs[0].text)
        self._answers.append(runs)

    def record(self) -> dict[str, Any]:
        """Return the line for the answer file.

        Lists have one item per turn, except ``accept_lengths``, which is one list over all turns. ``decoding_steps``
        (Spec-Bench) is the last step's index ``idxs`` (Medusa, EAGLE) plus one. ``wall_time`` is the median of
        ``wall_times``; the other fields are those of the first repeat.
        """
        first = [runs[0] for runs in self._answers]
        times = [[run.wall_time for run in runs] for runs in self._answers]
        choice = {
            "index": 0,
            "turns": [message["content"] for message in self.messages if message["role"] == "assistant"],
            "decoding_steps": [run.steps for run in first],
            "idxs": [run.steps - 1 for run in first],
            "new_tokens": [run.new_tokens for run in first],
            "wall_time": [statistics.median(seconds) for seconds in times],
            "accept_lengths": [length for run in first for length in run.emitted_per_step],
            # Fields of this package, which the published scripts ignore:
            "output_ids": [run.output_ids for run in first],
            "finish_reasons": [run.finish_reason for run in first],
            "prompt_tokens": [len(run.prompt_ids) for run in first],
            "cut_tokens": self._cut,
            "wall_times": times,
            "repeats_agree": all(run.output_ids == runs[0].output_ids for runs in self._answers for run in runs),
        }
        return {
            "question_id": self._question.question_id,
            "category": self._question.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": self.contender.model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }
