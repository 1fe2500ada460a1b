"""Faults of the system around a command: power cuts, a broken network, environment variables, a read-only disk."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hydrajax.errors import one_line
from tools.faults import decoding, training
from tools.faults.commands import expect, mounted, start, wait
from tools.faults.fixtures import base, prompts, training_config
from tools.faults.registry import Failure, Trial, Unsupported, fault

# --- power cuts: run on an ext4 image, as root, and continue from copies of the image ---------------------------------

SIZE = 24 << 20  # bytes of the disk
CUTS = 5  # of one run
COPIES = 50  # attempts to copy an image that does not change meanwhile


def new_disk(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(SIZE)
    if not shutil.which("mkfs.ext4"):
        raise Unsupported("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)


def snapshot(image: Path, to: Path) -> bool:
    """Copy the disk at one moment. Returns whether two copies in a row were equal."""
    again = to.with_suffix(".again")
    for _ in range(COPIES):
        shutil.copyfile(image, to)
        shutil.copyfile(image, again)
        if filecmp.cmp(to, again, shallow=False):
            return True
    return False


def cut_power(
    trial: Trial,
    command: Callable[[Trial], list],
    seconds: float,
    check: Callable[[Trial], None],
    check_left: Callable[[Trial], None] = lambda own: None,
) -> int:
    """Take snapshots of the disk during a command, and finish the command from each. Returns their number.

    Args:
        seconds: Usual duration of the command.
        check: Checks the finished output.
        check_left: Checks what the power cut has left.
    """
    own = replace(trial, folder=trial.folder / "disk")
    new_disk(trial.folder / "image")
    left = []
    with mounted(own.folder, "loop", trial.folder / "image"):
        arguments = command(own)
        os.sync()  # the inputs are on the disk before the command starts
        began, process = time.monotonic(), start(*arguments)
        for moment in sorted(trial.random.uniform(0.4, 1.4) * seconds for _ in range(CUTS)):
            time.sleep(max(0, began + moment - time.monotonic()))
            path = trial.folder / f"left-{moment:.3f}"
            if snapshot(trial.folder / "image", path):
                left.append(path)
        expect(process, trial)
    for path in left:
        with mounted(own.folder, "loop", path):
            check_left(own)
            expect(start(*arguments), trial)
            check(own)
    return len(left)


@fault("train-power-cut", seeds=6)
def train_power_cut(trial: Trial) -> int:
    whole, seconds = training.undisturbed(trial)

    def command(own: Trial) -> list:
        return ["train", "--config", training_config(own, training.STEPS, training.EVERY)]

    return cut_power(trial, command, seconds, lambda own: training.check_equal(own.folder / "run", whole))


@fault("decode-power-cut", seeds=6)
def decode_power_cut(trial: Trial) -> int:
    """`generate` leaves a whole output or none."""
    name = trial.random.choice(decoding.COMMANDS)
    _, seconds = decoding.undisturbed(name, trial)

    def check(own: Trial) -> None:
        decoding.check_equal(name, own)

    def check_left(own: Trial) -> None:
        if name == "generate" and decoding.output(name, own).exists():
            check(own)

    return cut_power(trial, lambda own: decoding.command(name, own), seconds, check, check_left)


# --- network: two hosts are two network namespaces, as root, with iproute2 --------------------------------------------

ADDRESSES = "10.77.0.1", "10.77.0.2"
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'  # gloo binds to the address of the host's name
ABORTED = 134  # JAX aborts a process that has lost its coordinator or peers
TOLERATED = 5  # seconds; after 20 gRPC gives a connection up, and JAX the run


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces joined by a cable."""

    names: tuple[str, str]

    def within(self, number: int) -> tuple[str, ...]:
        """The prefix of a command that runs on a host."""
        host = ("ip", "netns", "exec", self.names[number])
        return (*host, "unshare", "--uts", "sh", "-c", NAMED, ADDRESSES[number])

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "cable", state)


def ip(*arguments: str) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise Unsupported(f"ip {' '.join(arguments)}: {one_line(found.stderr)}")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    if not shutil.which("ip"):
        raise Unsupported("no ip command")
    names = tuple(f"hydrajax-{os.getpid()}-{number}" for number in range(2))
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@fault("train-network", seeds=4)
def network(trial: Trial) -> None:
    """A break of a few seconds is tolerated. After a longer one both processes report it and end; both can resume."""
    whole, run = training.undisturbed_two(trial), trial.folder / "run"
    seconds, step = trial.random.choice((1, TOLERATED, 30, None)), trial.random.randrange(training.STEPS)
    with two_hosts() as hosts:
        processes = training.start_two(trial, run, ADDRESSES[0], hosts.within)
        while all(process.poll() is None for process in processes) and not training.at_step(run, step):
            time.sleep(0.01)
        hosts.cable("down")
        if seconds:
            time.sleep(seconds)
            hosts.cable("up")
        what = f"broken for {seconds} s" if seconds else "broken for good"
        for number, process in enumerate(processes):
            code, _, err = wait(process, trial)
            ended = f"{what} at step {step}, process {number} ended with code {code}: {err[-200:]}"
            if code not in ((0,) if seconds and seconds <= TOLERATED else (0, 2, ABORTED)):
                raise Failure(ended)
            if code and "cannot be reached" not in err and "another task died" not in err:
                raise Failure(f"no reason given: {ended}")
        hosts.cable("up")
        for process in training.start_two(trial, run, ADDRESSES[0], hosts.within):
            expect(process, trial)
    training.check_equal(run, whole)


# --- environment ------------------------------------------------------------------------------------------------------

ENVIRONMENTS = {
    "no home": {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": ""},
    "home is a file": {"HOME": "/dev/null", "XDG_CACHE_HOME": ""},
    "cache is a file": {"XDG_CACHE_HOME": "/dev/null"},
    "cache in /proc": {"XDG_CACHE_HOME": "/proc/nowhere"},
    "measured trees, cache is a file": {"XDG_CACHE_HOME": "/dev/null", "HYDRAJAX_MEASURE_TREES": "1"},
    "LC_ALL=C": {"LC_ALL": "C", "LANG": "C"},
    "LC_ALL=POSIX without UTF-8": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "output in ASCII": {"PYTHONIOENCODING": "ascii"},
    "20 columns": {"COLUMNS": "20", "LINES": "5"},
    "0 columns": {"COLUMNS": "0"},
    "invalid columns": {"COLUMNS": "wide"},
    "no TERM": {"TERM": ""},
    "NO_COLOR": {"NO_COLOR": "1"},
    "missing device": {"JAX_PLATFORMS": "cuda"},
    "unknown platform": {"JAX_PLATFORMS": "abacus"},
    "invalid coordinator": {"JAX_COORDINATOR_ADDRESS": "x"},
    "missing temporary directory": {"TMPDIR": "/nonexistent"},
    "no PATH and no user": {"PATH": "", "USER": "", "LOGNAME": ""},
}


@fault("environment")
def environment(trial: Trial) -> int:
    """`generate` finishes in each environment, or refuses in one line."""
    failures = []
    model = ("--base", base(trial), "--draft", "lookup", "--dtype", "float32", "--max-new-tokens", 8)
    for what, variables in ENVIRONMENTS.items():
        tree = () if "measured" in what else ("--tree", "chain-2")
        command = ("generate", *model, *tree, "--prompts", prompts(trial, 2))
        try:
            expect(start(*command, environment=variables), trial, (0, 2))
        except Failure as error:
            failures.append(f"{what}: {error}")
    if failures:
        raise Failure("; ".join(failures))
    return len(ENVIRONMENTS)


@fault("decode-read-only")
def read_only(trial: Trial) -> int:
    disk = trial.folder / "disk"
    with mounted(disk, "ro"):
        model = ("--base", base(trial), "--dtype", "float32", "--max-new-tokens", 4)
        expect(start("generate", *model, "--prompts", prompts(trial, 2), "--output", disk / "x.jsonl"), trial, (2,))
        asked = ("--set", prompts(trial, 2), "--template", "plain")
        expect(start("evaluate", *model, *asked, "--output", disk), trial, (2,))
    return 2
