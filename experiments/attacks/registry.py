"""What an attack is: a function of a place and a seed that raises `Fell` where something gave way."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrajax.errors import one_line


class Fell(Exception):
    """What gave way, in a line."""


class CannotTry(Exception):
    """What this machine lacks for the attack."""


@dataclass
class Place:
    """Where an attack is tried.

    folder: its own, empty at every try. shared: for what all tries need and make once (`once`). seed: of this try.
    random: drawn from the seed and the attack's name. seconds: that one command may take.
    """

    folder: Path
    shared: Path
    seed: int
    random: random.Random
    seconds: float
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[Path], Any]) -> Any:
        """What ``make`` returns of a folder of this name, made at the first call."""
        if name not in self.made:
            folder = self.shared / name
            folder.mkdir(parents=True)
            self.made[name] = make(folder)
        return self.made[name]


@dataclass(frozen=True)
class Attack:
    """count: of seeds, where the command line says none; one seed may be several tries, as ``run`` returns."""

    run: Callable[[Place], int | None]
    count: int


ATTACKS: dict[str, Attack] = {}


def attack(name: str, count: int) -> Callable:
    def register(run: Callable[[Place], int | None]) -> Callable[[Place], int | None]:
        ATTACKS[name] = Attack(run, count)
        return run

    return register


@dataclass
class Outcome:
    """tried: how often. failed: of the seeds. first: the first seed that failed, and what was said then."""

    tried: int = 0
    failed: int = 0
    first: int | None = None
    said: str = ""


def run(name: str, seeds: range, seconds: float, command_seconds: float, shared: Path, made: dict) -> Outcome:
    """Try an attack with these seeds until the seconds are over."""
    outcome, until = Outcome(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until:
            break
        folder = shared / "tries" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        place = Place(folder, shared, seed, random.Random(f"{name} {seed}"), command_seconds, made)
        try:
            outcome.tried += ATTACKS[name].run(place) or 1
        except CannotTry as error:
            outcome.said = f"not tried: {error}"
            break
        except Exception as error:  # a bug of the attack is a failure, too, and must not end the others
            outcome.tried += 1
            outcome.failed += 1
            if outcome.first is None:
                outcome.first = seed
                said = str(error) if isinstance(error, Fell) else f"{type(error).__name__}: {error}"
                outcome.said = one_line(said)
    return outcome
