"""Answer files as published scripts read them, taken up where a run was killed.

There is one file per contender and one line per question, with every field that these read: Spec-Bench's ``speed.py``
and ``equal.py``, FastChat's judge (``load_model_answers``, which takes any ``*.jsonl`` of the directory for a model of
that name), Medusa's and EAGLE's scripts. What they do not know stands beside it and is ignored by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.questions.sets import Question
from hydrajax.text.appended import append, json_line, keep_settings, whole_lines
from hydrajax.text.jsonl import json_value

SETTINGS = "settings.json"
PER_TURN = ("turns", "decoding_steps", "new_tokens", "wall_time", "output_ids", "cut_tokens")


def answer_directory(directory: str | Path) -> Path:
    """The directory, made if there is none. Raises `HydrajaxError` where that cannot be done."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise HydrajaxError(f"output: {directory} is a file, the name of a directory is needed") from None
    except OSError as error:
        raise HydrajaxError(f"output: cannot make {directory}: {error.strerror}") from None
    return Path(directory)


class AnswerFiles:
    """``MODEL_ID.jsonl`` per contender in a directory, each line on disk when its question is done.

    Opening them takes up what an earlier run left: a question that not all contenders have answered is forgotten, and
    with it a line that was being written when the run was killed. ``answers[model_id][question_id]`` are the records,
    ``done`` the ids of questions answered by all.

    One run at a time: hold the directory with `hydrajax.locking.in_use`.

    Raises `HydrajaxError` where the directory holds answers made with other ``settings`` (a JSON object), whose times
    and texts would not belong together, or a damaged file.
    """

    def __init__(self, directory: str | Path, model_ids: Sequence[str], settings: dict[str, Any]):
        self._directory = answer_directory(directory)
        self._paths = {model_id: self._directory / f"{model_id}.jsonl" for model_id in model_ids}
        begun = any(file.stat().st_size for file in self._directory.glob("*.jsonl"))
        otherwise = "take another directory, or remove its files to begin again"
        holder = f"{self._directory} holds answers"
        keep_settings(self._directory / SETTINGS, settings, holder, begun=begun, otherwise=otherwise)
        found = {model_id: _read(path) for model_id, path in self._paths.items()}
        by_all = set.intersection(*({record["question_id"] for record in records} for records in found.values()))
        self.answers: dict[str, dict[int | str, dict]] = {}
        for model_id, records in found.items():
            kept = [record for record in records if record["question_id"] in by_all]
            self.answers[model_id] = {record["question_id"]: record for record in kept}
            with WholeFile(self._paths[model_id], "output") as file:
                file.write_text("".join(map(json_line, kept)))

    @property
    def done(self) -> set[int | str]:
        return set(next(iter(self.answers.values())))

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """A question's answers, one of each contender; they are on disk when this returns."""
        for record in records:
            append(self._paths[record["model_id"]], [record])
            self.answers[record["model_id"]][record["question_id"]] = record

    def cut_prompts(self, questions: Iterable[Question]) -> dict[str, int]:
        """How many prompts of each contender did not fit the context, over all turns of these questions."""
        return {
            model_id: sum(count > 0 for q in questions for count in answers[q.question_id]["choices"][0]["cut_tokens"])
            for model_id, answers in self.answers.items()
        }


def _read(path: Path) -> list[dict]:
    """The whole lines of an answer file."""
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        record = json_value(line)
        try:
            choice = record["choices"][0]
            turns = {len(choice[field]) for field in PER_TURN}
            fine = len(turns) == 1 and sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
            fine = fine and {"question_id", "category"} <= set(record) and record["model_id"] == path.stem
        except (LookupError, TypeError):  # also where the line is not JSON, and `json_value` returned an error
            fine = False
        if not fine:
            raise HydrajaxError(f"{path} line {number}: is damaged, or no answer of this program; remove the line")
        records.append(record)
    return records
