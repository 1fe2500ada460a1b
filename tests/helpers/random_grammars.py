"""Random regular expressions, and the texts that they allow by Python's own engine."""

from __future__ import annotations

import random

import regex

ALPHABET = ["a", "b", "t", "r", "e", "h", " ", "{", '"', ":", ",", "1", "2", "ß", "日", "🌳"]
SPECIAL = set("{")


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    """Return a pattern of the syntax that Rust and Python share; its texts are of letters of `ALPHABET`."""
    kind = rng.choice(["text", "class", "both", "either", "repeat", "option"] if depth else ["text", "class"])
    if kind == "text":
        return "".join(map(escaped, rng.choices(ALPHABET, k=rng.randint(1, 6))))
    if kind == "class":
        return f"[{''.join(map(escaped, rng.sample(ALPHABET, rng.randint(2, 5))))}]"
    first = random_pattern(rng, depth - 1)
    if kind == "both":
        return first + random_pattern(rng, depth - 1)
    if kind == "either":
        return f"(?:{first}|{random_pattern(rng, depth - 1)})"
    if kind == "option":
        return f"(?:{first})?"
    least = rng.randint(0, 2)
    return f"(?:{first}){{{least},{least + rng.randint(1, 3)}}}"


def escaped(letter: str) -> str:
    return "\\" + letter if letter in SPECIAL else letter


def can_continue(pattern: str, text: bytes) -> bool:
    """Return whether some text of the pattern begins with these bytes, which may end within a character."""
    try:
        return bool(regex.fullmatch(pattern, text.decode(), partial=True))
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        whole, rest = text[: error.start], text[error.start :]
        endings = [letter for letter in ALPHABET if letter.encode().startswith(rest)]
        return any(regex.fullmatch(pattern, whole.decode() + letter, partial=True) for letter in endings)


def is_complete(pattern: str, text: bytes) -> bool:
    try:
        return bool(regex.fullmatch(pattern, text.decode()))
    except UnicodeDecodeError:
        return False
