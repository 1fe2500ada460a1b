"""Read conversations and plain texts from files and from `datasets`.

Bad records are left out and returned with their place and the reason.
"""

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
# Formats with a list of turns: the list's field, and the fields of a turn's role and text.
TURN_LISTS = {"sharegpt": ("conversations", "from", "value"), "messages": ("messages", "role", "content")}
# Formats with one question and its answer. Alpaca's may have an ``input`` too.
ALPACA = (("instruction", "output"), ("instruction", "response"))
PAIRS = {"alpaca": ALPACA, "auto": (*ALPACA, ("prompt", "response"), ("prompt", "completion"), ("question", "answer"))}

Paths = str | Path | Sequence[str | Path]


class DialogueTurn(NamedTuple):
    """``role`` is system, user or assistant; ``content`` is never blank."""

    role: str
    content: str


class Conversation(NamedTuple):
    """At most one system message, then user and assistant in turn, with at least one assistant message (if read with
    ``answered=False``, at least one user message).

    Attributes:
        where: The place in the files for messages, such as ``"chat.jsonl line 3"`` or ``"chat.json record 3"``, from 1.
    """

    messages: tuple[DialogueTurn, ...]
    where: str


class Text(NamedTuple):
    """A text; ``name`` is its path."""

    name: str
    text: str


class BadRecord(NamedTuple):
    """The place of a record that was left out, and the reason."""

    where: str
    reason: str


def read_conversations(
    paths: Paths, format: str = "auto", *, answered: bool = True
) -> tuple[list[Conversation], list[BadRecord]]:
    """Read JSON and JSONL files, gzipped or not, and folders of such files, in order.

    A record is an element of a file's list or a line. Returns conversations and
    bad records. Assistant messages before the first user message and blank system messages are dropped.

    Args:
        format: of the records. ``auto`` detects each and takes {"prompt", "response" or "completion"}, {"question",
            "answer"} and {"history": [{"user", "bot"}, ...]} too.

                sharegpt   {"conversations": [{"from": "human"|"gpt"|"system", "value": text}, ...]}, roles as `ROLES`
                alpaca     {"instruction": text, "input": text, "output": text}; input is optional, or "response"
                messages   {"messages": [{"role": ..., "content": text}, ...]}, or the list alone

        answered: leave out conversations without an assistant message.

    Raises:
        HydrajaxError: a file cannot be read, or no record is usable.
    """
    if format not in FORMATS:
        raise not_allowed("data.format", format, FORMATS)
    suffixes = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    files = (file for file, hidden in _files(paths, suffixes) if not hidden)
    return _parse_all((found for file in files for found in _records(file)), format, _listed(paths), answered)


def holds_conversations(path: str | Path) -> bool:
    """Return True if the file's first record is a conversation, answered or not."""
    for _, record in _records(Path(path)):
        try:
            parse_record(record, answered=False)
        except HydrajaxError:
            return False
        return True
    return False


def read_dataset(name: str, split: str = "train", format: str = "auto") -> tuple[list[Conversation], list[BadRecord]]:
    """Read the records (`read_conversations`) of a data set by `datasets.load_dataset`."""
    try:
        import datasets
    except ImportError:
        raise HydrajaxError(f"data.dataset: {needs('datasets')}") from None
    try:
        records = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, cache, hub and file errors of half a dozen libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HydrajaxError(f"data.dataset: cannot load {name!r}, split {split!r}: {reason}") from None
    # A table has every field in every row: null where the record had none.
    named = (
        (f"{name} record {number}", {key: value for key, value in record.items() if value is not None})
        for number, record in enumerate(records, start=1)
    )
    return _parse_all(named, format, f"{name!r}, split {split!r}")


def read_texts(paths: Paths) -> tuple[list[Text], list[BadRecord]]:
    """Read text files (.txt, .py, .md, any), gzipped or not, and all files in folders, sorted.

    Returns:
        The texts, and the files that were left out: empty, binary, not UTF-8 and, in folders, hidden ones.

    Raises:
        HydrajaxError: a file cannot be read, or no text is left.
    """
    texts, skipped = [], []
    for file, hidden in _files(paths):
        text, reason = "", "is hidden"
        if not hidden:
            content = file_content(file, "data.files")
            try:
                text, reason = content.decode(), "is empty"
            except UnicodeDecodeError:
                content = b"\0"
            if b"\0" in content:  # valid UTF-8, but in no text
                text, reason = "", "is binary or not UTF-8 text"
        if text.strip():
            texts.append(Text(str(file), text))
        else:
            skipped.append(BadRecord(str(file), reason))
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


def _listed(paths: Paths) -> str:
    return str(paths) if isinstance(paths, str | Path) else ", ".join(map(str, paths))


def _files(paths: Paths, suffixes: tuple[str, ...] = ("",)) -> Iterator[tuple[Path, bool]]:
    """``(file, hidden)`` of named files, and of files in folders with a suffix; a hidden folder is one entry."""
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
    """``(where, record)`` of a JSON or JSONL file; a record that is not JSON is a `HydrajaxError`.

    A JSON file is a list of records or one record. Any other file is JSON lines if a line is a record, else one bad
    record, such as a file that was cut off.
    """
    # Bytes that are not UTF-8 spoil the text they are in, which `_checked` leaves out, and not the whole file.
    text = file_content(file, "data.files").decode(errors="surrogateescape")
    whole = json_value(text, "file")
    if isinstance(whole, HydrajaxError) and any(isinstance(value, dict | list) for _, value in json_lines(text, file)):
        yield from json_lines(text, file)
    elif isinstance(whole, list) and not (  # one conversation: a list of messages
        whole and all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in whole)
    ):
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


def parse_record(record: Any, format: str = "auto", answered: bool = True) -> tuple[DialogueTurn, ...]:
    """The messages of one record of `read_conversations`. Raises `HydrajaxError` with the reason, without the place."""
    if isinstance(record, HydrajaxError):
        raise record
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise HydrajaxError(f"got {shown(record)}, expected a JSON object")
    for name, (field, role, content) in TURN_LISTS.items():
        if format in ("auto", name) and field in record:
            return _checked(_turns(record, field, role, content), answered)
    if format == "auto" and "history" in record:
        pairs = _objects(record, "history", ("user", "bot"))
        turns = (
            (role, where, turn[key]) for where, turn in pairs for role, key in (("user", "user"), ("assistant", "bot"))
        )
        return _checked(turns, answered)
    for question, answer in PAIRS.get(format, ()):
        if question in record and answer in record:
            content, extra = record[question], record.get("input") if question == "instruction" else None
            if isinstance(extra, str) and extra.strip() and isinstance(content, str):
                content = f"{content}\n\n{extra}"
            return _checked([("user", question, content), ("assistant", answer, record[answer])])
    raise HydrajaxError(
        f"got {_fields_of(record)}, expected a record in {'a known' if format == 'auto' else format} format"
    )


def _objects(record: dict, field: str, names: tuple[str, str]) -> Iterator[tuple[str, dict]]:
    """``(where in the record, turn)`` of a list of turns that all have the fields ``names``."""
    if not isinstance(record[field], list):
        raise HydrajaxError(f"{field}: got {shown(record[field])}, expected a list")
    for number, turn in enumerate(record[field], start=1):
        if not isinstance(turn, dict) or not turn.keys() >= set(names):
            found = _fields_of(turn) if isinstance(turn, dict) else shown(turn)
            raise HydrajaxError(f"{field} {number}: got {found}, expected fields {' and '.join(names)}")
        yield f"{field} {number}", turn


def _turns(record: dict, field: str, role_field: str, content_field: str) -> Iterator[tuple[str, str, Any]]:
    """``(role, where in the record, content)`` of a list of turns."""
    for where, turn in _objects(record, field, (role_field, content_field)):
        role = turn[role_field]
        if not isinstance(role, str) or role not in ROLES:
            raise HydrajaxError(f"{where}: {role_field}: got {shown(role)}, expected one of {', '.join(ROLES)}")
        yield ROLES[role], where, turn[content_field]


def _checked(turns: Iterable[tuple[str, str, Any]], answered: bool = True) -> tuple[DialogueTurn, ...]:
    """The messages, in the order that `Conversation` describes."""
    messages: list[DialogueTurn] = []
    for role, where, content in turns:
        if not isinstance(content, str):
            raise HydrajaxError(f"{where}: got {shown(content)}, expected text")
        previous = messages[-1].role if messages else None
        blank = not content.strip()
        if (role == "system" and blank) or (role == "assistant" and previous in (None, "system")):
            continue
        if blank:
            raise HydrajaxError(f"{where}: is empty")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise HydrajaxError(f"{where}: is not valid UTF-8 or Unicode text") from None
        if role == "system" and messages:
            raise HydrajaxError(f"{where}: a system message must come first")
        if role == previous:
            raise HydrajaxError(f"{where}: {role} follows {role}, user and assistant must alternate")
        messages.append(DialogueTurn(role, content))
    needed = "assistant" if answered else "user"
    if not any(message.role == needed for message in messages):
        raise HydrajaxError(f"has no {'assistant message after a user message' if answered else 'user message'}")
    return tuple(messages)


def _fields_of(record: dict) -> str:
    return f"fields {shown(', '.join(map(str, record)))}" if record else "no field"
