"""The one exception type for mistakes a user can make and mend."""


class HydrajaxError(ValueError):
    """Bad input: the message is one line naming the field, what was found and what is allowed.

    The command line prints the message and exits with code 2; library callers can catch it as a ``ValueError``.
    """
