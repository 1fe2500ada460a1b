"""``hydrajax evaluate``: a published question set, autoregressively and with any number of drafts, side by side."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hydrajax import api
from hydrajax.cli import options
from hydrajax.cli.scores import add_score_arguments, choose_score, scores_of, show_scores
from hydrajax.cli.screen import bar
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.language_model import LanguageModel
from hydrajax.locking import in_use
from hydrajax.machine import machine
from hydrajax.questions import sets as question_sets
from hydrajax.questions.answer_files import AnswerFiles, answer_directory
from hydrajax.questions.asking import Prompter, evaluate
from hydrajax.questions.contenders import Answerer, contenders
from hydrajax.questions.sets import Question
from hydrajax.questions.summary import Figures, summarise
from hydrajax.trees import presets

HELP = "answer MT-Bench, HumanEval and other question sets with and without drafts; compare speed, output and scores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("questions and answers")
    files.add_argument(
        "--set",
        metavar="NAME|FILE|org/name",
        required=True,
        help=f"{', '.join(question_sets.FILES)}; a JSONL file with turns, question, instruction or prompt; or a Hub "
        "dataset, org/name or org/name:configuration:split",
    )
    files.add_argument("--data", metavar="DIR", help="where the files of named sets lie, under their released names")
    files.add_argument("--limit", metavar="N", type=options.positive, help="the first N questions only")
    files.add_argument(
        "--per-category", metavar="N", type=options.positive, help="the first N questions of each category only"
    )
    files.add_argument("--categories", metavar="A,B,...", type=lambda text: text.split(","), help="of these only")
    files.add_argument(
        "--output",
        metavar="DIR",
        required=True,
        help="one answer file for each way to decode, and summary.json; a run that was killed is taken up there",
    )
    options.add_model_arguments(parser, several=True)
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=options.most_tokens,
        default=256,
        help="of each turn (default %(default)s; published figures: 1024); a prompt too long to leave room for them in "
        "the context loses its beginning",
    )
    decoding.add_argument("--repeats", metavar="R", type=options.positive, default=1, help="timed runs (default 1)")
    decoding.add_argument("--seed", metavar="S", type=options.seed, default=0, help="default %(default)s")
    decoding.add_argument(
        "--template",
        metavar="NAME",
        default="auto",
        help="chat template: auto (the tokenizer's own), vicuna, plain or raw",
    )
    options.add_sampling_arguments(parser)
    add_score_arguments(parser)


def run(args: argparse.Namespace) -> None:
    wanted, trees = options.spec_from(args), [(presets.label(name), presets.by_name(name)) for name in args.tree]
    everything = question_sets.read_questions(args.set, args.data)
    questions = question_sets.select(everything, args.categories, args.limit, args.per_category)
    choice = choose_score(args, questions)
    base = resolve(args.base, "base")
    model = options.load_from(args, base=base, draft=None)
    prompter = make_prompter(model, args.template, args.max_new_tokens)
    drafts = [draft for draft in args.draft if draft != api.NO_DRAFT]
    if trees and not drafts:
        raise HydrajaxError(f"--tree: found '{args.tree[0]}', but without --draft there is nothing to put in a tree")
    made_for = None if args.force else base
    ways = contenders(model, args.base, drafts, trees, wanted, base_directory=made_for)
    baseline, same_outputs = ways[0].model_id, wanted.rule.same_output
    settings = settings_of(args, base, everything, ways)
    with in_use(answer_directory(args.output)):
        files = AnswerFiles(args.output, [way.model_id for way in ways], settings)
        ask(questions, ways, prompter, files, args)
        results = summarise(files.answers, questions, baseline, same_outputs)
        cut = files.cut_prompts(questions)
        scores = scores_of(args, choice, questions, files.answers, baseline, model.tokenizer)
        write_summary(args, results, baseline, cut, scores)
    show(results, baseline)
    show_scores(choice, scores, results, baseline, len(questions))
    if most := max(cut.values()):
        total = sum(len(question.turns) for question in questions)
        print(f"longer than {prompter.room} tokens, so that the beginning was cut: {most} of {total} prompts")
    if not same_outputs:
        print(f"With --rule {args.rule} outputs need not be those of the base alone; they were not compared.")
    print(f"answers and summary.json are in {args.output}")


def make_prompter(model: LanguageModel, template: str, max_new_tokens: int) -> Prompter:
    from hydrajax.text.templates import make_encoder  # transformers' templates are slow to import

    if model.tokenizer is None:
        raise HydrajaxError("--base: has no tokenizer, and questions are text")
    encoder = make_encoder(model.tokenizer, template)
    context = model.config.max_positions
    return Prompter(encoder.prompt, context, max_new_tokens, model.tokenizer.bos_token_id)


def settings_of(
    args: argparse.Namespace, base: Path, questions: Sequence[Question], ways: Sequence[Answerer]
) -> dict[str, Any]:
    """All that an answer or its time depends on. Not which of the questions are asked, so that a run can grow."""
    text = json.dumps(
        [{"question_id": one.question_id, "category": one.category, "turns": one.turns} for one in questions]
    )
    adapter = None if args.adapter is None else resolve(args.adapter, "adapter")
    model = fingerprint(base, adapter=adapter)
    adapted = {"adapter": model["adapter"], "merge_adapter": args.merge_adapter} if "adapter" in model else {}
    return {
        "set": args.set if args.set in question_sets.FILES else Path(args.set).name,
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        "base": model["sha256"],
        **adapted,
        "contenders": {way.model_id: way.identity() for way in ways},
        "rule": options.spec_from(args).shown_rule(),
        **{key: getattr(args, key) for key in ("dtype", "quantize", "template", "max_new_tokens", "repeats", "seed")},
        **{key: machine()[key] for key in ("device", "platform", "jax")},
    }


def ask(
    questions: Sequence[Question],
    ways: Sequence[Answerer],
    prompter: Prompter,
    files: AnswerFiles,
    args: argparse.Namespace,
) -> None:
    """`evaluate` with a bar on a terminal. Ctrl-C says what is kept."""
    before = sum(question.question_id in files.done for question in questions)
    if before:
        print(f"{before} of {len(questions)} questions were answered before", file=sys.stderr)
    with bar() as progress:
        task = progress.add_task(f"{args.set}, {len(ways)} ways", total=len(questions))
        try:
            evaluate(
                questions,
                ways,
                prompter,
                files,
                repeats=args.repeats,
                seed=args.seed,
                on_question=lambda: progress.advance(task),
            )
        except KeyboardInterrupt:
            done = sum(question.question_id in files.done for question in questions)
            progress.stop()
            print(f"{done} of {len(questions)} questions are kept; the same command goes on", file=sys.stderr)
            raise


def write_summary(
    args: argparse.Namespace,
    results: dict[str, dict[str, Figures]],
    baseline: str,
    cut: dict[str, int],
    scores: dict[str, Any] | None,
) -> None:
    """``summary.json`` beside the answers; with ``scores`` where there are."""
    report = {
        "machine": machine(),
        "arguments": options.recorded(args),
        "baseline": baseline,
        "prompts_cut": cut,
        "results": {
            model_id: {name: figures.as_dict() for name, figures in rows.items()} for model_id, rows in results.items()
        },
        **({"scores": scores} if scores else {}),
    }
    with WholeFile(Path(args.output) / "summary.json", "--output") as file:
        file.write_text(json.dumps(report, indent=1) + "\n")


def show(results: dict[str, dict[str, Figures]], baseline: str) -> None:
    """A table for each contender; 80 columns hold it."""
    console = Console(highlight=False)
    for model_id, rows in results.items():
        table = Table(title=model_id, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("category", no_wrap=True)
        for heading in ("questions", "τ", "tokens/s", "speed-up", "95%", "equal"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, row in rows.items():
            interval = "" if row.low is None or model_id == baseline else f"{row.low:.2f}-{row.high:.2f}"
            equal = {True: "yes", False: f"NO: {row.different} differ", None: ""}[row.equal]
            cells = [str(row.questions), f"{row.tokens_per_step:.2f}", f"{row.tokens_per_second:.1f}"]
            table.add_row(name, *cells, f"{row.speedup:.2f}", interval, equal)
        console.print(table)
    print(
        "τ: tokens_per_step. speed-up: tokens/s against the base alone, in the same run; 95%: bootstrap over questions"
    )
