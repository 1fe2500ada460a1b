"""Errors of input that is refused, alone and in tables."""

import re
from collections.abc import Callable

import pytest

from hydrajax.errors import HydrajaxError


def assert_refused(call: Callable, *cases) -> None:
    """Check the error of ``call(*arguments)`` for each case ``(*arguments, message)``.

    The error is one line that contains the message. Three dots in a message stand for any text.
    """
    for *arguments, message in cases:
        try:
            call(*arguments)
        except HydrajaxError as error:
            found = str(error)
        else:
            pytest.fail(f"{arguments}: not refused")
        assert "\n" not in found, found
        found.encode()  # can be printed
        assert re.search(".*".join(map(re.escape, message.split("..."))), found), f"{arguments}: {found}"


def refusal(call: Callable, *pieces: str) -> str:
    """Return the message of the `HydrajaxError`, after checking that it is one line with every given part."""
    with pytest.raises(HydrajaxError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for piece in pieces:
        assert piece in message
    return message
