"""Faults in `generate`, `evaluate` and `distill`. The same command must then finish with the undisturbed output."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from tools.faults.commands import expect, start, wait
from tools.faults.fixtures import base, prompts, questions, training_config
from tools.faults.registry import Failure, Trial, fault

COUNT = 24  # of prompts, questions and seeds
KILLS = 3  # of one command
TIMES = ("wall_time", "wall_times", "answer_id", "tstamp")  # fields that differ from run to run
COMMANDS = ("generate", "evaluate", "distill")


def command(name: str, trial: Trial) -> list:
    """A command that writes `output`."""
    model = ["--base", base(trial), "--draft", "lookup", "--tree", "chain-2", "--dtype", "float32"]
    written = ["--max-new-tokens", 24, "--output", output(name, trial)]
    if name == "generate":
        return ["generate", *model, "--prompts", prompts(trial, COUNT), *written]
    if name == "evaluate":
        return ["evaluate", *model, "--template", "plain", "--set", questions(trial, COUNT), *written]
    flags = ["--count", COUNT, "--prompt-tokens", 8, "--new-tokens", 16, "--batch-size", 2]
    return ["distill", "--config", training_config(trial, 2, 1), *flags, "--output", output(name, trial)]


def output(name: str, trial: Trial) -> Path:
    return trial.folder / ("answers" if name == "evaluate" else "out.jsonl")


def content(name: str, trial: Trial) -> list:
    """The records of the output without times."""
    path = output(name, trial)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [_without_times(json.loads(line)) for file in files for line in file.read_text().splitlines()]


def _without_times(value):
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if name not in TIMES}
    return value


def undisturbed(name: str, trial: Trial) -> tuple[list, float]:
    """The records that an undisturbed command writes, and its seconds."""

    def make(folder: Path) -> tuple[list, float]:
        own = replace(trial, folder=folder)
        arguments = command(name, own)
        expect(start(*arguments), own)  # fills the compilation cache
        began = time.monotonic()
        expect(start(*arguments), own)
        return content(name, own), time.monotonic() - began

    return trial.once(f"undisturbed {name}", make)


def check_equal(name: str, trial: Trial) -> None:
    if content(name, trial) != undisturbed(name, trial)[0]:
        raise Failure(f"{name}: the output differs from that of an undisturbed run")


def finish(name: str, trial: Trial) -> None:
    """Run the command undisturbed and check its output."""
    expect(start(*command(name, trial)), trial)
    check_equal(name, trial)


@fault("decode-sigkill", seeds=9)
def killed(trial: Trial) -> int:
    """SIGKILL at random moments. `generate` leaves a whole output or none."""
    name = trial.random.choice(COMMANDS)
    _, seconds = undisturbed(name, trial)
    for _ in range(KILLS):
        process = start(*command(name, trial))
        time.sleep(trial.random.uniform(0, seconds))
        process.kill()
        process.communicate()
        if name == "generate" and output(name, trial).exists():
            check_equal(name, trial)
    finish(name, trial)
    return KILLS


@fault("decode-signal", seeds=9)
def stopped(trial: Trial) -> None:
    """SIGTERM or SIGINT at a random moment: code 143 or 130, and no half-written file."""
    name, number = trial.random.choice(COMMANDS), trial.random.choice((signal.SIGTERM, signal.SIGINT))
    _, seconds = undisturbed(name, trial)
    process = start(*command(name, trial))
    at = trial.random.uniform(0, seconds)
    time.sleep(at)
    process.send_signal(number)
    code, _, err = wait(process, trial)
    what = f"{name}, signal {number} after {at:.2f} of {seconds:.2f} s"
    if code not in (0, 128 + number):
        raise Failure(f"{what}: exit code {code}: {err[-200:]}")
    # Python's own traceback during its imports cannot be prevented.
    if "Traceback" in err and "<frozen importlib._bootstrap>" not in err:
        raise Failure(f"{what}: a traceback: {err.strip()[-100:]!r}")
    folders = [trial.folder, *filter(Path.is_dir, [output(name, trial)])]
    if litter := [file for folder in folders for file in os.listdir(folder) if file.startswith(".")]:
        raise Failure(f"{what}: {litter[0]} is left")
    finish(name, trial)


@fault("decode-concurrent", seeds=4)
def concurrent(trial: Trial) -> None:
    """Two processes, one output: the second is refused and names the first."""
    name = trial.random.choice(COMMANDS[1:])
    _, seconds = undisturbed(name, trial)
    arguments = command(name, trial)
    first = start(*arguments)
    time.sleep(trial.random.uniform(0, seconds / 2))
    second = start(*arguments)
    codes = []
    for process, other in ((first, second), (second, first)):
        code, _, err = expect(process, trial, (0, 2))
        codes.append(code)
        if code == 2 and f"process {other.pid} on " not in err:
            raise Failure(f"{name}: refused for another reason: {err[-200:]}")
    if 0 not in codes:
        raise Failure(f"{name}: both were refused")
    check_equal(name, trial)


@fault("decode-closed-pipe", seeds=4)
def closed_pipe(trial: Trial) -> None:
    """``generate ... | head -1``, with and without --stream."""
    process = start(*command("generate", trial)[:-2], *(["--stream"] if trial.random.random() < 0.5 else []))
    lines = trial.random.randrange(3)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    code, _, err = wait(process, trial)
    if code not in (0, 141) or "Traceback" in err or "Exception ignored" in err:
        raise Failure(f"after {lines} lines: exit code {code}: {err[-200:]}")


@fault("decode-file-size-limit", seeds=6)
def file_size_limit(trial: Trial) -> None:
    name = trial.random.choice(COMMANDS)
    undisturbed(name, trial)
    size = trial.random.choice((1, 100, 1000, 3000, 9000))
    expect(start(*command(name, trial), file_size=size), trial, (0, 2))
    finish(name, trial)
