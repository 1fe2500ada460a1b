"""Run Spec-Bench by category (``hydrajax evaluate``), for hydra_table_2.py and amphista_tables_1_and_2.py.

Interrupted runs are resumed. The shipped model was trained on Python code only, so its answers are meaningless and
repetitive: the default only tests the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hydrajax import assets
from hydrajax.bench.questions.summary import MT_BENCH
from hydrajax.bench.report.outputs import find_results
from hydrajax.cli import main as hydrajax
from hydrajax.errors import HydrajaxError

# questions: of each category; MT-Bench's eight have ten each, the others 80.
FULL = {"max_new_tokens": 64, "repeats": 1, "questions": 80}
QUICK = {"max_new_tokens": 16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", required=True, help="directory of spec_bench_question.jsonl")
    parser.add_argument("--template", metavar="NAME", help="chat template (default: auto; plain for the shipped model)")
    parser.add_argument("--answers", metavar="DIR", default="runs/spec_bench", help="answers (default %(default)s)")


def by_category(args: argparse.Namespace, drafts: Sequence[str | Path], name: str, flags: Sequence = ()) -> list[dict]:
    """Run `evaluate` with these flags, write answers to a directory of this name, and return its rows."""
    if args.prompts:
        raise HydrajaxError("--prompts: the questions are those of Spec-Bench, leave the flag out")
    answers = answered(args, drafts, name, flags)
    result = next(found for _, found in find_results(answers)[0] if found.kind == "categories")
    # Spec-Bench reports the eight categories of MT-Bench as one.
    return [row for row in result.rows if row["category"] not in MT_BENCH]


def answered(args: argparse.Namespace, drafts: Sequence[str | Path], name: str, flags: Sequence = ()) -> Path:
    """Run `evaluate` with these flags, and return the directory of its answers."""
    answers = Path(args.answers) / f"{name}-{args.questions}-{args.max_new_tokens}"
    answers.parent.mkdir(parents=True, exist_ok=True)
    command = ["evaluate", "--set", "spec_bench", "--data", args.data, "--per-category", args.questions]
    command += ["--base", args.base or assets.base(), *flags]
    for draft in drafts:
        command += ["--draft", draft]
    command += ["--output", answers, "--dtype", args.dtype]
    command += ["--template", args.template or ("auto" if args.base else "plain")]
    command += ["--max-new-tokens", args.max_new_tokens, "--repeats", args.repeats]
    if code := hydrajax([str(part) for part in command]):
        sys.exit(code)
    return answers
