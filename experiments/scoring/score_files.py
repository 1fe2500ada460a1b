"""Score the answers of all contenders; each value is on disk once it is computed.

``scores/NAME/MODEL_ID.jsonl`` has one line per question. It is a subfolder because FastChat reads every ``*.jsonl`` of
the answer directory as answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydrajax.bench.appended import append, json_line, whole_lines
from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import json_value
from hydrajax.text.records import INTEGER, NUMBER, OBJECT, TEXT, checked, either, object_of
from scoring.score_protocol import Score, Scored

FOLDER = "scores"
LINE = {"question_id": either(INTEGER, TEXT), "digest": TEXT, "values": object_of(NUMBER), "detail": OBJECT}
Values = dict[str, dict[int | str, dict[str, float]]]  # [model_id][question_id][metric]


def score_answers(
    name: str,
    score: Score,
    questions: Sequence[Question],
    answers: Mapping[str, Mapping[int | str, dict]],
    directory: str | Path,
    decode: Callable[[list[int]], str],
    on_question: Callable[[], None] = lambda: None,
) -> Values:
    """Return the values by model id, question id and metric, without questions that have none.

    An answer is scored once, also if several contenders give it or a later run has it again. So equal outputs have
    equal scores, even from a judge whose ratings vary. An answer without a value (`Score.of`) is tried again next time.

    Args:
        name: of the score, for its folder.
        score: scores one answer.
        questions: the questions to score.
        answers: records by model id and question id, as in `AnswerFiles.answers`.
        directory: of the answer files.
        decode: token ids to text with its leading spaces, which the answer files lack.
        on_question: called after each question.
    """
    files = {model_id: _ScoreFile(Path(directory) / FOLDER / name, model_id) for model_id in answers}
    known: dict[str, Scored | None] = {
        line["digest"]: Scored(line["values"], line["detail"]) for file in files.values() for line in file.lines()
    }
    found: Values = {model_id: {} for model_id in answers}
    for question in questions:
        for model_id, file in files.items():
            texts = [decode(ids) for ids in answers[model_id][question.question_id]["choices"][0]["output_ids"]]
            digest = _digest(score.identity(), question, texts)
            if digest not in known:
                known[digest] = score.of(question, texts)
            if (scored := known[digest]) is not None:
                file.keep(question.question_id, digest, scored)
                found[model_id][question.question_id] = scored.values
        on_question()
    return found


def _digest(identity: dict[str, Any], question: Question, texts: Sequence[str]) -> str:
    """Return a hash of everything that a value depends on."""
    parts = [identity, question.question_id, question.turns, question.record, texts]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class _ScoreFile:
    """One contender's scores; damaged and incomplete lines are dropped."""

    def __init__(self, folder: Path, model_id: str):
        self._path, self._model_id = folder / f"{model_id}.jsonl", model_id
        self._lines: dict[int | str, dict] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HydrajaxError(f"output: cannot make {folder}: {error.strerror}") from None
        for text in whole_lines(self._path):
            line = json_value(text)
            with suppress(HydrajaxError):
                self._lines[checked(line, LINE, "")["question_id"]] = line
        with WholeFile(self._path, "output") as file:
            file.write_text("".join(map(json_line, self._lines.values())))

    def lines(self) -> list[dict]:
        return list(self._lines.values())

    def keep(self, question_id: int | str, digest: str, scored: Scored) -> None:
        """Add a score; it is on disk when this returns. The last line of a question counts."""
        if self._lines.get(question_id, {}).get("digest") == digest:
            return
        line = {"question_id": question_id, "model_id": self._model_id, "values": scored.values}
        line |= {"detail": scored.detail, "digest": digest}
        self._lines[question_id] = line
        append(self._path, [line])
