"""``hydrajax evaluate``: answer a question set with the base alone and with any number of drafts, in one run."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

from hydrajax import api, processes
from hydrajax.bench.questions import sets as question_sets
from hydrajax.bench.questions.answer_files import AnswerFiles, answer_directory
from hydrajax.bench.questions.asking import Prompter, evaluate
from hydrajax.bench.questions.contenders import Answerer, contenders
from hydrajax.bench.questions.sets import Question
from hydrajax.bench.questions.summary import Figures, acceptance_lengths, summarise
from hydrajax.bench.report.records import of_evaluate
from hydrajax.bench.report.tables import markdown_table, print_table
from hydrajax.cli import options
from hydrajax.cli.screen import resumable
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.locking import in_use
from hydrajax.machine import machine
from hydrajax.trees import presets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("questions and answers")
    files.add_argument(
        "--set", "--questions", metavar="NAME|FILE|org/name", required=True,
        help=f"{', '.join(question_sets.FILES)}; speed-bench:FILE; a JSONL or Parquet file with turns, messages, "
        "question, instruction or prompt; or a Hub dataset, org/name or org/name:configuration:split",
    )  # fmt: skip
    options.add(files, "--data")
    options.add(files, "--limit", help="ask the first N questions (default all)")
    files.add_argument(
        "--per-category", metavar="N", type=options.positive, help="ask the first N questions of each category"
    )
    files.add_argument("--categories", metavar="A,B,...", type=lambda text: text.split(","), help="ask only these")
    files.add_argument(
        "--output", metavar="DIR", required=True,
        help="write an answer file for each contender and summary.json; resume an interrupted run",
    )  # fmt: skip
    options.add_model_arguments(parser, several=True)
    decoding = parser.add_argument_group("decoding")
    text = (
        "tokens per turn (default %(default)s; published figures: 1024); a prompt that leaves no room for them in the "
        "context loses its beginning"
    )
    options.add(decoding, "--max-new-tokens", default=256, help=text)
    options.add(decoding, "--repeats", default=1)
    options.add(decoding, "--seed", "--template")
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from hydrajax.text.templates import make_encoder  # transformers' templates are slow to import

    request, trees = options.request_from(args), [(presets.label(name), presets.by_name(name)) for name in args.tree]
    everything = question_sets.read_questions(args.set, args.data)
    questions = question_sets.select(everything, args.categories, args.limit, args.per_category)
    base = resolve(args.base, "base")
    model = options.load_from(args, base=base, draft=None)
    if model.tokenizer is None:
        raise HydrajaxError("--base: has no tokenizer, which question sets need")
    encode, room = make_encoder(model.tokenizer, args.template).prompt, model.config.max_positions
    prompter = Prompter(encode, room, args.max_new_tokens, model.tokenizer.bos_token_id)
    drafts = [draft for draft in args.draft if draft != api.NO_DRAFT]
    if trees and not drafts:
        raise HydrajaxError(f"--tree: got '{args.tree[0]}' without a draft; add --draft")
    made_for = None if args.force else base
    ways = contenders(model, args.base, drafts, trees, request, base_directory=made_for)
    baseline, same_outputs = ways[0].model_id, request.rule.same_output
    if jax.process_count() > 1:
        decoded = [options.described(model, way.executor.program, way.executor.request) for way in ways]
        first = prompter([{"role": "user", "content": questions[0].turns[0]}]) if questions else None
        asked = question_sets.digest(questions), first, args.template, args.mesh, args.repeats, args.seed
        processes.check_same("questions or arguments", decoded, asked)
    settings = settings_of(args, base, everything, ways)
    with in_use(answer_directory(args.output)) if processes.is_main() else nullcontext():
        written = AnswerFiles(args.output, [way.model_id for way in ways], settings) if processes.is_main() else None
        done = processes.from_main(lambda: written.done)
        if before := sum(question.question_id in done for question in questions):
            print(f"resuming: {before} of {len(questions)} questions are answered", file=sys.stderr)
        how = {"done": done, "repeats": args.repeats, "seed": args.seed}
        count, title = len(questions), f"{args.set}, {len(ways)} contenders"
        with resumable(title, count, lambda asked: f"{asked} of {count} questions are kept") as advance:
            evaluate(questions, ways, prompter, written, **how, on_question=advance)
        if written is None:
            return
        results = summarise(written.answers, questions, baseline, same_outputs)
        cut = written.cut_prompts(questions)
        report = {"machine": machine(), "arguments": options.recorded(args), "baseline": baseline, "prompts_cut": cut}
        report["nodes"] = {way.model_id: way.executor.program.verified_nodes for way in ways}
        report["results"] = {
            model_id: {name: figures.as_dict() for name, figures in rows.items()} for model_id, rows in results.items()
        }
        with WholeFile(Path(args.output) / "summary.json", "--output") as file:
            file.write_json(report | of_evaluate(report))
    show(results, baseline)
    if args.set.startswith(question_sets.SPEED_BENCH):
        publish(args, *acceptance_lengths(written.answers, questions))
    if most := max(cut.values()):
        total = sum(len(question.turns) for question in questions)
        print(f"cut at the beginning, being longer than {prompter.room} tokens: {most} of {total} prompts")
    if not same_outputs:
        print(f"outputs not compared: --rule {args.rule} does not promise those of the base alone")
    print(f"answers and summary.json: {args.output}")


def settings_of(
    args: argparse.Namespace, base: Path, questions: Sequence[Question], ways: Sequence[Answerer]
) -> dict[str, Any]:
    """Return what answers and their times depend on. The selection of questions is not part of it, so it can grow."""
    adapter = None if args.adapter is None else resolve(args.adapter, "adapter")
    model = fingerprint(base, adapter=adapter)
    adapted = {"adapter": model["adapter"], "merge_adapter": args.merge_adapter} if "adapter" in model else {}
    stored = {} if args.kv_cache is None else {"kv_cache": args.kv_cache}
    return {
        "set": args.set if args.set in question_sets.FILES else Path(args.set).name,
        "questions": question_sets.digest(questions),
        "base": model["sha256"],
        **adapted,
        **stored,
        "contenders": {way.model_id: way.identity() for way in ways},
        "rule": options.request_from(args).shown_rule(),
        **{key: getattr(args, key) for key in ("dtype", "quantize", "template", "max_new_tokens", "repeats", "seed")},
        **{key: machine()[key] for key in ("device", "platform", "jax")},
    }


def publish(args: argparse.Namespace, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
    """Print acceptance lengths as a Markdown table and write them as CSV, with two decimals as others publish them."""
    cells = [[row[0], *(f"{value:.2f}" for value in row[1:])] for row in rows]
    table = "\n".join(markdown_table(columns, cells))
    print(f"acceptance length, {options.request_from(args).shown_rule()}:\n\n{table}\n")
    with WholeFile(Path(args.output) / "acceptance_lengths.csv", "--output") as file:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns, *cells])
        file.write_text(text.getvalue())


def show(results: dict[str, dict[str, Figures]], baseline: str) -> None:
    """Print one table per contender, at most 80 columns wide."""
    for model_id, rows in results.items():

        def cells(name, row, model_id=model_id):
            interval = "" if row.low is None or model_id == baseline else f"{row.low:.2f}-{row.high:.2f}"
            equal = {True: "yes", False: f"NO: {row.different} differ", None: ""}[row.equal]
            rates = f"{row.tokens_per_step:.2f}", f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}"
            return name, row.questions, *rates, interval, equal

        columns = ("category", "questions", "τ", "tokens/s", "speed-up", "95%", "equal")
        print_table(columns, (cells(*item) for item in rows.items()), left=("category",), title=model_id)
    print("τ: tokens_per_step. speed-up: tokens/s over the base alone in the same run; 95%: bootstrap over questions")
