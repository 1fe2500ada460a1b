"""Grammars that take long to compile are refused by a process that can be ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.grammar import trial
from hydrajax.grammar.grammar import Grammar

LONG = {"type": "integer", "multipleOf": 2**31}
FINE = Grammar.choices(["a"])


def refused(grammar: Grammar) -> str:
    with pytest.raises(HydrajaxError) as error:
        _ = grammar.source
    return str(error.value)


DOUBLING = "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(60)) + '\nA60: "x"'


def test_large_grammars_are_refused_before_the_first_token():
    properties = {f"p{n}": {} for n in range(2000)}
    for grammar, message in (
        (Grammar.lark(f"start: %json {json.dumps(LONG)}"), "takes more than 2 s or 1024 MB"),
        (Grammar.json_schema({"const": -(2**63)}), "takes more than"),  # ends the process of llguidance 1.9
        (Grammar.regex("a(b{1000}){1000}"), "too many expressions"),
        (Grammar.json_schema({"properties": properties, "type": "object"}), "Current row has"),
        (Grammar.lark(DOUBLING), "too big"),
    ):
        assert message in refused(grammar)
        assert FINE.source


def test_a_worker_may_be_killed():
    assert FINE.source
    os.kill(trial._worker.pid, signal.SIGKILL)
    assert Grammar.choices(["b"]).source
    killer = threading.Timer(0.3, lambda: os.kill(trial._worker.pid, signal.SIGKILL))
    killer.start()
    assert "takes more than" in refused(Grammar.json_schema(LONG | {"title": "b"}))
    killer.join()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for a process in /proc")
def test_the_worker_ends_with_a_parent_that_is_killed():
    code = "from hydrajax.grammar import trial as t; t.fault_of('start: /a/', '{}'); print(t._worker.pid, flush=True)"
    parent = subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = int(parent.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{worker}").exists()
