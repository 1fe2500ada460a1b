"""The part of ``hydrajax evaluate`` that scores answers: its flags, its part of ``summary.json`` and its tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from hydrajax.cli.screen import bar
from hydrajax.questions.scores.registry import AUTO, NONE, choose
from hydrajax.questions.scores.score import Score
from hydrajax.questions.scores.scoring import score_answers
from hydrajax.questions.sets import Question
from hydrajax.questions.summary import Figures, summarise_scores
from hydrajax.text.tokenizer import decode_text


class Choice(NamedTuple):
    """name: of `SCORES`, or `NONE`. note: why a score that belongs to the set is not taken, else ""."""

    name: str
    score: Score | None
    note: str


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """``--score, --run-code, --judge, --judge-model``: see `hydrajax.questions.scores.registry.choose`."""
    group = parser.add_argument_group("scores")
    group.add_argument(
        "--score",
        metavar="NAME",
        default=AUTO,
        help=f"{AUTO} (the one that belongs to the set; the default), {NONE}, humaneval (pass@1), gsm8k (last number), "
        "rouge (of summaries, needs hydrajax[score]) or judge",
    )
    group.add_argument(
        "--run-code",
        action="store_true",
        help="allow pass@1 to run what the model wrote, in a sandbox that cannot keep it from reading your files",
    )
    group.add_argument(
        "--judge",
        metavar="URL",
        help="OpenAI-compatible address up to /v1, of a model that rates answers from 1 to 10; key: HYDRAJAX_JUDGE_KEY "
        "or OPENAI_API_KEY",
    )
    group.add_argument("--judge-model", metavar="NAME", help="the judge's name there")


def choose_score(args: argparse.Namespace, questions: Sequence[Question]) -> Choice:
    """Raises `HydrajaxError` where the score cannot be had, before anything is loaded."""
    found = choose(args.score, questions, run_code=args.run_code, judge=args.judge, judge_model=args.judge_model)
    return Choice(*found)


def scores_of(
    args: argparse.Namespace,
    choice: Choice,
    questions: Sequence[Question],
    answers: Mapping[str, Mapping[int | str, dict]],
    baseline: str,
    tokenizer: Any,
) -> dict[str, Any] | None:
    """``name``, ``settings``, ``metrics`` with the factors by which tables show them, and ``results`` by contender,
    category and metric; None where nothing is scored.
    """
    name, score, _ = choice
    if score is None:
        return None
    # A SentencePiece tokenizer drops the first space of what it decodes: so not of the answer alone.
    line_end = tokenizer.encode("\n", add_special_tokens=False)
    before = len(decode_text(tokenizer, line_end))

    def text(ids: list[int]) -> str:
        return decode_text(tokenizer, [*line_end, *ids])[before:]

    with bar() as progress:
        task = progress.add_task(f"{name}, {len(answers)} ways", total=len(questions))
        values = score_answers(name, score, questions, answers, args.output, text, lambda: progress.advance(task))
    found = summarise_scores(values, questions, baseline, list(score.metrics))
    settings = {"name": name, "settings": score.identity(), "metrics": score.metrics}
    return settings | {"results": _as_dicts(found)}


def _as_dicts(found: Mapping) -> dict:
    return {key: _as_dicts(value) if isinstance(value, Mapping) else asdict(value) for key, value in found.items()}


def show_scores(
    choice: Choice,
    scores: dict[str, Any] | None,
    results: Mapping[str, Mapping[str, Figures]],
    baseline: str,
    asked: int,
) -> None:
    """A table for each contender, which 80 columns hold; then what was left out."""
    if choice.note:
        print(choice.note)
    if scores is None:
        return
    console = Console(highlight=False)
    for model_id, rows in scores["results"].items():
        table = Table(title=model_id, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("category", no_wrap=True)
        for heading in ("n", "metric", "score, 95%", "difference, 95%", "equal"):
            table.add_column(heading, justify="right", no_wrap=True)
        for category, metrics in rows.items():
            for metric, row in metrics.items():
                factor = choice.score.metrics[metric]
                own = _with_interval(row["mean"], row["low"], row["high"], factor, "")
                ends = row["difference_low"], row["difference_high"]
                other = "" if model_id == baseline else _with_interval(row["difference"], *ends, factor, "+")
                equal = {True: "yes", False: "NO", None: ""}[results[model_id][category].equal]
                table.add_row(category, str(row["questions"]), metric, own, other, equal)
        console.print(table)
    shares = "times 100" if 100 in choice.score.metrics.values() else "from 1 to 10"
    print(f"n: questions. score: {shares}; difference: to the base alone, question by question; 95%: bootstrap")
    scored = max((row["questions"] for rows in scores["results"].values() for row in _rows(rows)), default=0)
    if scored < asked:
        print(f"left out, for without a rating of every contender's answer: {asked - scored} of {asked} questions")


def _rows(categories: Mapping[str, Mapping[str, dict]]) -> list[dict]:
    return [row for metrics in categories.values() for row in metrics.values()]


def _with_interval(value: float, low: float | None, high: float | None, factor: float, sign: str) -> str:
    """``31.1 [24.4, 38.4]``; differences with a sign, but for none."""
    decimals = 1 if factor == 100 else 2

    def text(number: float) -> str:
        found = f"{number * factor:{sign}.{decimals}f}"
        return found if float(found) else f"{0:.{decimals}f}"

    return text(value) + ("" if low is None else f" [{text(low)}, {text(high)}]")
