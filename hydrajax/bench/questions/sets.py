"""Question sets of published evaluations, from files in their released formats or from the Hub."""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed, one_line
from hydrajax.optional_deps import needs
from hydrajax.text.jsonl import file_content, json_lines, json_value, objects, shown

# Named sets and their files.
FILES = {
    "mt_bench": "mt_bench_question.jsonl",
    "spec_bench": "spec_bench_question.jsonl",
    "alpaca": "alpaca_eval_805_text_davinci_003.json",
    "humaneval": "HumanEval.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl",
}
# nvidia/SPEED-Bench (arXiv 2604.09557) as its scripts write it: Model-Optimizer's Parquet with turns, or NeMo Skills'
# JSONL with messages. The dataset on the Hub has this text in place of turns whose licences forbid copies.
SPEED_BENCH = "speed-bench:"
NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
TEXTS = ("turns", "messages", "question", "instruction", "prompt")  # fields with the user's text; the first is used
ARTICLES = ("article", "document")  # as CNN/DailyMail and XSum name the text to summarise
# Ends with the words before the answer: a base without chat training continues them, and they survive the cut of an
# article that is longer than the context.
SUMMARISE = "Summarise this article in a few sentences.\n\n{article}\n\nSummary:"
IDS = ("question_id", "task_id", "prompt_id", "id")
ENDINGS = r"(\.jsonl?(\.gz)?|\.parquet)$"
# org/name[:configuration[:split]]
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?", re.ASCII)


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question_id: unique within a set.
        record: the complete record, with the references that scores need; ignored by comparison.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    record: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def read_questions(name: str, data: str | Path | None = None) -> list[Question]:
    """Read the questions of a set, in order.

    A record has its text, or a list of texts or of a user's messages, under one of `TEXTS` (and the ``input`` of an
    instruction), and may have an id and a ``category``; the defaults are its number from 1 and the set's name. A record
    with one of `ARTICLES` and no such text is asked as `SUMMARISE`.

    Args:
        name: one of `FILES`; a ``.jsonl`` file, or a ``.json`` file with a list, either also as ``.gz``; a ``.parquet``
            file; one of these files after `SPEED_BENCH`; or a Hub dataset, ``org/name`` or
            ``org/name:configuration:split``.
        data: directory of the named sets.

    Raises:
        HydrajaxError: naming file and line, for anything else.
    """
    name = name.removeprefix(SPEED_BENCH)
    category = name
    if name in FILES:
        if data is None:
            raise HydrajaxError(f"data: the set {name} needs the directory of {FILES[name]}")
        if not os.path.isdir(data):
            raise HydrajaxError(f"data: no such directory: {data}")
        records = _records(Path(data) / FILES[name])
    elif os.path.exists(name) or re.search(ENDINGS, name):
        records, category = _records(Path(name)), re.sub(ENDINGS, "", Path(name).name)
    elif match := HUB.fullmatch(name):
        records, category = _hub_records(**match.groupdict()), match["name"]
    else:
        raise not_allowed("set", name, FILES, ", speed-bench:FILE, FILE.jsonl and org/name")
    questions: dict[int | str, Question] = {}
    for number, (where, record) in enumerate(records, start=1):
        question = _question(where, record, number, category)
        if question.question_id in questions:
            raise HydrajaxError(f"{where}: question_id: {shown(question.question_id)} occurs twice")
        questions[question.question_id] = question
    if not questions:
        raise HydrajaxError(f"set: {name} has no questions")
    return list(questions.values())


def select(
    questions: list[Question],
    categories: list[str] | None = None,
    limit: int | None = None,
    per_category: int | None = None,
) -> list[Question]:
    """Return the first ``limit`` questions of these categories, at most ``per_category`` of each."""
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories or []:
        if category not in known:
            raise not_allowed("categories", category, known)
    chosen, count = [], Counter[str]()
    for question in questions:
        if categories is None or question.category in categories:
            count[question.category] += 1
            if per_category is None or count[question.category] <= per_category:
                chosen.append(question)
    return chosen[:limit]


def digest(questions: Sequence[Question]) -> str:
    """Return a hash of ids, categories and turns."""
    fields = [{name: getattr(one, name) for name in ("question_id", "category", "turns")} for one in questions]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _question(where: str, record: dict, number: int, category: str) -> Question:
    name = next((name for name in (*TEXTS, *ARTICLES) if name in record), None)
    if name is None:
        raise HydrajaxError(
            f"{where}: got the fields {', '.join(record) or 'none'}, expected one of {', '.join(TEXTS)}"
        )
    turns = [record[name]] if isinstance(record[name], str) else record[name]
    if name == "messages":
        turns = [_said(message) for message in turns] if isinstance(turns, list) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        expected = "a user's messages" if name == "messages" else "text or a list of texts"
        raise HydrajaxError(f"{where}: {name}: got {shown(record[name])}, expected {expected}, none empty")
    if any(turn.startswith(NOT_FETCHED) for turn in turns):
        raise HydrajaxError(f"{where}: {name}: got a placeholder; SPEED-Bench's scripts fetch its text (docs/usage.md)")
    if name in ARTICLES:
        turns = [SUMMARISE.format(article=turn.strip()) for turn in turns]
    extra = record.get("input")
    if name == "instruction" and isinstance(extra, str) and extra.strip():
        turns = [f"{turns[0]}\n\n{extra}"]
    question_id = next((record[key] for key in IDS if key in record), number)
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise HydrajaxError(f"{where}: question_id: got {shown(question_id)}, expected an integer or text")
    category = record.get("category", category)
    if not isinstance(category, str) or not category:
        raise HydrajaxError(f"{where}: category: got {shown(category)}, expected text")
    return Question(question_id, category, tuple(turns), record)


def _said(message: Any) -> Any:
    """Return the text of a user's message; None for another one."""
    return message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None


def _records(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield ``(where, record)`` for each line of a JSONL file, element of a JSON list or row of a Parquet file."""
    content = file_content(path, "set")
    if path.suffix == ".parquet":
        return objects((f"{path} row {number}", row) for number, row in enumerate(_rows(content, path), start=1))
    if not path.name.removesuffix(".gz").endswith(".json"):
        return objects(json_lines(content, path))
    records = json_value(content, "file")
    if isinstance(records, HydrajaxError):
        raise HydrajaxError(f"{path}: {records}")
    if not isinstance(records, list):
        raise HydrajaxError(f"{path}: got {shown(records)}, expected a list of objects")
    return objects((f"{path} item {number}", record) for number, record in enumerate(records, start=1))


def _rows(content: bytes, path: Path) -> list[dict]:
    try:
        from pyarrow import parquet  # a dependency of datasets
    except ImportError:
        raise HydrajaxError(needs("datasets")) from None
    try:
        return parquet.read_table(io.BytesIO(content)).to_pylist()
    except Exception as error:  # of several classes
        raise HydrajaxError(f"set: cannot read {path}: {one_line(error)}") from None


def _hub_records(name: str, config: str | None, split: str | None) -> Iterator[tuple[str, dict]]:
    """Yield the records of a Hub dataset: of the named split, else of ``test``, else of the only split."""
    try:
        import datasets  # slow to import, and files need none

        splits = datasets.load_dataset(name, config or None)
    except Exception as error:  # from the library, its HTTP client or the dataset
        raise HydrajaxError(f"set: no such file: {name}; loading it from the Hub failed: {one_line(error)}") from None
    if split is None:
        split = "test" if "test" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split not in splits:
        raise HydrajaxError(f"set: {name}: got split {split}, expected one of {', '.join(splits)}; add :config:split")
    for number, row in enumerate(splits[split], start=1):
        yield f"{name} row {number}", dict(row)
