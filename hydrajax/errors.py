"""The exception for mistakes that a user can correct."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

NEAR = 0.75  # `SequenceMatcher.ratio` of typing errors; other words with the same letters have up to 0.7
FIELD = re.compile(r"([a-z][a-z0-9_]*): ")


def one_line(error: object, most: int = 300) -> str:
    """Return the message of another library's error on one line, cut to ``most`` characters."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= most else f"{line[:most]} ..."


def integer_in(text: str) -> int:
    """Return the integer that ASCII digits write. ``1_0``, ``+1`` and spaces, which `int` reads, are a ValueError."""
    if not re.fullmatch("-?[0-9]+", text):
        raise ValueError("expected an integer")
    return int(text)


class HydrajaxError(ValueError):
    """Bad input. The message is one printable line, whatever it quotes from a file: ``field: got X, expected Y``.

    The field is a Python argument or setting, such as ``max_new_tokens``. The command line prints it as the flag
    ``--max-new-tokens`` (`as_flag`) and exits with code 2; library callers can catch a ``ValueError``.

    Attributes:
        field: the argument or setting, None if the message does not start with one.
        found, allowed: the value and the choices, from `not_allowed`.
    """

    def __init__(self, message: str = "", *, found: object = None, allowed: Iterable[str] = ()):
        line = re.sub(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+", " ", str(message))
        super().__init__(line.encode(errors="backslashreplace").decode())
        self.found, self.allowed = found, tuple(allowed)

    @property
    def field(self) -> str | None:
        match = FIELD.match(str(self))
        return match and match[1]

    def as_flag(self, flags: Iterable[str]) -> str:
        """Return the message with its field as a flag (``--tree: ...``) if it is one of these flags."""
        flag = f"--{(self.field or '').replace('_', '-')}"
        return str(self).replace(f"{self.field}:", f"{flag}:", 1) if flag in flags else str(self)


def not_allowed(field: str, found: object, allowed: Iterable[str], more: str = "") -> HydrajaxError:
    """Return the error for a value that is not one of ``allowed``; ``more`` describes choices that cannot be listed."""
    allowed = tuple(allowed)
    return HydrajaxError(f"{field}: got '{found}', expected {', '.join(allowed)}{more}", found=found, allowed=allowed)


def nearest_first(found: str, names: Iterable[str]) -> list[str]:
    """Return names in the order of their likeness to ``found``."""
    return sorted(names, key=lambda name: -SequenceMatcher(None, found.lower(), name).ratio())


def hint(found: str, names: Iterable[str], others: Mapping[str, str], prefix: str = "") -> str:
    """Return ``; did you mean X?`` for an unknown name, ``""`` if none is near.

    ``others`` has the name here, or a text such as ``"no beam search"``, for names of other libraries. ``prefix``
    precedes known names.
    """
    near = get_close_matches(found.lower(), names, n=1, cutoff=NEAR)
    meant = others.get(found) or (prefix + near[0] if near else "")
    if meant.startswith("no "):
        return f"; hydrajax has {meant}"
    return meant and f"; did you mean {meant}?"


def one_of(names: Sequence[str]) -> str:
    """Return names in quotes, the last after "or"."""
    return " or ".join(", ".join(map(repr, names)).rsplit(", ", 1))
