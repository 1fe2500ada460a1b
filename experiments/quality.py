"""Answer quality by acceptance rule and draft heads (Medusa 2.3.1 and figure 5, Amphista table 3).

    python experiments/quality.py --humaneval HumanEval.jsonl.gz --run-code --gsm8k gsm8k_test.jsonl \
        --summaries cnn_dailymail.jsonl --mt-bench mt_bench_question.jsonl --judge URL --judge-model NAME

with one or more of the sets, in their released formats (README.md lists the fields that each score needs). Each rule is
one run of ``hydrajax evaluate`` and one of ``score.py``; after an interruption the same command resumes. Greedy and
exact sampling generate the same output as the base alone, so their differences are 0. Rejection sampling keeps the
base's distribution, typical acceptance does not. The bundled model was trained on Python code only: its scores are low,
and the differences mean more for larger models.
"""

import sys
from functools import partial
from pathlib import Path

import common
import score

from hydrajax import assets
from hydrajax.bench.questions.sets import read_questions
from hydrajax.bench.report.outputs import find_results
from hydrajax.cli import main as hydrajax
from hydrajax.errors import HydrajaxError

FULL = {"limit": 2000, "max_new_tokens": 256}
QUICK = {"limit": 8, "max_new_tokens": 32}
EPSILONS, QUICK_EPSILONS = (0.05, 0.1, 0.15, 0.2, 0.25), (0.1,)
TEMPERATURE = 0.7  # of all but greedy, as in both papers
SETS = {"humaneval": "humaneval", "gsm8k": "gsm8k", "summaries": "rouge", "mt_bench": "judge"}  # and their scores


def add_arguments(parser) -> None:
    for name in SETS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help="questions in the released format")
    parser.add_argument("--run-code", action="store_true", help="run generated code in a sandbox; --humaneval needs it")
    parser.add_argument("--judge", metavar="URL", help="address of the judge; --mt-bench needs it")
    parser.add_argument("--judge-model", metavar="NAME", help="name of the judge")
    parser.add_argument(
        "--template",
        metavar="NAME",
        help="chat template (default auto; for the bundled model raw with --humaneval, else plain)",
    )
    parser.add_argument("--answers", metavar="DIR", default="runs/quality", help="default %(default)s")


def rules(quick: bool) -> dict[str, list]:
    """Return the flags of evaluate by rule, named as its folder."""
    found = {"greedy": ["--rule", "greedy"]}
    found |= {rule: ["--rule", rule, "--temperature", TEMPERATURE] for rule in ("exact", "rejection")}
    for epsilon in QUICK_EPSILONS if quick else EPSILONS:
        found[f"typical-{epsilon:g}"] = ["--rule", "typical", "--epsilon", epsilon, "--temperature", TEMPERATURE]
    return found


def run(args) -> None:
    files = {name: getattr(args, name) for name in SETS if getattr(args, name)}
    if args.prompts or not files:
        found = "--prompts: is not used here" if args.prompts else "--humaneval: no questions were given"
        raise HydrajaxError(f"{found}; give one or more of --humaneval, --gsm8k, --summaries, --mt-bench")
    for name, file in files.items():  # refuse what cannot be scored before anything is decoded
        judge = {key: getattr(args, key) if name == "mt_bench" else None for key in ("judge", "judge_model")}
        score.choose(SETS[name], read_questions(file), run_code=args.run_code, **judge)
    rows = []
    for name, file in files.items():
        for rule, flags in rules(args.quick).items():
            measure = partial(scored, args, name, file, rule, flags)
            rows += args.parts.rows(f"{name} {file} {rule} {args.template}", measure)
    remarks = ["difference: to the base alone by the rule that then has the same meaning (for typical, greedy)"]
    remarks += ["an interval without width means that all questions score alike, not that the score is certain"]
    common.write(args, "quality", "", "quality by rule and heads (medusa figure 5, amphista table 3)", rows, remarks)


def scored(args, name: str, file: str, rule: str, flags: list) -> list[dict]:
    """Return the rows of one set under one rule."""
    answers = Path(args.answers) / f"{name}-{args.max_new_tokens}" / rule
    answers.parent.mkdir(parents=True, exist_ok=True)
    command = ["evaluate", "--set", file, "--base", args.base or assets.base(), "--limit", args.limit, *flags]
    for draft in args.draft or [assets.path(name) for name in assets.HEADS]:
        command += ["--draft", draft]
    template = "auto" if args.base else "raw" if name == "humaneval" else "plain"
    command += ["--template", args.template or template, "--max-new-tokens", args.max_new_tokens]
    command += ["--dtype", args.dtype, "--output", answers]
    scoring = [answers, "--score", SETS[name], *(["--run-code"] if args.run_code else [])]
    if name == "mt_bench":
        scoring += ["--judge", args.judge, "--judge-model", args.judge_model]
    for program, arguments in ((hydrajax, command), (score.main, scoring)):
        if code := program([str(part) for part in arguments]):
            sys.exit(code)
    for _, found in find_results(answers)[0]:
        if found.kind == "quality":
            return found.rows
    raise HydrajaxError(f"--{name.replace('_', '-')}: no answer could be scored; see {answers}")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
