"""Ctrl-C and SIGTERM reach the command, also in callbacks whose exceptions Python discards."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from hydrajax.cli.signals import Terminated, terminable


@pytest.fixture(autouse=True)
def _interruptible():
    """Raise KeyboardInterrupt on SIGINT also if the tests run in the background, where a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_during_a_callback_of_the_garbage_collector_is_not_lost(number, raised):
    """JAX registers such a callback, and compilation collects garbage often."""
    calls = []

    def callback(phase, info):
        calls.append(phase)
        if len(calls) == 1:
            os.kill(os.getpid(), number)
        if len(calls) == 2:
            time.sleep(0.1)  # the signal that is sent again arrives here too

    def collect_for_seconds():
        with terminable():
            for _ in range(500):
                gc.collect(0)
                time.sleep(0.01)

    hook = sys.unraisablehook
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt) as found:
            collect_for_seconds()
    finally:
        gc.callbacks.remove(callback)
    assert found.type is raised
    assert 2 <= len(calls) < 500
    assert sys.unraisablehook is hook


def test_an_interrupted_program_does_not_wait_for_pythons_cleanup():
    """XLA's threads may still compile then, and crash."""
    code = """if True:
        import atexit, os, sys
        from hydrajax.cli import run_command
        def run(args):
            print("begun")
            raise KeyboardInterrupt
        atexit.register(os.abort)
        sys.exit(run_command("x", "", lambda parser: None, run, None))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "hydrajax: interrupted\n")


def test_other_errors_of_callbacks_are_reported(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Broken:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    with terminable():
        Broken(ZeroDivisionError())
        Broken(RuntimeError("Event loop is closed"))  # a repeated error on a full disk
        Broken(RuntimeError("Event loop is open"))
    assert [str(one.exc_value) for one in told] == ["", "Event loop is open"]
