"""Answers to question sets by several decoders in one interleaved run, in the files that published scripts read.

One file per contender and one line per question, with every field that these read: Spec-Bench's ``speed.py`` and
``equal.py``, FastChat's judge (``load_model_answers``, which takes any ``*.jsonl`` of the directory for a model of that
name), Medusa's and EAGLE's scripts. What they do not know stands beside it and is ignored by them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydrajax.decoding.decode import bucket
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.questions.sets import Question
from hydrajax.text.answers import Generation
from hydrajax.text.jsonl import shown

# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """One way to decode. decode: token ids of a prompt and a seed to an answer whose time has no compilation in it."""

    model_id: str
    decode: Callable[[list[int], int], Generation]


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
                f"--max-new-tokens: must be at most {self.context - 2}, found {self.max_new_tokens}: the model's "
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

    All contenders take turns at each turn of a question, the first to go changing from one to the next, so that a busy
    moment of the machine hits all alike. Each has a conversation of its own: its own answers stand in its later
    prompts. A prompt of a width that a contender has not met is first decoded untimed. ``on_question`` is told of each
    question that is done, also of those that were before.
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


# --- files ------------------------------------------------------------------------------------------------------------

SETTINGS = "settings.json"
PER_TURN = ("turns", "decoding_steps", "new_tokens", "wall_time", "output_ids", "cut_tokens")


class AnswerFiles:
    """``MODEL_ID.jsonl`` per contender in a directory, each line on disk when its question is done.

    Opening them takes up what an earlier run left: a question that not all contenders have answered is forgotten, and
    with it a line that was being written when the run was killed. ``answers[model_id][question_id]`` are the records,
    ``done`` the ids of questions answered by all.

    Raises `HydrajaxError` where the directory holds answers made with other ``settings`` (a JSON object), whose times
    and texts would not belong together, or a damaged file.
    """

    def __init__(self, directory: str | Path, model_ids: Sequence[str], settings: dict[str, Any]):
        self._directory = Path(directory)
        self._paths = {model_id: self._directory / f"{model_id}.jsonl" for model_id in model_ids}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise HydrajaxError(f"--output: {directory} is a file, the name of a directory is needed") from None
        except OSError as error:
            raise HydrajaxError(f"--output: cannot make {directory}: {error.strerror}") from None
        self._check_settings(json.loads(json.dumps(settings)))
        found = {model_id: _read(path) for model_id, path in self._paths.items()}
        by_all = set.intersection(*({record["question_id"] for record in records} for records in found.values()))
        self.answers: dict[str, dict[int | str, dict]] = {}
        for model_id, records in found.items():
            kept = [record for record in records if record["question_id"] in by_all]
            self.answers[model_id] = {record["question_id"]: record for record in kept}
            with WholeFile(self._paths[model_id], "--output") as file:
                file.write_text("".join(map(_line, kept)))

    @property
    def done(self) -> set[int | str]:
        return set(next(iter(self.answers.values())))

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """A question's answers, one of each contender; they are on disk when this returns."""
        for record in records:
            path = self._paths[record["model_id"]]
            try:
                with path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(_line(record))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise HydrajaxError(f"--output: cannot write {path}: {error.strerror}") from None
            self.answers[record["model_id"]][record["question_id"]] = record

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path, wanted = self._directory / SETTINGS, "take another directory, or remove its files to begin again"
        if any(file.stat().st_size for file in self._directory.glob("*.jsonl")):
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                before = None
            if not isinstance(before, dict):
                raise HydrajaxError(f"--output: {self._directory} holds answers, but no readable {SETTINGS}; {wanted}")
            for key in dict.fromkeys([*settings, *before]):
                if settings.get(key) != before.get(key):
                    raise HydrajaxError(
                        f"--output: {self._directory} holds answers made with other settings: {key} was "
                        f"{shown(before.get(key))}, now it is {shown(settings.get(key))}; {wanted}"
                    )
        else:
            with WholeFile(path, "--output") as file:
                file.write_text(json.dumps(settings, indent=1) + "\n")


def _line(record: dict[str, Any]) -> str:
    # In ASCII: FastChat opens the file in the encoding of whatever machine it runs on.
    return json.dumps(record) + "\n"


def _read(path: Path) -> list[dict]:
    """The whole lines of an answer file; one without an end was being written when its run was killed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HydrajaxError(f"--output: cannot read {path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            choice = record["choices"][0]
            turns = {len(choice[field]) for field in PER_TURN}
            fine = len(turns) == 1 and sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
            fine = fine and {"question_id", "category"} <= set(record) and record["model_id"] == path.stem
        except (ValueError, RecursionError, LookupError, TypeError):
            fine = False
        if not fine:
            raise HydrajaxError(f"{path} line {number}: is damaged, or no answer of this program; remove the line")
        records.append(record)
    return records


# --- figures ----------------------------------------------------------------------------------------------------------

RESAMPLES = 2000
OVERALL = "overall"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Figures:
    """A contender's answers to the questions of a category.

    tokens_per_step: mean of ``accept_lengths``, root counted. tokens_per_second: of all tokens in all the time, prompts
    included. speedup: its ratio to the baseline's on the same questions; low and high: its 95% interval, questions
    drawn again with replacement (None of a single question). different: questions with another output than the
    baseline's, or with several in the repeats; None where the rule does not promise the same.
    """

    questions: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    low: float | None
    high: float | None
    different: int | None

    @property
    def equal(self) -> bool | None:
        return None if self.different is None else self.different == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.equal}


def summarise(
    answers: dict[str, dict[int | str, dict]], questions: Sequence[Question], baseline: str, same_outputs: bool
) -> dict[str, dict[str, Figures]]:
    """``[model_id][category]`` for each category of the questions, and for all as ``overall``.

    Where others stand beside them, the eight categories of MT-Bench are also taken together, as Spec-Bench does.
    same_outputs: the rule promises every contender the baseline's output.
    """
    groups = {question.category: [] for question in questions}
    for question in questions:
        groups[question.category].append(question.question_id)
    if set(MT_BENCH) < set(groups):
        groups["mt_bench"] = [q.question_id for q in questions if q.category in MT_BENCH]
    groups[OVERALL] = [question.question_id for question in questions]

    def choices(model_id: str, name: str) -> list[dict]:
        return [answers[model_id][question_id]["choices"][0] for question_id in groups[name]]

    return {
        model_id: {name: _figures(choices(model_id, name), choices(baseline, name), same_outputs) for name in groups}
        for model_id in answers
    }


def _figures(own: list[dict], plain: list[dict], same_outputs: bool) -> Figures:
    tokens, seconds, steps = (_totals(own, field) for field in ("new_tokens", "wall_time", "decoding_steps"))
    plain_tokens, plain_seconds = _totals(plain, "new_tokens"), _totals(plain, "wall_time")
    speedup, low, high = speedup_interval(tokens, seconds, plain_tokens, plain_seconds)
    pairs = zip(own, plain, strict=True)
    different = sum(a["output_ids"] != b["output_ids"] or not a["repeats_agree"] for a, b in pairs)
    return Figures(
        questions=len(own),
        tokens=int(tokens.sum()),
        steps=int(steps.sum()),
        seconds=float(seconds.sum()),
        tokens_per_step=float(tokens.sum() / steps.sum()),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        speedup=speedup,
        low=low,
        high=high,
        different=different if same_outputs else None,
    )


def _totals(choices: list[dict], field: str) -> np.ndarray:
    """Per question, over its turns."""
    return np.array([sum(choice[field]) for choice in choices], float)


def speedup_interval(
    tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray
) -> tuple[float, float | None, float | None]:
    """The ratio of two rates from per-question totals, and its 95% bootstrap interval over questions."""

    def ratio(totals):
        return (totals[0] / totals[1]) / (totals[2] / totals[3])

    columns = np.stack([tokens, seconds, plain_tokens, plain_seconds])
    speedup, count = float(ratio(columns.sum(axis=1))), columns.shape[1]
    if count < 2:
        return speedup, None, None
    # How often each question is drawn; a question's two rates stay together, for they were measured side by side.
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    low, high = np.percentile(ratio(columns @ drawn.T), [2.5, 97.5])
    return speedup, float(low), float(high)
