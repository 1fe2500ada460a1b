"""Attacks by what is around a command: its environment, home, terminal and devices."""

from __future__ import annotations

from attacks.commands import base, done, mounted, prompts, start
from attacks.registry import Fell, Place, attack

SURROUNDINGS = {
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
    "columns that are none": {"COLUMNS": "wide"},
    "no TERM": {"TERM": ""},
    "NO_COLOR": {"NO_COLOR": "1"},
    "a device that is not there": {"JAX_PLATFORMS": "cuda"},
    "a platform that does not exist": {"JAX_PLATFORMS": "abacus"},
    "a coordinator that makes no sense": {"JAX_COORDINATOR_ADDRESS": "x"},
    "temporary folder is missing": {"TMPDIR": "/nonexistent"},
    "closed stdin and no variables to speak of": {"PATH": "", "USER": "", "LOGNAME": ""},
}


@attack("surroundings", count=1)
def surroundings(place: Place) -> int:
    """Generate in each of them: done, or refused in one line."""
    falls = []
    model = ("--base", base(place), "--draft", "lookup", "--dtype", "float32", "--max-new-tokens", 8)
    for what, variables in SURROUNDINGS.items():
        own = () if "measured" in what else ("--tree", "chain-2")
        try:
            done(start("generate", *model, *own, "--prompts", prompts(place, 2), environment=variables), place, (0, 2))
        except Fell as error:
            falls.append(f"{what}: {error}")
    if falls:
        raise Fell("; ".join(falls))
    return len(SURROUNDINGS)


@attack("outputs that may not be written", count=1)
def read_only(place: Place) -> int:
    disk = place.folder / "disk"
    with mounted(disk, "ro"):
        model = ("--base", base(place), "--dtype", "float32", "--max-new-tokens", 4)
        done(start("generate", *model, "--prompts", prompts(place, 2), "--output", disk / "x.jsonl"), place, (2,))
        asked = ("--set", prompts(place, 2), "--template", "plain")
        done(start("evaluate", *model, *asked, "--output", disk), place, (2,))
    return 2
