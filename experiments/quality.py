"""Scores of answers by acceptance rule and heads (medusa 2.3.1 and figure 5, amphista table 3).

    python experiments/quality.py --humaneval HumanEval.jsonl.gz --run-code --gsm8k gsm8k_test.jsonl \
        --summaries cnn_dailymail.jsonl --mt-bench mt_bench_question.jsonl --judge URL --judge-model NAME

Give any of the sets in their released formats (docs/usage.md lists the fields); none comes with this package. Each rule
is one run of ``hydrajax evaluate``, which resumes after an interruption. Greedy decoding and exact sampling equal the
base's output, so their differences are 0. Rejection sampling keeps its distribution, typical acceptance does not. The
shipped model is small and trained on Python code only, so its scores are low.
"""

import sys
from functools import partial
from pathlib import Path

import common

from hydrajax import assets
from hydrajax.cli import main as hydrajax
from hydrajax.errors import HydrajaxError
from hydrajax.report.outputs import find_results

FULL = {"limit": 2000, "max_new_tokens": 256}
QUICK = {"limit": 8, "max_new_tokens": 32}
EPSILONS, QUICK_EPSILONS = (0.05, 0.1, 0.15, 0.2, 0.25), (0.1,)
TEMPERATURE = 0.7  # except greedy, as in both papers
SETS = ("humaneval", "gsm8k", "summaries", "mt_bench")


def add_arguments(parser) -> None:
    for name in SETS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help="questions, in the released format")
    parser.add_argument("--run-code", action="store_true", help="run generated code, required by --humaneval")
    parser.add_argument("--judge", metavar="URL", help="judge's address, required by --mt-bench")
    parser.add_argument("--judge-model", metavar="NAME", help="model of the judge")
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="chat template (default: auto; for the shipped model raw with --humaneval, else plain)",
    )
    parser.add_argument("--answers", metavar="DIR", default="runs/quality", help="answers (default %(default)s)")


def rules(quick: bool) -> dict[str, list]:
    """Return flags of `evaluate` by directory name."""
    found = {"greedy": ["--rule", "greedy"]}
    found |= {rule: ["--rule", rule, "--temperature", TEMPERATURE] for rule in ("exact", "rejection")}
    for epsilon in QUICK_EPSILONS if quick else EPSILONS:
        found[f"typical-{epsilon:g}"] = ["--rule", "typical", "--epsilon", epsilon, "--temperature", TEMPERATURE]
    return found


def run(args) -> None:
    files = {name: getattr(args, name) for name in SETS if getattr(args, name)}
    if args.prompts or not files:
        found = f"--prompts: got {args.prompts}" if args.prompts else "--humaneval: got no questions"
        raise HydrajaxError(f"{found}, expected one or more of --humaneval, --gsm8k, --summaries, --mt-bench")
    rows = []
    for name, file in files.items():
        for rule, flags in rules(args.quick).items():
            measure = partial(scored, args, name, file, rule, flags)
            rows += args.parts.rows(f"{name} {file} {rule} {args.template}", measure)
    remarks = ["difference: to the base without a draft under the same rule (for typical: greedy)"]
    remarks += ["an interval of zero width means that all questions have the same score, not that it is certain"]
    common.write(args, "quality", "", "quality by rule and heads (medusa figure 5, amphista table 3)", rows, remarks)


def scored(args, name: str, file: str, rule: str, flags: list) -> list[dict]:
    """Score one set under one rule and return its rows."""
    answers = Path(args.answers) / f"{name}-{args.max_new_tokens}" / rule
    answers.parent.mkdir(parents=True, exist_ok=True)
    command = ["evaluate", "--set", file, "--base", args.base or assets.base(), "--limit", args.limit, *flags]
    for draft in args.draft or [assets.path(name) for name in assets.HEADS]:
        command += ["--draft", draft]
    template = "auto" if args.base else "raw" if name == "humaneval" else "plain"
    command += ["--template", args.template or template, "--max-new-tokens", args.max_new_tokens]
    command += ["--dtype", args.dtype, "--output", answers]
    command += ["--score", {"summaries": "rouge", "mt_bench": "judge"}.get(name, name)]
    if name == "humaneval" and args.run_code:
        command += ["--run-code"]
    if name == "mt_bench":
        for flag, value in (("--judge", args.judge), ("--judge-model", args.judge_model)):
            command += [flag, value] if value else []
    if code := hydrajax([str(part) for part in command]):
        sys.exit(code)
    for _, found in find_results(answers)[0]:
        if found.kind == "quality":
            return found.rows
    raise HydrajaxError(f"--{name.replace('_', '-')}: got no scored answer, see {answers}")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
