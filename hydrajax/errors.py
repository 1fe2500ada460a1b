"""The one exception type for mistakes a user can make and mend."""

from __future__ import annotations

import re
from collections.abc import Iterable

FIELD = re.compile(r"([a-z][a-z0-9_]*): ")


def one_line(error: object, most: int = 300) -> str:
    """What another library says, in one line that is not too long."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= most else f"{line[:most]} ..."


class HydrajaxError(ValueError):
    """Bad input: the message is one line, ``field: what was found and what is allowed``.

    The field is the Python argument or setting, such as ``max_new_tokens``. The command line, whose flags have the same
    names, prints it as ``--max-new-tokens`` (`as_flag`) and exits with code 2; library callers can catch it as a
    ``ValueError``. What was found may come from a hostile file: whatever is in it, the message stays one line that can
    be printed.

    field: what the message is about, None where that is no single argument. found, allowed: of a value that is none of
    a few, as `not_allowed` gives them.
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
        """The message with its field as a flag, ``--tree: ...``, where it is one of these flags."""
        flag = f"--{(self.field or '').replace('_', '-')}"
        return str(self).replace(f"{self.field}:", f"{flag}:", 1) if flag in flags else str(self)


def not_allowed(field: str, found: object, allowed: Iterable[str], more: str = "") -> HydrajaxError:
    """``field: found 'oak', allowed are elm, ash``, and ``more`` that is allowed but cannot be listed."""
    allowed = tuple(allowed)
    return HydrajaxError(
        f"{field}: found '{found}', allowed are {', '.join(allowed)}{more}", found=found, allowed=allowed
    )
