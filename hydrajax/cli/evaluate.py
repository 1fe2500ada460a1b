"""``hydrajax evaluate``: a published question set, autoregressively and with any number of drafts, side by side."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hydrajax import api
from hydrajax.checkpoints.fingerprint import fingerprint
from hydrajax.checkpoints.hub import resolve
from hydrajax.cli import options
from hydrajax.cli.bench import plain
from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, RejectionSampling, Typical
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.generation import generate
from hydrajax.questions import sets as question_sets
from hydrajax.questions.evaluate import AnswerFiles, Contender, Figures, Prompter, evaluate, summarise
from hydrajax.questions.sets import Question
from hydrajax.report.results import machine
from hydrajax.text.answers import Generation
from hydrajax.trees import TreeTopology, presets

HELP = "answer MT-Bench, Spec-Bench and other question sets with and without drafts, and compare speed and output"


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
        type=options.positive,
        default=256,
        help="of each turn (default %(default)s; published figures: 1024); a prompt too long to leave room for them in "
        "the context loses its beginning",
    )
    decoding.add_argument("--repeats", metavar="R", type=options.positive, default=1, help="timed runs (default 1)")
    decoding.add_argument("--seed", metavar="S", type=options.seed, default=0, help="default %(default)s")
    decoding.add_argument(
        "--template", metavar="NAME", default="auto", help="chat template: auto (the tokenizer's own), vicuna or plain"
    )
    options.add_rule_arguments(parser)


def run(args: argparse.Namespace) -> None:
    rule, trees = options.rule_from(args), [(Path(name).stem, presets.by_name(name)) for name in args.tree]
    everything = question_sets.read_questions(args.set, args.data)
    questions = question_sets.select(everything, args.categories, args.limit)
    base = resolve(args.base, "--base")
    loaded = options.load_from(argparse.Namespace(**vars(args) | {"base": base, "draft": None}))
    prompter = make_prompter(loaded, args.template, args.max_new_tokens)
    ways = load_ways(args, loaded, base, trees, rule)
    contenders = [Contender(way.model_id, partial(decode, way, args.max_new_tokens)) for way in ways]
    settings = settings_of(args, base, everything, ways, rule)
    files = AnswerFiles(args.output, [way.model_id for way in ways], settings)
    ask(questions, contenders, prompter, files, args)

    same_outputs = isinstance(rule, (Greedy, ExactSampling))
    results = summarise(files.answers, questions, ways[0].model_id, same_outputs)
    cut = cut_prompts(files, questions)
    write_summary(args, results, ways[0].model_id, cut)
    show(results, ways[0].model_id)
    if most := max(cut.values()):
        total = sum(len(question.turns) for question in questions)
        print(f"longer than {prompter.room} tokens, so that the beginning was cut: {most} of {total} prompts")
    if not same_outputs:
        print(f"With --rule {args.rule} outputs need not be those of the base alone; they were not compared.")
    print(f"answers and summary.json are in {args.output}")


# --- the ways to decode -----------------------------------------------------------------------------------------------


class Way:
    """A model, a tree and a rule under the name of its answer file."""

    def __init__(self, model_id: str, loaded: api.Loaded, tree: TreeTopology, rule: AcceptanceRule, limit: int):
        self.model_id, self.loaded, self.tree, self.rule = model_id, loaded, tree, rule
        loaded.bursts(tree, rule, min(limit, loaded.model.config.max_positions))  # refuses a tree that does not fit


def load_ways(
    args: argparse.Namespace,
    loaded: api.Loaded,
    directory: Path,
    trees: list[tuple[str, TreeTopology]],
    rule: AcceptanceRule,
) -> list[Way]:
    """The base of this directory alone first, then every draft with every tree. All share the base's parameters."""
    names: set[str] = set()

    def unique(*parts: str) -> str:
        wanted = re.sub(r"[^\w.+-]+", "_", "-".join(parts))
        name, count = wanted, 1
        while name in names:  # heads of one name in two places
            count += 1
            name = f"{wanted}-{count}"
        names.add(name)
        return name

    base, limit = folder_name(args.base), args.max_new_tokens
    ways = [Way(unique(base, "autoregressive"), loaded, presets.root(), baseline_rule(rule), limit)]
    for draft in args.draft:
        if draft == options.NO_DRAFT:
            continue
        drafted = loaded.with_draft(draft, base_directory=None if args.force else directory)
        for name, tree in trees or [("", drafted.default_tree())]:
            ways.append(Way(unique(*filter(None, (base, folder_name(draft), name))), drafted, tree, rule, limit))
    if trees and len(ways) == 1:
        raise HydrajaxError(f"--tree: found '{args.tree[0]}', but without --draft there is nothing to put in a tree")
    return ways


def folder_name(name: str) -> str:
    return Path(os.path.realpath(name)).name if os.path.isdir(name) else name.rpartition("/")[2]


def baseline_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """The rule without a draft: rejection comes to plain sampling, typical acceptance to the likeliest token."""
    if isinstance(rule, RejectionSampling):
        return ExactSampling(rule.temperature, rule.top_k, rule.top_p)
    return Greedy() if isinstance(rule, Typical) else rule


def decode(way: Way, max_new_tokens: int, ids: list[int], seed: int) -> Generation:
    settings = {"tree": way.tree, "rule": way.rule, "max_new_tokens": max_new_tokens, "seed": seed}
    return next(generate(way.loaded, [ids], **settings))


def make_prompter(loaded: api.Loaded, template: str, max_new_tokens: int) -> Prompter:
    from hydrajax.text.templates import make_encoder  # transformers' templates are slow to import

    if loaded.tokenizer is None:
        raise HydrajaxError("--base: has no tokenizer, and questions are text")
    try:
        encoder = make_encoder(loaded.tokenizer, template)
    except HydrajaxError as error:
        raise HydrajaxError(str(error).replace("data.template:", "--template:")) from None
    context = loaded.model.config.max_positions
    return Prompter(encoder.prompt, context, max_new_tokens, loaded.tokenizer.bos_token_id)


def settings_of(
    args: argparse.Namespace, base: Path, questions: Sequence[Question], ways: Sequence[Way], rule: AcceptanceRule
) -> dict[str, Any]:
    """All that an answer or its time depends on. Not which of the questions are asked, so that a run can grow."""
    text = json.dumps([asdict(question) for question in questions])
    contenders = {
        way.model_id: {
            "heads": digest(way.loaded.params.draft),
            "tree": " ".join(".".join(map(str, path)) for path in way.tree.choices),
        }
        for way in ways
    }
    return {
        "set": args.set if args.set in question_sets.FILES else Path(args.set).name,
        "questions": hashlib.sha256(text.encode()).hexdigest(),
        "base": fingerprint(base)["sha256"],
        "contenders": contenders,
        "rule": str(rule),
        **{key: getattr(args, key) for key in ("dtype", "quantize", "template", "max_new_tokens", "repeats", "seed")},
        **{key: machine()[key] for key in ("device", "platform", "jax")},
    }


def digest(params: Any) -> str:
    """A hash of a row of every array: it tells heads of one name that were trained anew from the old ones."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)], np.float32).tobytes())
    return found.hexdigest()


# --- the run ----------------------------------------------------------------------------------------------------------


def ask(
    questions: Sequence[Question],
    contenders: Sequence[Contender],
    prompter: Prompter,
    files: AnswerFiles,
    args: argparse.Namespace,
) -> None:
    """`evaluate` with a bar on a terminal. Ctrl-C says what is kept."""
    before = sum(question.question_id in files.done for question in questions)
    if before:
        print(f"{before} of {len(questions)} questions were answered before", file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    shown = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    with Progress(*columns, TimeRemainingColumn(compact=True), **shown) as progress:
        task = progress.add_task(f"{args.set}, {len(contenders)} ways", total=len(questions))
        try:
            evaluate(
                questions,
                contenders,
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


def cut_prompts(files: AnswerFiles, questions: Sequence[Question]) -> dict[str, int]:
    """How many of each contender's prompts did not fit the context."""
    return {
        model_id: sum(
            count > 0 for question in questions for count in answers[question.question_id]["choices"][0]["cut_tokens"]
        )
        for model_id, answers in files.answers.items()
    }


def write_summary(
    args: argparse.Namespace, results: dict[str, dict[str, Figures]], baseline: str, cut: dict[str, int]
) -> None:
    report = {
        "machine": machine(),
        "arguments": plain(args),
        "baseline": baseline,
        "prompts_cut": cut,
        "results": {
            model_id: {name: figures.as_dict() for name, figures in rows.items()} for model_id, rows in results.items()
        },
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
