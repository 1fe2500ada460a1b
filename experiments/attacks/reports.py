"""Attacks by result files that somebody else wrote: what they say ends in Markdown, in pictures and in file names."""

from __future__ import annotations

import json
import re
import shutil
from random import Random

from attacks.hostile import KINDS, put, tried
from attacks.inputs import check, hydrajax
from attacks.registry import Fell, Place, attack

from hydrajax.report.results import BOOL, NUMBER, NUMBERS, OR_NULL, TEXT, WHOLE
from hydrajax.report.results import KINDS as RESULTS

TEXTS = (
    "x](javascript:alert(1))", "<script>alert(1)</script>", "a\nb\n# c", "a|b\\|c", "`x`", "$\\frac{$", "$x$", "\ud800",
    "\x00\x1b[2J", "![x](http://x/y.png)", "\u2028\u202e", "", "../../x", "x" * 100_000, "&lt;b&gt;", "-->", "{% x %}",
)  # fmt: skip
WHOLES = (0, 1, -1, 7, 2**31, 2**62, -(2**62))
FLOATS = (0.0, -1.0, 1.5, 1e-320, 1e308, -1e308, 5e15)
NAMES = (
    "x](javascript:alert(1)).json",
    "a`b.json",
    "a\nb.json",
    "<b>.json",
    "...json",
    "$x$.json",
    "x" * 240 + ".json",
)
# What may stand in a report and is no harm: pictures of its own, and whatever is between backquotes.
HARMLESS = re.compile(r"!\[.*\]\(figures/[\w.-]+\.png\)|`[^`]*`")


def value(wanted: str, random: Random) -> object:
    if wanted.endswith(OR_NULL) and random.random() < 0.3:
        return None
    wanted = wanted.removesuffix(OR_NULL)
    if wanted == NUMBERS:
        return [random.choice(FLOATS) for _ in range(random.choice((0, 1, 5, 400)))]
    return random.choice({TEXT: TEXTS, WHOLE: WHOLES, NUMBER: FLOATS + WHOLES, BOOL: (True, False)}[wanted])


def result(random: Random) -> dict:
    """A result file with odd values in the fields that its kind has."""
    kind = random.choice([*RESULTS])
    rows = [
        {name: value(wanted, random) for name, wanted in RESULTS[kind].items()}
        for _ in range(random.choice((1, 2, 5, 5, 2000)))
    ]
    for row in rows:  # both ends of an interval, or none
        for low, high in (("low", "high"), ("difference_low", "difference_high")):
            if row.get(low) is None or row.get(high) is None:
                row |= {end: None for end in (low, high) if end in row}
    texts = [random.choice(TEXTS) for _ in range(8)]
    said = {"source": texts[0], "title": texts[1], "command": texts[2], "remarks": [texts[3], texts[4]]}
    said |= {"machine": {texts[5]: texts[6]}, "settings": {texts[7]: [texts[0], 3]}}
    return {"hydrajax_result": 1, "kind": kind, "rows": rows, **said}


@attack("results that somebody else wrote", count=60)
def results(place: Place) -> None:
    folder = place.folder / "results"
    folder.mkdir()
    (folder / place.random.choice(NAMES)).write_text(json.dumps(content := result(place.random)))
    found = hydrajax("report", folder)
    check(found, content["kind"])
    written = {path.relative_to(place.folder) for path in place.folder.rglob("*") if path.is_file()}
    if strange := [path for path in written if path.parts[0] != "results"]:
        raise Fell(f"{strange[0]} was written")
    report = folder / "REPORT.md"
    if found.code or not report.exists():
        return
    for line in report.read_text().splitlines():
        if "](" in (rest := HARMLESS.sub("", line)) or re.search(r"<\w", rest) or line.startswith("# c"):
            raise Fell(f"{content['kind']}: the report says {line[:100]!r}")


@attack("result files that are none", count=1)
def none(place: Place) -> int:
    """Pipes, devices and circles beside a good file."""

    def spoilt(name: str, kind: str) -> tuple:
        folder = place.folder / "a" / "results"
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        put(folder / name, kind)
        return ("report", folder)

    pairs = [(name, kind) for name in ("x.json", "metrics.jsonl") for kind in KINDS]
    return tried(place, {f"{name}: {kind}": lambda pair=(name, kind): spoilt(*pair) for name, kind in pairs})
