"""Run ``hydrajax``: in a new process, in a forked process with a memory limit, or in this process."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.faults.registry import Failure, Trial, Unsupported

ROOT = Path(__file__).resolve().parents[2]
# The program sets its own limits: code between fork and exec is not safe in a process with threads.
LIMITED = """
import json, resource, runpy, sys
for name, limit in json.loads(sys.argv.pop(1)).items():
    resource.setrlimit(getattr(resource, name), (limit, resource.RLIM_INFINITY))
runpy.run_module("hydrajax", run_name="__main__", alter_sys=True)
"""
EXEC = """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "hydrajax", *sys.argv[1:]])
"""


class Completed(NamedTuple):
    """Exit code as a shell reports it, stdout and stderr."""

    code: int
    out: str
    err: str


# --- a new process ----------------------------------------------------------------------------------------------------


def start(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    file_size: int | None = None,
    memory: int | None = None,
    first: str = "",
    within: Sequence[str] = (),
    **popen,
) -> subprocess.Popen:
    """Start ``hydrajax`` with these arguments.

    Args:
        environment: Variables to add to this process's.
        file_size: Limit on the size of files in bytes.
        memory: Limit on the address space in bytes.
        first: Python code to run before the program, in the same process.
        within: Command that runs the program.
        popen: Further arguments of `subprocess.Popen`.
    """
    limits = {"RLIMIT_FSIZE": file_size, "RLIMIT_AS": memory}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HYDRAJAX_MEASURE_TREES": "0", **(environment or {})}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = ["-c", LIMITED, json.dumps(limits)] if limits else ["-m", "hydrajax"]
    program = ["-c", first + EXEC] if first else program
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it, and so do children
    try:
        return subprocess.Popen([*within, sys.executable, *program, *map(str, arguments)], env=env, **pipes | popen)
    finally:
        signal.signal(signal.SIGINT, before)


def wait(process: subprocess.Popen, trial: Trial, stdin: bytes | None = None) -> Completed:
    """Wait for the end of a process. Raises `Failure` after the trial's time limit."""
    try:
        out, err = process.communicate(stdin, timeout=trial.timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failure(f"did not end within {trial.timeout:g} seconds") from None
    out, err = ((text or b"").decode(errors="replace") for text in (out, err))
    return Completed(exit_code(process.returncode), out, err)


def exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def expect(process: subprocess.Popen, trial: Trial, codes: Sequence[int] = (0,)) -> Completed:
    """`wait`, then `check_exit`."""
    completed = wait(process, trial)
    check_exit(completed.code, completed.err, codes)
    return completed


def check_exit(code: int, err: str, codes: Sequence[int] = (0, 2)) -> None:
    """Require one of these codes, no traceback, and one line of ours with code 2."""
    last = " / ".join(err.strip().splitlines()[-3:])[-300:]
    if code not in codes:
        raise Failure(f"exit code: got {code}, expected {', '.join(map(str, codes))}: {last}")
    if "Traceback" in err:
        raise Failure(f"traceback with code {code}: {last}")
    if code == 2 and (count := sum(line.startswith("hydrajax: ") for line in err.splitlines())) != 1:
        raise Failure(f"{count} lines of ours with code 2, expected one: {last}")


@contextmanager
def mounted(folder: Path, options: str, image: Path | None = None) -> Iterator[None]:
    """Mount a small disk, in memory or from an image. Raises `Unsupported` without the right to."""
    folder.mkdir(exist_ok=True)
    disk = ["-t", "tmpfs", "tmpfs"] if image is None else [str(image)]
    if subprocess.run(["mount", "-o", options, *disk, str(folder)], capture_output=True, check=False).returncode:
        raise Unsupported(f"this user cannot mount {'a tmpfs' if image is None else 'an image'}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


# --- a forked process with everything imported: hundreds of commands take minutes -------------------------------------

IMPORTED = ["hydrajax.cli.generate", "hydrajax.cli.report", "transformers", "safetensors.numpy", "orbax.checkpoint.v1"]
CONTEXT = multiprocessing.get_context("forkserver")  # forks from a process without threads
CONTEXT.set_forkserver_preload(IMPORTED)


def run_limited(arguments: Sequence[object], memory: int, seconds: float, folder: Path) -> tuple[int, str]:
    """Run ``hydrajax`` in ``folder`` with limits on address space (bytes) and time. Returns exit code and stderr."""
    with tempfile.TemporaryDirectory() as scratch:
        err = Path(scratch) / "err"
        process = CONTEXT.Process(target=_child, args=([*map(str, arguments)], memory, str(folder), str(err)))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise Failure(f"did not end within {seconds:g} seconds")
        return exit_code(process.exitcode), err.read_text(errors="replace") if err.exists() else ""


def _child(arguments: list[str], memory: int, folder: str, err: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    os.environ["HYDRAJAX_MEASURE_TREES"] = "0"
    os.chdir(folder)
    for path, number in ((os.devnull, 0), (os.devnull, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    from hydrajax.cli import main

    sys.exit(main(arguments))


# --- this process -----------------------------------------------------------------------------------------------------


def call(*arguments: object) -> Completed:
    """Run ``hydrajax`` in this process. Every exception but argparse's exit is a failure."""
    from hydrajax.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code or 0
        out.flush()
        err.flush()
    return Completed(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


def check_call(what: str, *arguments: object) -> Completed:
    """`call`, then `check_exit` with codes 0 and 2 and short lines; failures begin with ``what``."""
    completed = call(*arguments)
    try:
        check_exit(completed.code, completed.err)
    except Failure as error:
        raise Failure(f"{what}: {error}") from None
    if (longest := max(map(len, completed.err.splitlines()), default=0)) > 20_000:
        raise Failure(f"{what}: a line of {longest} characters on stderr")
    return completed
