"""The loop of a program that cpu_peers.py measures: read requests from standard input, write answers, a line each.

Each program runs in a process of its own, so that its threads do not meet those of another (llama.cpp is 20% slower in
a process that also runs torch). The only argument is a JSON object, see `peer_programs.settings_of`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


def answer_requests(load: Callable[[dict[str, Any]], tuple[Callable, Callable | None]]) -> None:
    """Answer ``{"prompt": ids, "new_tokens": n}`` and ``{"rows": r, "context": c, "steps": n}`` until the input ends.

    Args:
        load: loads the model of the settings and returns two functions: ``decode(prompt, new_tokens)``, which returns
            the greedy ids and does not stop at EOS, and ``time_rows(rows, context, steps)``, which returns the
            milliseconds of a forward pass over ``rows`` tokens, None if the program cannot. None instead of the
            second function: it never can.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints must not meet the answers

    def reply(**answer: Any) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    decode, time_rows = load(json.loads(sys.argv[1]))
    reply(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "rows" in asked:
            reply(ms=time_rows(**asked) if time_rows else None)
        else:
            reply(tokens=[int(token) for token in decode(asked["prompt"], asked["new_tokens"])])


def random_ids(count: int, vocabulary: int) -> Sequence[int]:
    """Return token ids for measurements in which the text does not matter."""
    return [17 * i % vocabulary for i in range(1, count + 1)]
