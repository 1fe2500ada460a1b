"""Score the answers of ``hydrajax evaluate``: pass@1, exact match, ROUGE or the ratings of a judge.

    python experiments/score.py ANSWERS [--score NAME] [--run-code] [--judge URL --judge-model NAME]

ANSWERS is the directory that ``evaluate --output`` wrote. The set, the selection of questions and the base are taken
from its summary.json. The scores are added to that file, from which ``hydrajax report`` draws them; the values of each
question are in ANSWERS/scores/NAME. The README of this folder describes the scores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hydrajax.bench.questions import sets
from hydrajax.bench.questions.answer_files import SETTINGS, AnswerFiles
from hydrajax.bench.questions.summary import OVERALL
from hydrajax.bench.report.records import of_evaluate, records
from hydrajax.bench.report.results import RECORDS
from hydrajax.cli import run_command
from hydrajax.cli.screen import bar
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.formats.hub import resolve
from hydrajax.locking import in_use
from hydrajax.text.records import OBJECT, TEXT, checked, read_record
from hydrajax.text.tokenizer import decode_text, load_tokenizer
from scoring.intervals import summarise_scores
from scoring.registry import AUTO, SCORES, choose
from scoring.score_files import score_answers

HELP = __doc__.splitlines()[0]
SUMMARY = {"machine": OBJECT, "arguments": OBJECT, "baseline": TEXT, "results": OBJECT}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("answers", metavar="ANSWERS", help="the directory that evaluate --output wrote")
    for name in ("set", "data", "base"):
        parser.add_argument(f"--{name}", metavar="PATH", help=f"new location of evaluate's --{name}, if it has moved")
    parser.add_argument(
        "--score",
        metavar="NAME",
        default=AUTO,
        help=f"{AUTO} (default: what fits the set), {', '.join(SCORES)}",
    )
    parser.add_argument(
        "--run-code",
        action="store_true",
        help="run the generated code for pass@1, in a sandbox that does not keep it from reading your files",
    )
    parser.add_argument(
        "--judge",
        metavar="URL",
        help="OpenAI-compatible address, up to /v1, of the model that rates answers from 1 to 10; its key is read from "
        "HYDRAJAX_JUDGE_KEY or OPENAI_API_KEY",
    )
    parser.add_argument("--judge-model", metavar="NAME", help="name of the judge at that address")


def run(args: argparse.Namespace) -> None:
    folder = Path(args.answers)
    summary = read_record(folder / "summary.json", SUMMARY, "answers")
    arguments = checked(summary["arguments"], {"set": TEXT, "base": TEXT}, f"answers: {folder / 'summary.json'}")
    everything = sets.read_questions(args.set or arguments["set"], args.data or arguments.get("data"))
    chosen = [arguments.get(name) for name in ("categories", "limit", "per_category")]
    questions = sets.select(everything, *chosen)
    name, score = choose(args.score, questions, run_code=args.run_code, judge=args.judge, judge_model=args.judge_model)
    decode = decoder(load_tokenizer(resolve(args.base or arguments["base"], "base")))
    settings, baseline = read_record(folder / SETTINGS, {}, "answers"), summary["baseline"]
    if settings.get("questions") != sets.digest(everything):
        raise HydrajaxError(f"set: {args.set or arguments['set']} has other questions than {folder} answers")
    with in_use(folder, "answers"):
        answers = AnswerFiles(folder, list(summary["results"]), settings)
        if missing := [question for question in questions if question.question_id not in answers.done]:
            raise HydrajaxError(f"answers: {len(missing)} of {len(questions)} questions have none; rerun evaluate")
        with bar() as progress:
            task = progress.add_task(f"{name}, {len(answers.answers)} contenders", total=len(questions))
            values = score_answers(
                name, score, questions, answers.answers, folder, decode, lambda: progress.advance(task)
            )
        found = summarise_scores(values, questions, baseline, list(score.metrics))
        scores = {"name": name, "settings": score.identity(), "metrics": score.metrics, "results": as_dicts(found)}
        with WholeFile(folder / "summary.json", "answers") as file:
            summary |= {"scores": scores}
            file.write_json(summary | with_scores(summary))
    show(scores, summary["results"], baseline, len(questions))


def decoder(tokenizer: Any):
    """Return a function from token ids to the text that they add to a prompt, its leading space included."""
    # SentencePiece tokenizers drop the first space of what they decode, so a line break is decoded before the ids.
    line_end = tokenizer.encode("\n", add_special_tokens=False)
    before = len(decode_text(tokenizer, line_end))
    return lambda ids: decode_text(tokenizer, [*line_end, *ids])[before:]


def with_scores(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of evaluate's report with those of its scores."""
    title = f"scores of answers to {report['arguments']['set']}"
    scored = records("evaluate", report, ("quality", title, quality_rows(report)))
    return {RECORDS: of_evaluate(report)[RECORDS] + scored[RECORDS]}


def quality_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the scores over all questions, shares times 100, for the table of their kind in `paper_report`."""
    arguments, scores = report["arguments"], report["scores"]
    rows = []
    for name, categories in scores["results"].items():
        speed = {field: report["results"][name][OVERALL][field] for field in ("tokens_per_step", "speedup", "equal")}
        for metric, figures in categories.get(OVERALL, {}).items():
            scale = scores["metrics"][metric]
            score = {
                "score" if field == "mean" else field: value if field == "questions" or value is None else value * scale
                for field, value in figures.items()
            }
            labels = {"set": Path(arguments["set"]).name, "metric": metric, "rule": _rule(arguments), "name": name}
            rows.append(labels | score | speed)
    return rows


def _rule(arguments: Mapping[str, Any]) -> str:
    """The acceptance rule with its parameters: ``typical, epsilon 0.1``."""
    names = ("epsilon", "alpha", "temperature", "top_k", "top_p", "min_p")
    given = [f"{name} {arguments[name]:g}" for name in names if arguments.get(name) is not None]
    return ", ".join([arguments["rule"], *given])


def as_dicts(found: Mapping) -> dict:
    return {key: as_dicts(value) if isinstance(value, Mapping) else asdict(value) for key, value in found.items()}


def show(scores: dict[str, Any], results: Mapping[str, Mapping[str, dict]], baseline: str, asked: int) -> None:
    """Print one table per contender, at most 80 columns wide, and the number of questions without a score."""
    console, scored = Console(highlight=False), 0
    for model_id, categories in scores["results"].items():
        table = Table(title=model_id, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("category", no_wrap=True)
        for heading in ("n", "metric", "score, 95%", "difference, 95%", "equal"):
            table.add_column(heading, justify="right", no_wrap=True)
        for category, metrics in categories.items():
            equal = {True: "yes", False: "NO", None: ""}[results[model_id][category]["equal"]]
            for metric, row in metrics.items():
                factor, scored = scores["metrics"][metric], max(scored, row["questions"])
                own = with_interval(row["mean"], row["low"], row["high"], factor, "")
                ends = row["difference_low"], row["difference_high"]
                other = "" if model_id == baseline else with_interval(row["difference"], *ends, factor, "+")
                table.add_row(category, str(row["questions"]), metric, own, other, equal)
        console.print(table)
    unit = "times 100" if 100 in scores["metrics"].values() else "from 1 to 10"
    print(f"n: questions. score: {unit}; difference: to the base alone, paired by question; 95%: bootstrap interval")
    if scored < asked:
        print(f"left out: {asked - scored} of {asked} questions, as not every contender's answer has a rating")


def with_interval(value: float, low: float | None, high: float | None, factor: float, sign: str) -> str:
    """Format ``31.1 [24.4, 38.4]``; zero has no sign."""
    decimals = 1 if factor == 100 else 2

    def text(number: float) -> str:
        found = f"{number * factor:{sign}.{decimals}f}"
        return found if float(found) else f"{0:.{decimals}f}"

    return text(value) + ("" if low is None else f" [{text(low)}, {text(high)}]")


def main(argv: list[str]) -> int:
    return run_command("score.py", HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
