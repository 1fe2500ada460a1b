"""Attacks on `generate`, `evaluate` and `distill` as processes: killed, stopped, doubled, without a reader or room."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from attacks.commands import base, done, finish, prompts, questions, start, training_config
from attacks.registry import Fell, Place, attack

COUNT = 24  # of prompts, questions and seeds
TIMES = ("wall_time", "wall_times", "answer_id", "tstamp")
COMMANDS = ("generate", "evaluate", "distill")


def command(name: str, place: Place) -> list:
    """A command whose output is ``place.folder / "out"``, with or without an ending."""
    model = ["--base", base(place), "--draft", "lookup", "--tree", "chain-2", "--dtype", "float32"]
    written = ["--max-new-tokens", 24, "--output", output(name, place)]
    if name == "generate":
        return ["generate", *model, "--prompts", prompts(place, COUNT), *written]
    if name == "evaluate":
        return ["evaluate", *model, "--template", "plain", "--set", questions(place, COUNT), *written]
    flags = ["--count", COUNT, "--prompt-tokens", 8, "--new-tokens", 16, "--batch-size", 2]
    return ["distill", "--config", training_config(place, 2, 1), *flags, "--output", output(name, place)]


def output(name: str, place: Place) -> Path:
    return place.folder / ("answers" if name == "evaluate" else "out.jsonl")


def content(name: str, place: Place) -> list:
    """What the output says, without times."""
    path = output(name, place)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [_without_times(json.loads(line)) for file in files for line in file.read_text().splitlines()]


def _without_times(value):
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if name not in TIMES}
    return value


def undisturbed(name: str, place: Place) -> tuple[list, float]:
    """What a command says that nothing happens to, and the seconds that it takes."""

    def make(folder: Path) -> tuple[list, float]:
        own = replace(place, folder=folder)
        arguments = command(name, own)
        done(start(*arguments), own)  # what is compiled stays cached
        began = time.monotonic()
        done(start(*arguments), own)
        return content(name, own), time.monotonic() - began

    return place.once(f"undisturbed {name}", make)


def check_equal(name: str, place: Place) -> None:
    wanted, _ = undisturbed(name, place)
    if content(name, place) != wanted:
        raise Fell(f"{name}: the output is another than of an undisturbed run")


@attack("decoding is killed", count=9)
def killed(place: Place) -> int:
    """SIGKILL at any moment, several times; what is there is whole, and the same command goes on."""
    name, kills = place.random.choice(COMMANDS), 3
    _, seconds = undisturbed(name, place)
    for _ in range(kills):
        process = start(*command(name, place))
        time.sleep(place.random.uniform(0, seconds))
        process.kill()
        process.communicate()
        if name == "generate" and output(name, place).exists():
            check_equal(name, place)
    done(start(*command(name, place)), place)
    check_equal(name, place)
    return kills


@attack("decoding is stopped", count=9)
def stopped(place: Place) -> None:
    """SIGTERM or Ctrl-C at any moment: 143 or 130 and nothing half-written."""
    name, number = place.random.choice(COMMANDS), place.random.choice((signal.SIGTERM, signal.SIGINT))
    _, seconds = undisturbed(name, place)
    process = start(*command(name, place))
    at = place.random.uniform(0, seconds)
    time.sleep(at)
    process.send_signal(number)
    code, _, err = finish(process, place)
    what = f"{name}, signal {number} after {at:.2f} of {seconds:.2f} s"
    if code not in (0, 128 + number):
        raise Fell(f"{what}: exit code {code}: {err[-200:]}")
    # While Python still imports, nobody of ours can catch it: then it is Python's own words, and the same code.
    if "Traceback" in err and "<frozen importlib._bootstrap>" not in err:
        raise Fell(f"{what}: a traceback: {err.strip()[-100:]!r}")
    folders = [place.folder, *filter(Path.is_dir, [output(name, place)])]
    if litter := [file for folder in folders for file in os.listdir(folder) if file.startswith(".")]:
        raise Fell(f"{what}: {litter[0]} is left")
    done(start(*command(name, place)), place)
    check_equal(name, place)


@attack("two at once", count=4)
def two(place: Place) -> None:
    name = place.random.choice(COMMANDS[1:])
    _, seconds = undisturbed(name, place)
    arguments = command(name, place)
    first = start(*arguments)
    time.sleep(place.random.uniform(0, seconds / 2))
    second = start(*arguments)
    codes = []
    for process, other in ((first, second), (second, first)):
        code, _, err = done(process, place, (0, 2))
        codes.append(code)
        if code == 2 and f"is in use by process {other.pid} on " not in err:
            raise Fell(f"{name}: refused for another reason: {err[-200:]}")
    if 0 not in codes:
        raise Fell(f"{name}: both were refused")
    check_equal(name, place)


@attack("the reader has had enough", count=4)
def closed_pipe(place: Place) -> None:
    """``generate ... | head -1``, streamed or not."""
    arguments = command("generate", place)[:-2]
    process = start(*arguments, *(["--stream"] if place.random.random() < 0.5 else []))
    lines = place.random.randrange(3)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process, place)
    if code not in (0, 141) or "Traceback" in err or "Exception ignored" in err:
        raise Fell(f"after {lines} lines: exit code {code}: {err[-200:]}")


@attack("decoding with a limit on files", count=6)
def limited(place: Place) -> None:
    """As on a disk that fills up; then the same command with room."""
    name = place.random.choice(COMMANDS)
    undisturbed(name, place)
    size = place.random.choice((1, 100, 1000, 3000, 9000))
    done(start(*command(name, place), file_size=size), place, (0, 2))
    done(start(*command(name, place)), place)
    check_equal(name, place)
