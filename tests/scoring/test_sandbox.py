"""What code in the sandbox can and cannot do, each tried by code that does it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.programs import command
from scoring.confined import MACHINES
from scoring.sandbox import NO_REPORT, PASSED, TIMED_OUT, Limits, run_confined

FILTERED = sys.platform == "linux" and os.uname().machine in MACHINES
filtered = pytest.mark.skipif(not FILTERED, reason="the kernel's filter is of Linux on x86-64 and arm64")
CHECK = "def check(candidate):\n    assert candidate(2) == 3\n"


def outcome(body: str, before: str = "", **limits) -> str:
    """Of ``f`` with this body, put to a check that passes where f(2) is 3."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return run_confined([f"{before}\ndef f(x):\n{lines}", CHECK], ("check", "f"), Limits(**limits))


def test_outcomes():
    before = "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: 'int' = 1\n"
    assert outcome("return x + A().b", before) == PASSED  # annotations work as in a file
    for body, expected in {
        "return x + 1": PASSED,
        "return x": "AssertionError",
        "return x / 0": "ZeroDivisionError",
        "return (": "SyntaxError",
        "import sys\nsys.exit(0)": "SystemExit",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "import os\nos._exit(0)": NO_REPORT,
        "print('x' * 10**6)\nreturn x + 1": PASSED,  # nobody reads it
        "return x + len(input())": "EOFError",
        "import numpy\nreturn x + 1": "ModuleNotFoundError",
        "import os\nassert not os.environ.get('HOME') and not os.listdir()\nreturn x + 1": PASSED,
    }.items():
        assert outcome(body) == expected, body


def test_nothing_passes_that_was_not_checked():
    """Also where the text around the function ends the program, or would swallow the check."""
    for before in ["import sys; sys.exit(0)", "import os; os._exit(0)", "check = print", "'''", "if 0:"]:
        assert outcome("return x", before) != PASSED


def test_a_report_without_the_nonce_is_none():
    forged = 'import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b\'{"outcome": "passed"}\')\n'
    assert outcome(forged + "    except OSError:\n        pass\nos._exit(0)") == NO_REPORT


def test_time():
    begun = time.monotonic()
    assert outcome("while True:\n    pass", cpu_seconds=1) == TIMED_OUT
    assert outcome("import time\ntime.sleep(60)", wall_seconds=0.8) == TIMED_OUT
    assert time.monotonic() - begun < 30


def test_memory():
    assert outcome("return x + len(bytearray(2**30)) // 2**30", memory=1 << 29) == "MemoryError"
    assert outcome("a = [0]\nwhile True:\n    a = a * 2", memory=1 << 29) == "MemoryError"


@filtered
def test_what_linux_refuses():
    for body, expected in {
        "import os\nif os.fork() == 0:\n    os._exit(0)": "PermissionError",
        "import ctypes\nif ctypes.CDLL(None).fork() == 0:\n    import os\n    os._exit(0)\nreturn x": "AssertionError",
        "import subprocess\nsubprocess.run(['/bin/true'])": "PermissionError",
        "import os\nos.execv('/bin/true', ['true'])": "PermissionError",
        "import threading\nthreading.Thread(target=print).start()": "RuntimeError",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)": "PermissionError",
        "import os\nos.kill(os.getppid(), 0)": "PermissionError",
        "open('here.txt', 'w')": "PermissionError",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))": "ValueError",  # so Python calls EPERM
        "open('/proc/self/mem', 'r+b')": "PermissionError",
        "import os\nreturn x + (open(os.__file__).read() != '')": PASSED,  # reading is not refused, and documented
    }.items():
        assert outcome(body) == expected, body


@filtered
def test_files_elsewhere_stay_as_they_are(tmp_path):
    """Written, emptied, renamed, removed and made: one try after the other."""
    there = tmp_path / "there"
    there.write_text("kept")
    tries = [f"open({str(there)!r}, '{mode}')" for mode in ("w", "a", "r+")] + [f"os.truncate({str(there)!r}, 0)"]
    tries += [f"os.{verb}({str(there)!r})" for verb in ("remove", "mkdir", "rmdir")]
    tries += [f"os.{verb}({str(there)!r}, {str(tmp_path / 'new')!r})" for verb in ("rename", "link", "symlink")]
    tries += [f"os.chmod({str(there)!r}, 0)", f"os.mkdir({str(tmp_path / 'new')!r})", f"os.utime({str(there)!r})"]
    body = "import os\nrefused = 0\n"
    body += "".join(f"try:\n    {one}\nexcept PermissionError:\n    refused += 1\n" for one in tries)
    before = there.stat()
    assert outcome(f"{body}return 3 if refused == {len(tries)} else refused") == PASSED
    assert list(tmp_path.iterdir()) == [there]
    assert there.read_text() == "kept"
    assert (there.stat().st_mode, there.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_the_hook_that_stands_in_where_there_is_no_filter(tmp_path):
    """In a process of its own: a hook stays for good."""
    confined = Path(sys.modules[run_confined.__module__].__file__).with_name("confined.py")
    python, *arguments = command("audit_hook", confined)
    done = subprocess.run([python, "-I", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 4
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert outcome("import time\ntime.sleep(60)", wall_seconds=0.3) == TIMED_OUT
    assert outcome("return x + 1") == PASSED
    assert not list(tmp_path.iterdir())
