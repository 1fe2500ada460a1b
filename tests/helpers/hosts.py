"""Run one command in several processes that `jax.distributed` connects, as on several hosts."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

PROJECT = Path(__file__).resolve().parents[2]
# XLA's own, of threads that write into each other's lines.
GLOO = re.compile(r"\[Gloo\]|connected peer ranks")


def meeting(n_processes: int) -> list[dict[str, str]]:
    """Return the environment variables of each process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(n_processes)}
    return [shared | {"JAX_PROCESS_ID": str(index)} for index in range(n_processes)]


def start(*commands: Sequence, devices: int = 2, **environment: str) -> list[subprocess.Popen]:
    """Start ``hydrajax`` with each list of arguments in its own process, with simulated CPU devices.

    ``{process}`` in the value of an environment variable stands for the number of the process.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    found = []
    for number, (command, own) in enumerate(zip(commands, meeting(len(commands)), strict=True)):
        own |= {name: value.replace("{process}", str(number)) for name, value in environment.items()}
        variables = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)} | own
        line = [sys.executable, "-m", "hydrajax", *map(str, command)]
        found.append(subprocess.Popen(line, cwd=PROJECT, env=variables, **pipes))
    return found


def finish(processes: Sequence[subprocess.Popen], timeout: float = 300) -> list[SimpleNamespace]:
    """Wait for processes, and return the ``code``, ``out`` and ``err`` of each."""
    found = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            raise
        err = "".join(line for line in err.splitlines(keepends=True) if line.strip() and not GLOO.search(line))
        found.append(SimpleNamespace(code=process.returncode, out=out, err=err))
    return found
