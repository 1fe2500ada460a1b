"""Conversations and plain texts from files and from `datasets`.

One bad record among many is no reason to stop: it is left out, and returned with its place and what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.optional_deps import needs
from hydrajax.text.jsonl import file_content, json_lines, json_value, shown

FORMATS = ("auto", "sharegpt", "alpaca", "messages")

ROLES = {"system": "system", "human": "user", "user": "user"} | dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"
)
# One question and its answer, by the names of their fields. Alpaca's may have an ``input`` besides.
PAIRS = {
    "alpaca": (("instruction", "output"), ("instruction", "response")),
    "pair": (("prompt", "response"), ("prompt", "completion"), ("question", "answer")),
}


class Message(NamedTuple):
    """``role`` is system, user or assistant; ``content`` is never blank."""

    role: str
    content: str


class Conversation(NamedTuple):
    """At most one system message, then user and assistant in turn, with at least one assistant message (or, where it
    was read with ``answered=False``, at least one of the user's).

    where: its place in messages, such as ``"chat.jsonl line 3"`` or ``"chat.json record 3"``, both counted from 1.
    """

    messages: tuple[Message, ...]
    where: str


class Text(NamedTuple):
    """A file's text; ``name`` is its path."""

    name: str
    text: str


class BadRecord(NamedTuple):
    """What was left out, and why."""

    where: str
    reason: str


def read_conversations(
    paths: str | Path | Sequence[str | Path], format: str = "auto", *, answered: bool = True
) -> tuple[list[Conversation], list[BadRecord]]:
    """The conversations of JSON and JSONL files, gzipped or not, and of the folders holding such files, in order.

    A record, which is an element of a file's list or a line, is one of

        sharegpt   {"conversations": [{"from": "human"|"gpt"|"system", "value": text}, ...]}; other names in `ROLES`
        alpaca     {"instruction": text, "input": text, "output": text}; input is optional, output may be "response"
        messages   {"messages": [{"role": ..., "content": text}, ...]}, or the list alone

    ``auto`` tells them apart record by record, and also takes {"prompt", "response" or "completion"}, {"question",
    "answer"} and {"history": [{"user", "bot"}, ...]}. Assistant messages before the first user's are dropped, as are
    blank system messages. answered: leave out conversations in which the assistant says nothing.

    Raises `HydrajaxError` for a file that cannot be read, and where no record is usable.
    """
    if format not in FORMATS:
        raise not_allowed("data.format", format, FORMATS)
    suffixes = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    files = (file for file, hidden in _files(paths, suffixes) if not hidden)
    records = (found for file in files for found in _records(file))
    return _parse_all(records, format, _listed(paths), answered)


def holds_conversations(path: str | Path) -> bool:
    """Whether the file's first record is one of `read_conversations`, though nobody may have answered yet."""
    for _, record in _records(Path(path)):
        try:
            parse_record(record, answered=False)
        except HydrajaxError:
            return False
        return True
    return False


def read_dataset(name: str, split: str = "train", format: str = "auto") -> tuple[list[Conversation], list[BadRecord]]:
    """The conversations of `datasets.load_dataset`, whose rows are records as in `read_conversations`.

    Raises `HydrajaxError` where the package is missing or the data set cannot be had (unknown, or no connection).
    """
    try:
        import datasets
    except ImportError:
        raise HydrajaxError(f"data.dataset: {needs('datasets')}") from None
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, cache, hub and file errors of half a dozen libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HydrajaxError(f"data.dataset: cannot load {name!r}, split {split!r}: {reason}") from None
    # A table has every field in every row, null where the record had none.
    records = ((f"{name} record {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))
    return _parse_all(records, format, f"{name!r}, split {split!r}")


def read_texts(paths: str | Path | Sequence[str | Path]) -> tuple[list[Text], list[BadRecord]]:
    """The texts of plain files (.txt, .py, .md, any), gzipped or not, and of all files below folders, sorted.

    Left out, and returned as such, are files that are empty, binary or not UTF-8 and, within folders, hidden ones.
    Raises `HydrajaxError` where a file cannot be read or no text is left.
    """
    texts, skipped = [], []
    for file, hidden in _files(paths):
        if hidden:
            skipped.append(BadRecord(str(file), "is hidden"))
            continue
        content = file_content(file, "data.files")
        try:
            if b"\0" in content:  # decodes as UTF-8, but is in no text
                raise ValueError
            text = content.decode()
        except ValueError:
            skipped.append(BadRecord(str(file), "is binary or not UTF-8 text"))
            continue
        if text.strip():
            texts.append(Text(str(file), text))
        else:
            skipped.append(BadRecord(str(file), "is empty"))
    if not texts:
        raise HydrajaxError(f"data.files: found no text in {_listed(paths)}{_first(skipped)}")
    return texts, skipped


def summary(kept: Sequence[Any], bad: Sequence[BadRecord], what: str = "conversations", most: int = 3) -> str:
    """``"98 conversations, 2 records left out: chat.jsonl line 3: is not JSON; ..."``, at most ``most`` of them."""
    text = f"{len(kept)} {what}"
    if bad:
        first = "; ".join(f"{where}: {reason}" for where, reason in bad[:most])
        text += f", {len(bad)} records left out: {first}{'; ...' if len(bad) > most else ''}"
    return text


# --- files ----------------------------------------------------------------------------------------------------------


def _listed(paths: str | Path | Sequence[str | Path]) -> str:
    return str(paths) if isinstance(paths, str | Path) else ", ".join(map(str, paths))


def _files(paths: str | Path | Sequence[str | Path], suffixes: tuple[str, ...] = ("",)) -> Iterator[tuple[Path, bool]]:
    """``(file, whether it is hidden)``: files as named, and those below folders that end in one of ``suffixes``.

    A hidden folder is one entry and is not entered.
    """
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.is_dir():
            yield path, False
            continue
        found = []
        for parent, folders, names in os.walk(path):
            found += [(Path(parent, name), True) for name in (*folders, *names) if name.startswith(".")]
            found += [(Path(parent, name), False) for name in names if name.endswith(suffixes) and name[0] != "."]
            folders[:] = [name for name in folders if not name.startswith(".")]
        yield from sorted(found)


# --- records --------------------------------------------------------------------------------------------------------


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """``(where, record)`` of a JSON or JSONL file; the record is a `HydrajaxError` where it is not JSON.

    A file that is JSON as a whole is a list of records, or one record. Any other is JSON lines, if at least one of its
    lines is a record, or else a file that was cut short and counts as one bad record.
    """
    # Bytes that are not UTF-8 spoil the text that they are in, which `_checked` leaves out, and not the whole file.
    text = file_content(file, "data.files").decode(errors="surrogateescape")
    whole = json_value(text, "file")
    if isinstance(whole, HydrajaxError) and any(isinstance(value, dict | list) for _, value in json_lines(text, file)):
        yield from json_lines(text, file)
    elif isinstance(whole, list) and not _is_messages(whole):
        for number, record in enumerate(whole, start=1):
            yield f"{file} record {number}", record
    elif text.strip():
        yield f"{file} record 1", whole


def _parse_all(
    records: Iterable[tuple[str, Any]], format: str, source: str, answered: bool = True
) -> tuple[list[Conversation], list[BadRecord]]:
    conversations, bad = [], []
    for where, record in records:
        try:
            conversations.append(Conversation(parse_record(record, format, answered), where))
        except HydrajaxError as error:
            bad.append(BadRecord(where, str(error)))
    if not conversations:
        raise HydrajaxError(f"data: found no conversation in {source}{_first(bad)}")
    return conversations, bad


def _first(bad: Sequence[BadRecord]) -> str:
    return f"; {len(bad)} left out, the first: {bad[0].where}: {bad[0].reason}" if bad else ""


def parse_record(record: Any, format: str = "auto", answered: bool = True) -> tuple[Message, ...]:
    """The messages of one record of `read_conversations`. Raises `HydrajaxError` saying what is wrong, not where."""
    if isinstance(record, HydrajaxError):
        raise record
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise HydrajaxError(f"must be a JSON object, found {shown(record)}")
    if format in ("auto", "sharegpt") and "conversations" in record:
        return _checked(_turns(record["conversations"], "conversations", "from", "value"), answered)
    if format in ("auto", "messages") and "messages" in record:
        return _checked(_turns(record["messages"], "messages", "role", "content"), answered)
    if format == "auto" and "history" in record:
        return _checked(_history(record["history"]), answered)
    pairs = {"auto": PAIRS["alpaca"] + PAIRS["pair"], "alpaca": PAIRS["alpaca"]}.get(format, ())
    for question, answer in pairs:
        if question in record and answer in record:
            content, extra = record[question], record.get("input") if question == "instruction" else None
            if isinstance(extra, str) and extra.strip() and isinstance(content, str):
                content = f"{content}\n\n{extra}"
            return _checked([("user", question, content), ("assistant", answer, record[answer])])
    raise HydrajaxError(f"is no {'known' if format == 'auto' else format} record: found {_names(record)}")


def _turns(turns: Any, field: str, role_field: str, content_field: str) -> Iterator[tuple[str, str, Any]]:
    """``(role, where in the record, content)`` of a list of turns."""
    if not isinstance(turns, list):
        raise HydrajaxError(f"{field}: must be a list, found {shown(turns)}")
    for number, turn in enumerate(turns, start=1):
        where = f"{field} {number}"
        if not isinstance(turn, dict) or role_field not in turn or content_field not in turn:
            found = _names(turn) if isinstance(turn, dict) else shown(turn)
            raise HydrajaxError(f"{where}: must have {role_field} and {content_field}, found {found}")
        role = turn[role_field]
        if not isinstance(role, str) or role not in ROLES:
            raise HydrajaxError(f"{where}: {role_field}: allowed are {', '.join(ROLES)}, found {shown(role)}")
        yield ROLES[role], where, turn[content_field]


def _history(turns: Any) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(turns, list):
        raise HydrajaxError(f"history: must be a list, found {shown(turns)}")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not {"user", "bot"} <= set(turn):
            raise HydrajaxError(f"history {number}: must have user and bot, found {shown(turn)}")
        yield from ((role, f"history {number}", turn[key]) for role, key in (("user", "user"), ("assistant", "bot")))


def _checked(turns: Iterable[tuple[str, str, Any]], answered: bool = True) -> tuple[Message, ...]:
    """The messages, if they are what `Conversation` promises."""
    messages: list[Message] = []
    for role, where, content in turns:
        if not isinstance(content, str):
            raise HydrajaxError(f"{where}: must be text, found {shown(content)}")
        previous = messages[-1].role if messages else None
        blank = not content.strip()
        if (role == "system" and blank) or (role == "assistant" and previous in (None, "system")):
            continue
        if blank:
            raise HydrajaxError(f"{where}: is empty, some text is needed")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise HydrajaxError(f"{where}: is not valid UTF-8 or Unicode text") from None
        if role == "system" and messages:
            raise HydrajaxError(f"{where}: a system message must come first")
        if role == previous:
            raise HydrajaxError(f"{where}: {role} follows {role}, user and assistant must alternate")
        messages.append(Message(role, content))
    needed = "assistant" if answered else "user"
    if not any(message.role == needed for message in messages):
        raise HydrajaxError(f"has no {'assistant message that answers a user' if answered else 'message of a user'}")
    return tuple(messages)


def _is_messages(value: list) -> bool:
    return bool(value) and all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in value)


def _without_nulls(row: dict) -> dict:
    return {name: value for name, value in row.items() if value is not None}


def _names(record: dict) -> str:
    return shown(", ".join(map(str, record))) if record else "no field"
