"""Attacks by a power cut: what is left is what the file system had written to its disk. As root, on loop devices."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attacks import decoding, training
from attacks.commands import done, mounted, start, training_config
from attacks.registry import CannotTry, Place, attack

SIZE = 24 << 20  # bytes of a disk
CUTS = 5  # of one run
COPIES = 50  # that may be tried for two which are equal


def new_disk(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(SIZE)
    if not shutil.which("mkfs.ext4"):
        raise CannotTry("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)


def copied(image: Path, to: Path) -> bool:
    """Copy what the disk holds at one moment. Whether two copies were equal: it is written to meanwhile."""
    again = to.with_suffix(".again")
    for _ in range(COPIES):
        shutil.copyfile(image, to)
        shutil.copyfile(image, again)
        if filecmp.cmp(to, again, shallow=False):
            return True
    return False


def cut(
    place: Place,
    command: Callable[[Place], list],
    seconds: float,
    check: Callable[[Place], None],
    check_left: Callable[[Place], None] = lambda own: None,
) -> int:
    """Cut the power at moments of a run, and after each let the same command go on. How many moments that were.

    seconds: that the command takes, more or less. check: of what it has written in its place when it has ended, and
    check_left of what the cut has left.
    """
    own = replace(place, folder=place.folder / "disk")
    new_disk(place.folder / "image")
    left = []
    with mounted(own.folder, "loop", place.folder / "image"):
        arguments = command(own)
        os.sync()  # what it reads was there long before
        began, process = time.monotonic(), start(*arguments)
        for moment in sorted(place.random.uniform(0.4, 1.4) * seconds for _ in range(CUTS)):
            time.sleep(max(0, began + moment - time.monotonic()))
            path = place.folder / f"left-{moment:.3f}"
            if copied(place.folder / "image", path):
                left.append(path)
        done(process, place)
    for path in left:
        with mounted(own.folder, "loop", path):
            check_left(own)
            done(start(*arguments), place)
            check(own)
    return len(left)


@attack("the power is cut while training", count=6)
def train(place: Place) -> int:
    """No step is lost or doubled in the metrics, a checkpoint is whole, and the heads are the same."""
    whole, seconds = training.undisturbed(place)

    def command(own: Place) -> list:
        return ["train", "--config", training_config(own, training.STEPS, training.EVERY)]

    return cut(place, command, seconds, lambda own: training.check_equal(own.folder / "run", whole))


@attack("the power is cut while decoding", count=6)
def decode(place: Place) -> int:
    """`generate`, `evaluate` or `distill`: what is there is whole, and the same command goes on."""
    name = place.random.choice(decoding.COMMANDS)
    _, seconds = decoding.undisturbed(name, place)

    def check(own: Place) -> None:
        decoding.check_equal(name, own)

    def check_left(own: Place) -> None:
        if name == "generate" and decoding.output(name, own).exists():
            check(own)

    return cut(place, lambda own: decoding.command(name, own), seconds, check, check_left)
