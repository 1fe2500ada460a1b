"""The program in a process that has imported everything, with limits: hundreds of commands take minutes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attacks.registry import Fell

IMPORTED = ["hydrajax.cli.generate", "hydrajax.cli.report", "transformers", "safetensors.numpy", "orbax.checkpoint.v1"]
CONTEXT = multiprocessing.get_context("forkserver")  # a process without threads, so that it may be forked
CONTEXT.set_forkserver_preload(IMPORTED)


def run(arguments: Sequence[object], memory: int, seconds: float, folder: Path) -> tuple[int, str]:
    """Exit code as a shell reports it and what was said on stderr, of ``hydrajax`` with these arguments.

    memory: bytes of addresses that it may have. folder: where it runs. Raises `Fell` where it takes longer.
    """
    with tempfile.TemporaryDirectory() as said:
        err = Path(said) / "err"
        process = CONTEXT.Process(target=_child, args=([*map(str, arguments)], memory, str(folder), str(err)))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise Fell(f"did not end within {seconds:g} seconds")
        code = process.exitcode
        text = err.read_text(errors="replace") if err.exists() else ""
        return (code if code >= 0 else 128 - code), text


def _child(arguments: list[str], memory: int, folder: str, err: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    os.environ["HYDRAJAX_MEASURE_TREES"] = "0"
    os.chdir(folder)
    for path, number in ((os.devnull, 0), (os.devnull, 1), (err, 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
    from hydrajax.cli import main

    sys.exit(main(arguments))
