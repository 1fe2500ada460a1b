"""Answer files that published scripts read, and that an interrupted run resumes.

One file per contender, one line per question, with every field that these scripts read: Spec-Bench's ``speed.py`` and
``equal.py``, FastChat's judge (``load_model_answers``, which takes every ``*.jsonl`` of the directory for the answers
of a model of that name), Medusa's and EAGLE's. They ignore the additional fields.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydrajax.bench.appended import append, json_line, keep_settings, whole_lines
from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import json_value, shown
from hydrajax.text.records import BOOL, INTEGER, NUMBER, OBJECT, TEXT, checked, either, list_of

SETTINGS = "settings.json"
# Fields that are read back from a line, and from its choice.
LINE = {"question_id": either(INTEGER, TEXT), "category": TEXT, "model_id": TEXT, "choices": list_of(OBJECT, 1)}
PER_TURN = {
    "turns": list_of(TEXT), "decoding_steps": list_of(INTEGER), "new_tokens": list_of(INTEGER),
    "wall_time": list_of(NUMBER), "output_ids": list_of(list_of(INTEGER)), "cut_tokens": list_of(INTEGER),
}  # fmt: skip
CHOICE = PER_TURN | {"accept_lengths": list_of(INTEGER), "repeats_agree": BOOL}


def answer_directory(directory: str | Path) -> Path:
    """Return the directory; create it if needed."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise HydrajaxError(f"output: {directory} is a file, expected a directory") from None
    except OSError as error:
        raise HydrajaxError(f"output: cannot make {directory}: {error.strerror}") from None
    return Path(directory)


class AnswerFiles:
    """``MODEL_ID.jsonl`` per contender in one directory; each line is on disk once its question is answered.

    Opening resumes an earlier run: answers to questions that not every contender has answered are dropped, and so is a
    line that was being written when the run was killed. Hold the directory with `hydrajax.locking.in_use`.

    Args:
        settings: JSON object of what answers and times depend on.

    Attributes:
        answers: records by model id and question id.

    Raises:
        HydrajaxError: if the directory has answers made with other settings, or a damaged file.
    """

    def __init__(self, directory: str | Path, model_ids: Sequence[str], settings: dict[str, Any]):
        self._directory = answer_directory(directory)
        self._paths = {model_id: self._directory / f"{model_id}.jsonl" for model_id in model_ids}
        begun = any(file.stat().st_size for file in self._directory.glob("*.jsonl"))
        otherwise = "choose another directory, or remove its files to start over"
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
        """Ids of the questions that every contender has answered."""
        return set(next(iter(self.answers.values())))

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Add one question's answers, one per contender; they are on disk when this returns."""
        for record in records:
            append(self._paths[record["model_id"]], [record])
            self.answers[record["model_id"]][record["question_id"]] = record

    def cut_prompts(self, questions: Iterable[Question]) -> dict[str, int]:
        """Return the number of prompts that were cut, by contender, over all turns of these questions."""
        return {
            model_id: sum(count > 0 for q in questions for count in answers[q.question_id]["choices"][0]["cut_tokens"])
            for model_id, answers in self.answers.items()
        }


def _read(path: Path) -> list[dict]:
    records: dict[int | str, dict] = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            record = _answer(json_value(line), path.stem, f"{path} line {number}")
            if record["question_id"] in records:
                raise HydrajaxError(f"{path} line {number}: question_id: {shown(record['question_id'])} occurs twice")
        except HydrajaxError as error:
            raise HydrajaxError(f"{error}; the line is damaged or not from this program: remove it") from None
        records[record["question_id"]] = record
    return list(records.values())


def _answer(line: Any, model_id: str, where: str) -> dict:
    record = checked(line, LINE, where)
    if record["model_id"] != model_id:
        raise HydrajaxError(f"{where}: model_id: got {shown(record['model_id'])}, expected the file's name")
    choice = checked(record["choices"][0], CHOICE, f"{where}: choices[0]")
    if len({len(choice[field]) for field in PER_TURN}) != 1:
        raise HydrajaxError(f"{where}: choices[0]: {', '.join(PER_TURN)} must have one item per turn")
    if sum(choice["decoding_steps"]) != len(choice["accept_lengths"]):
        raise HydrajaxError(f"{where}: choices[0].accept_lengths: must have one item per decoding step")
    return record
