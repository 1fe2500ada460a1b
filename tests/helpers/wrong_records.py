"""Records with one error each: in every field of a JSON text and in the text as a whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

from helpers.damage import places

DEEP = 900 * "[" + 900 * "]"  # the deepest nesting that Python reads
MISSING = object()
VALUES = [
    *([], {}, [1], {"a": 1}, None, True, "", "1", "1e5", -1, 2.5, 10**30, 2**31),
    *(float("nan"), float("inf"), [[]], [None], [{}], {"a": None}, "x" * 5000, "a\nb\u2028", "\ud800", MISSING),
]  # fmt: skip


def wrong_fields(text: str, few: bool = False) -> Iterator[tuple[str, str]]:
    """Yield ``(description, text)`` with one error each."""
    content = json.loads(text)
    firsts = [place for place in places(content) if all(key == 0 for key in place if isinstance(key, int))]
    for place in [(), *firsts]:  # only the first item of lists
        for value in VALUES[::3] if few else VALUES:
            if value is MISSING and not place:
                continue
            changed = copy.deepcopy(content)
            outer, *_ = [changed]
            for key in place[:-1]:
                outer = outer[key]
            if not place:
                changed = value
            elif value is MISSING:
                del outer[place[-1]]
            else:
                outer[place[-1]] = value
            yield f"{place} is {'missing' if value is MISSING else repr(value)[:20]}", json.dumps(changed)
        if few:
            continue
        marked = copy.deepcopy(content)
        outer = marked
        for key in place[:-1]:
            outer = outer[key]
        if place:
            outer[place[-1]] = "DEEP"
        else:
            marked = "DEEP"
        yield f"{place} is deep", json.dumps(marked).replace('"DEEP"', DEEP)


def wrong_texts(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield the whole text truncated, empty or replaced."""
    whole = text.encode()
    yield "truncated", whole[: len(whole) // 2]
    yield "without its last byte", whole[:-1]
    yield "empty", b""
    yield "NUL", bytes(len(whole))
    yield "binary", bytes(range(256)) * 9
    yield "UTF-16", text.encode("utf-16")
    yield "too deep", 100_000 * b"["
    yield "digits", 9999 * b"7"
    yield "twice", whole + whole
