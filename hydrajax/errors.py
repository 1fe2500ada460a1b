"""The one exception type for mistakes a user can make and mend."""

import re


def one_line(error: object, most: int = 300) -> str:
    """What another library says, in one line that is not too long."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= most else f"{line[:most]} ..."


class HydrajaxError(ValueError):
    """Bad input: the message is one line naming the field, what was found and what is allowed.

    The command line prints the message and exits with code 2; library callers can catch it as a ``ValueError``. What
    was found may come from a hostile file: whatever is in it, the message stays one line that can be printed.
    """

    def __init__(self, message: str = ""):
        line = re.sub(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+", " ", str(message))
        super().__init__(line.encode(errors="backslashreplace").decode())
