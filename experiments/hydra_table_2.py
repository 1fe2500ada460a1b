"""Speed-up by category of Spec-Bench (hydra table 2).

    python experiments/hydra_table_2.py --data DIR      (DIR holds spec_bench_question.jsonl, as Spec-Bench releases it)

This is ``hydrajax evaluate --set spec_bench``, and takes up a run that was killed. The shipped model knows only Python
code, so that its answers are none: what the default shows is the machinery.
"""

import sys
from pathlib import Path

import common

from hydrajax import assets
from hydrajax.cli import main as hydrajax
from hydrajax.errors import HydrajaxError
from hydrajax.questions.summary import MT_BENCH
from hydrajax.report.outputs import find_results

FULL = {"max_new_tokens": 64, "repeats": 1}
QUICK = {"max_new_tokens": 16}


def add_arguments(parser) -> None:
    parser.add_argument("--data", metavar="DIR", required=True, help="where spec_bench_question.jsonl lies")
    parser.add_argument(
        "--template", metavar="NAME", help="of evaluate; default: plain for the shipped model, else auto"
    )
    parser.add_argument("--answers", metavar="DIR", default="runs/spec_bench", help="default %(default)s")


def run(args) -> None:
    if args.prompts:
        raise HydrajaxError("--prompts: has no meaning here, the questions are Spec-Bench's")
    answers = Path(args.answers) / str(args.max_new_tokens)
    answers.parent.mkdir(parents=True, exist_ok=True)
    command = ["evaluate", "--set", "spec_bench", "--data", args.data, "--base", args.base or assets.base()]
    for draft in args.draft or [assets.path(name) for name in assets.DRAFTERS]:
        command += ["--draft", draft]
    command += ["--output", answers, "--dtype", args.dtype]
    command += ["--template", args.template or ("auto" if args.base else "plain")]
    command += ["--max-new-tokens", args.max_new_tokens, "--repeats", args.repeats]
    if code := hydrajax([str(part) for part in command]):
        sys.exit(code)
    result = next(found for _, found in find_results(answers)[0] if found.kind == "categories")
    # As Spec-Bench prints them: the eight categories of MT-Bench together.
    rows = [row for row in result.rows if row["category"] not in MT_BENCH]
    common.write(args, "categories", "hydra table 2", "speed-up on Spec-Bench", rows)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
