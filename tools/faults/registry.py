"""Registry of faults, and the trials that inject them."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrajax.errors import one_line


class Failure(Exception):
    """A broken guarantee, described in one line."""


class Unsupported(Exception):
    """A requirement of the fault that this machine lacks."""


@dataclass
class Trial:
    """One trial of a fault.

    Attributes:
        folder: Directory of this trial, empty at its start.
        shared: Directory of what all trials share (see `once`).
        seed: Number of the trial.
        random: Generator seeded by the fault's name and the seed.
        timeout: Seconds that one command may take.
    """

    folder: Path
    shared: Path
    seed: int
    random: random.Random
    timeout: float
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[Path], Any]) -> Any:
        """Return ``make(folder)``, computed at the first call with this name and shared by all trials."""
        if name not in self.made:
            folder = self.shared / name
            folder.mkdir(parents=True)
            self.made[name] = make(folder)
        return self.made[name]


@dataclass(frozen=True)
class Fault:
    """A function that injects a fault and returns how many trials that was (None: one), and its default seeds."""

    inject: Callable[[Trial], int | None]
    seeds: int


FAULTS: dict[str, Fault] = {}


def fault(name: str, seeds: int = 1) -> Callable:
    """Register a function as a fault. It raises `Failure` where a guarantee is broken."""

    def register(inject: Callable[[Trial], int | None]) -> Callable[[Trial], int | None]:
        FAULTS[name] = Fault(inject, seeds)
        return inject

    return register


@dataclass
class Result:
    """Trials made, seeds that failed, the first of these and its message."""

    trials: int = 0
    failures: int = 0
    first_seed: int | None = None
    message: str = ""


def run(name: str, seeds: range, seconds: float, timeout: float, shared: Path, made: dict) -> Result:
    """Inject a fault with each seed, and begin no further seed after ``seconds``."""
    result, until = Result(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until:
            break
        folder = shared / "trials" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trial = Trial(folder, shared, seed, random.Random(f"{name} {seed}"), timeout, made)
        try:
            result.trials += FAULTS[name].inject(trial) or 1
        except Unsupported as error:
            result.message = f"not tried: {error}"
            break
        except Exception as error:  # a bug in the fault itself is counted too and must not end the run
            result.trials += 1
            result.failures += 1
            if result.first_seed is None:
                message = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
                result.first_seed, result.message = seed, one_line(message)
    return result
