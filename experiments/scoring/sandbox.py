"""Run generated code with the fewest rights that an unprivileged process can give it.

Guaranteed (tests/scoring/test_sandbox.py): the code runs in a separate Python in an empty temporary directory, without
the environment and with the standard library only; wall-clock time, CPU time, memory and file sizes are limited; its
process group is killed afterwards. On Linux (x86-64 and arm64) a seccomp filter refuses new processes, sockets, signals
and every change of a file.

Not guaranteed: the code can read what its user can read. On macOS and other machines an audit hook of Python replaces
the filter, which hostile code can bypass, and the memory limit may not hold. Code that shares a process with its check
can deceive it. Score untrusted models in a container or a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import json_value

PROGRAM = Path(__file__).with_name("confined.py")
PASSED = "passed"
TIMED_OUT, NO_REPORT = "timed out", "ended before its check did"


@dataclass(frozen=True)
class Limits:
    """Limits on wall-clock and CPU seconds, bytes of memory (address space) and bytes per file."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 1 << 30
    file_bytes: int = 1 << 16


def run_confined(parts: Sequence[str], call: tuple[str, str], limits: Limits | None = None) -> str:
    """Run the parts of a program in one module, then call one of its names with another as the argument.

    Returns:
        `PASSED` if the call returned; else the name of the exception, `TIMED_OUT`, or `NO_REPORT` if the process ended
        by itself with any exit code.

    Raises:
        HydrajaxError: on a system without POSIX processes.
    """
    if os.name != "posix":
        raise HydrajaxError("run_code: needs Linux or macOS")
    limits, nonce = limits or Limits(), secrets.token_hex(16)
    task = asdict(limits) | {"parts": list(parts), "call": list(call), "nonce": nonce}
    # -S: without site-packages, so that scores do not depend on installed packages.
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(PROGRAM)]
    with (
        tempfile.TemporaryDirectory(prefix="hydrajax-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as report,  # a file, as the size limit applies to it
    ):
        given.write(json.dumps(task).encode())
        given.seek(0)
        pipes = {"stdin": given, "stdout": report, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=folder, env={}, start_new_session=True, **pipes)
        try:
            process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS: the latter for a group that has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == -signal.SIGXCPU:
            return TIMED_OUT
        report.seek(0)
        return _outcome(report.read(limits.file_bytes), nonce)


def _outcome(report: bytes, nonce: str) -> str:
    found = json_value(report) if report else None
    if isinstance(found, dict) and found.get("nonce") == nonce and isinstance(found.get("outcome"), str):
        return found["outcome"]
    return NO_REPORT
