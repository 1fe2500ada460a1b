"""Tables of input that is refused."""

from __future__ import annotations

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
