"""The one exception type for mistakes a user can make and mend."""

LONGEST = 2000  # characters of a message


class HydrajaxError(ValueError):
    """Bad input: the message is one line naming the field, what was found and what is allowed.

    The command line prints the message and exits with code 2; library callers can catch it as a ``ValueError``. What
    was found may come from a hostile file: whatever is in it, the message stays one printable line.
    """

    def __init__(self, message: str):
        line = " ".join(str(message).split()).encode(errors="backslashreplace").decode()
        super().__init__(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")
