"""Question sets of the published evaluations, from files in their released formats or from `datasets`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed, one_line
from hydrajax.text.jsonl import file_content, json_lines, json_value, objects, shown

# Sets that have a name, and the file that `--data` looks for.
FILES = {
    "mt_bench": "mt_bench_question.jsonl",
    "spec_bench": "spec_bench_question.jsonl",
    "alpaca": "alpaca_eval_805_text_davinci_003.json",
    "humaneval": "HumanEval.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl",
}
TEXTS = ("turns", "question", "instruction", "prompt")  # fields with the user's text; the first that is there counts
ARTICLES = ("article", "document")  # of records with an article to sum up, as CNN/DailyMail and XSum name it
# What is asked about an article. It ends in the words before the answer, for a base model that knows no chat, and that
# is what stays where an article is longer than the context.
SUMMARISE = "Summarise this article in a few sentences.\n\n{article}\n\nSummary:"
IDS = ("question_id", "task_id", "prompt_id", "id")
# The Hub's org/name, with a configuration and a split where the default ones will not do.
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?", re.ASCII)


@dataclass(frozen=True)
class Question:
    """turns: what the user says, one after the other. Ids are unique within a set. record: the question's line of the
    file, with the references that scores look for; two questions with the same turns are equal whatever is in it.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    record: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def read_questions(name: str, data: str | Path | None = None) -> list[Question]:
    """The questions of a set, in order.

    name: one of `FILES`, found in the directory ``data``; or a file of the user's own (``.jsonl``, a list in ``.json``,
    either as ``.gz``); or a Hub dataset, ``org/name`` or ``org/name:configuration:split``. A record holds its text, or
    a list of texts, under one of `TEXTS` (with the ``input`` that an instruction may have), and may hold an id and a
    ``category``; otherwise its number from 1 up and the set's name are taken. One of `ARTICLES` without such a text is
    asked as `SUMMARISE`. Other fields are only kept.

    Raises `HydrajaxError` naming file and line for anything else.
    """
    category = name
    if name in FILES:
        if data is None:
            raise HydrajaxError(f"data: is needed for the set {name}: the directory that holds {FILES[name]}")
        if not os.path.isdir(data):
            raise HydrajaxError(f"data: no such directory: {data}")
        records = _records(Path(data) / FILES[name])
    elif os.path.exists(name) or re.search(r"\.jsonl?(\.gz)?$", name):
        records, category = _records(Path(name)), re.sub(r"\.jsonl?(\.gz)?$", "", Path(name).name)
    elif match := HUB.fullmatch(name):
        records, category = _hub_records(**match.groupdict()), match["name"]
    else:
        raise not_allowed("set", name, FILES, ", FILE.jsonl and org/name")
    questions: dict[int | str, Question] = {}
    for number, (where, record) in enumerate(records, start=1):
        question = _question(where, record, number, category)
        if question.question_id in questions:
            raise HydrajaxError(f"{where}: question_id: {shown(question.question_id)} occurs a second time")
        questions[question.question_id] = question
    if not questions:
        raise HydrajaxError(f"set: {name} holds no question")
    return list(questions.values())


def select(
    questions: list[Question],
    categories: list[str] | None = None,
    limit: int | None = None,
    per_category: int | None = None,
) -> list[Question]:
    """The first questions of these categories, ``limit`` in all and ``per_category`` of each.

    Raises `HydrajaxError` for a category that does not occur.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories or []:
        if category not in known:
            raise HydrajaxError(f"categories: found '{category}', the set has {', '.join(known)}")
    chosen, count = [], Counter[str]()
    for question in questions:
        if categories is None or question.category in categories:
            count[question.category] += 1
            if per_category is None or count[question.category] <= per_category:
                chosen.append(question)
    return chosen[:limit]


def _question(where: str, record: dict, number: int, category: str) -> Question:
    name = next((name for name in (*TEXTS, *ARTICLES) if name in record), None)
    if name is None:
        raise HydrajaxError(f"{where}: found {', '.join(record) or 'no field'}; one of {', '.join(TEXTS)} is needed")
    turns = [record[name]] if isinstance(record[name], str) else record[name]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise HydrajaxError(
            f"{where}: {name}: must be text or a list of texts, none empty, found {shown(record[name])}"
        )
    if name in ARTICLES:
        turns = [SUMMARISE.format(article=turn.strip()) for turn in turns]
    extra = record.get("input")
    if name == "instruction" and isinstance(extra, str) and extra.strip():
        turns = [f"{turns[0]}\n\n{extra}"]
    question_id = next((record[key] for key in IDS if key in record), number)
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise HydrajaxError(f"{where}: question_id: must be an integer or text, found {shown(question_id)}")
    category = record.get("category", category)
    if not isinstance(category, str) or not category:
        raise HydrajaxError(f"{where}: category: must be text, found {shown(category)}")
    return Question(question_id, category, tuple(turns), record)


def _records(path: Path) -> Iterator[tuple[str, dict]]:
    """``(where, record)`` of each record of a file: a line of JSON lines, or an element of a JSON list."""
    content = file_content(path, "set")
    if not path.name.removesuffix(".gz").endswith(".json"):
        return objects(json_lines(content, path))
    records = json_value(content, "file")
    if isinstance(records, HydrajaxError):
        raise HydrajaxError(f"{path}: {records}")
    if not isinstance(records, list):
        raise HydrajaxError(f"{path}: must be a list of objects, found {shown(records)}")
    return objects((f"{path} item {number}", record) for number, record in enumerate(records, start=1))


def _hub_records(name: str, config: str | None, split: str | None) -> Iterator[tuple[str, dict]]:
    """The records of a Hub dataset: of the split that is named, else of ``test``, else of the only one."""
    try:
        import datasets  # slow to import, and files need none

        splits = datasets.load_dataset(name, config or None)
    except Exception as error:  # of the library, its HTTP client or the dataset
        raise HydrajaxError(f"set: '{name}' is no file here, and datasets cannot load it: {one_line(error)}") from None
    if split is None:
        split = "test" if "test" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split not in splits:
        found = f"split '{split}'" if split else "no split"
        raise HydrajaxError(f"set: {name}: found {found}, allowed are {', '.join(splits)}: org/name:config:split")
    for number, row in enumerate(splits[split], start=1):
        yield f"{name} row {number}", dict(row)
