"""Malformed result files for `hydrajax report`, whose texts reach Markdown and the terminal."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from random import Random

from hydrajax.bench.report.results import KINDS as RESULTS
from hydrajax.text.records import BOOL, INTEGER, NUMBER, TEXT, Kind
from tools.faults.commands import check_call
from tools.faults.models import KINDS, put, run_cases
from tools.faults.registry import Failure, Trial, fault

TEXTS = (
    "x](javascript:alert(1))", "<script>alert(1)</script>", "a\nb\n# c", "a|b\\|c", "`x`", "$\\frac{$", "$x$", "\ud800",
    "\x00\x1b[2J", "![x](http://x/y.png)", "\u2028\u202e", "", "../../x", "x" * 100_000, "&lt;b&gt;", "-->", "{% x %}",
)  # fmt: skip
WHOLES = (0, 1, -1, 7, 2**31, 2**62, -(2**62))
FLOATS = (0.0, -1.0, 1.5, 1e-320, 1e308, -1e308, 5e15)
NAMES = ("x](javascript:alert(1)).json", "a`b.json", "a\nb.json", "<b>.json", "...json", "$x$.json")
NAMES += ("x" * 240 + ".json",)
# Markup that a report may contain: its own pictures, and anything between backquotes.
HARMLESS = re.compile(r"!\[.*\]\(figures/[\w.-]+\.png\)|`[^`]*`")


def value(wanted: Kind, random: Random) -> object:
    if wanted.holds(None) and random.random() < 0.3:
        return None
    values = {TEXT: TEXTS, INTEGER: WHOLES, NUMBER: FLOATS + WHOLES, BOOL: (True, False)}
    return random.choice({kind.words: found for kind, found in values.items()}[wanted.words.removesuffix(" or null")])


def result(random: Random) -> dict:
    """A result file with odd values in the fields of its kind."""
    kind = random.choice([*RESULTS])
    rows = [
        {name: value(wanted, random) for name, wanted in RESULTS[kind].items()}
        for _ in range(random.choice((1, 2, 5, 5, 2000)))
    ]
    for row in rows:  # an interval has both ends or none
        for low, high in (("low", "high"), ("difference_low", "difference_high")):
            if row.get(low) is None or row.get(high) is None:
                row |= {end: None for end in (low, high) if end in row}
    texts = [random.choice(TEXTS) for _ in range(8)]
    head = {"source": texts[0], "title": texts[1], "command": texts[2], "remarks": [texts[3], texts[4]]}
    head |= {"machine": {texts[5]: texts[6]}, "settings": {texts[7]: [texts[0], 3]}}
    return {"hydrajax_result": 1, "kind": kind, "rows": rows, **head}


@fault("report-values", seeds=60)
def values(trial: Trial) -> None:
    """No link, HTML, heading or file of the result's own ends in the report."""
    folder = trial.folder / "results"
    folder.mkdir()
    (folder / trial.random.choice(NAMES)).write_text(json.dumps(content := result(trial.random)))
    found = check_call(content["kind"], "report", folder)
    written = {path.relative_to(trial.folder) for path in trial.folder.rglob("*") if path.is_file()}
    if strange := [path for path in written if path.parts[0] != "results"]:
        raise Failure(f"{strange[0]} was written")
    report = folder / "REPORT.md"
    if found.code or not report.exists():
        return
    for line in report.read_text().splitlines():
        if "](" in (rest := HARMLESS.sub("", line)) or re.search(r"<\w", rest) or line.startswith("# c"):
            raise Failure(f"{content['kind']}: the report contains {line[:100]!r}")


@fault("report-special-files")
def special_files(trial: Trial) -> int:
    """Pipes, devices, circular links and a file of 20 GB as results."""

    def prepare(name: str, kind: str) -> tuple:
        folder = trial.folder / "a" / "results"
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        put(folder / name, kind)
        return ("report", folder)

    pairs = [(name, kind) for name in ("x.json", "metrics.jsonl") for kind in KINDS]
    return run_cases(trial, {f"{name}: {kind}": partial(prepare, name, kind) for name, kind in pairs})
