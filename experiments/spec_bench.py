"""Spec-Bench by category, for hydra_table_2.py and amphista_tables_1_and_2.py: ``hydrajax evaluate --set spec_bench``.

A run that was killed is taken up. The shipped model knows only Python code, so that its answers are none: what the
default shows is the machinery, and how well drafts guess a model that repeats itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hydrajax import assets
from hydrajax.cli import main as hydrajax
from hydrajax.errors import HydrajaxError
from hydrajax.questions.summary import MT_BENCH
from hydrajax.report.outputs import find_results

# Of each category so many questions; MT-Bench's eight have ten each, the others 80.
FULL = {"max_new_tokens": 64, "repeats": 1, "questions": 80}
QUICK = {"max_new_tokens": 16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", required=True, help="where spec_bench_question.jsonl lies")
    parser.add_argument(
        "--template", metavar="NAME", help="of evaluate; default: plain for the shipped model, else auto"
    )
    parser.add_argument("--answers", metavar="DIR", default="runs/spec_bench", help="default %(default)s")


def by_category(args: argparse.Namespace, drafts: Sequence[str | Path], name: str, flags: Sequence = ()) -> list[dict]:
    """Rows of a "categories" result. name: of the folder of answers. flags: of evaluate, such as its rule."""
    if args.prompts:
        raise HydrajaxError("--prompts: has no meaning here, the questions are Spec-Bench's")
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
    result = next(found for _, found in find_results(answers)[0] if found.kind == "categories")
    # As Spec-Bench prints them: the eight categories of MT-Bench together.
    return [row for row in result.rows if row["category"] not in MT_BENCH]
