"""Rerun the papers' tables on a chat model: MT-Bench, Spec-Bench, batches, contexts, training curves and scores.

    python experiments/real_model.py --data DIR --run-code --output experiments/results
    python experiments/real_model.py --data DIR --quick --parts mt_bench batch
    python experiments/real_model.py --parts curve --runs runs/medusa runs/hydra --output experiments/results

DIR holds spec_bench_question.jsonl (which contains MT-Bench), gsm8k_test.jsonl and HumanEval.jsonl.gz, as they are
released. Each part writes OUTPUT/real_model_PART.json, and real_model_figures.py draws the results. The same command
resumes an interrupted run. Answers of MT-Bench are shared by the parts mt_bench, spec_bench and context.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import common
import numpy as np
import quality
import spec_bench
from amphista_tables_1_and_2 import RULES
from real_model_figures import draw_all

import hydrajax
from hydrajax import api
from hydrajax.bench.appended import whole_lines
from hydrajax.bench.contests.contest import AUTOREGRESSIVE
from hydrajax.bench.draft_contest import candidate_drafts, measure_drafts
from hydrajax.bench.questions.asking import Prompter
from hydrajax.bench.questions.contenders import folder_name
from hydrajax.bench.questions.sets import FILES, read_questions, select
from hydrajax.bench.questions.summary import MT_BENCH, OVERALL
from hydrajax.bench.report.drawing import can_draw
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.locking import in_use
from hydrajax.machine import machine
from hydrajax.text.records import OBJECT, read_record
from hydrajax.text.templates import make_encoder
from hydrajax.train.checkpoints import RECORD
from hydrajax.train.metrics import FILE, read_metrics
from hydrajax.train.run_config import load_config

# questions_per_category: of Spec-Bench; MT-Bench's eight categories have ten each, the others 80.
FULL = {"questions_per_category": 20, "max_new_tokens": 128, "repeats": 1}
FULL |= {"batch_sizes": [1, 4], "batch_questions_per_category": 3, "batch_rounds": 3}
FULL |= {"scored_questions": 200, "score_tokens": 256}
QUICK = {"questions_per_category": 1, "max_new_tokens": 16, "batch_questions_per_category": 1, "batch_rounds": 1}
QUICK |= {"scored_questions": 4, "score_tokens": 32}
EDGES = (0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # of contexts, in tokens
FEWEST_STEPS = 20  # of a range of contexts; with fewer the mean is noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR|NAME", default="smollm2", help="chat model (default %(default)s)")
    parser.add_argument(
        "--draft",
        metavar="DIR|NAME",
        action="append",
        default=[],
        help="draft, repeatable (default: lookup, each bundled draft of the base, and lookup+ each of them)",
    )
    parser.add_argument(
        "--tree", metavar="NAME", help="tree of every draft (default: the one saved with it, or its own)"
    )
    parser.add_argument("--data", metavar="DIR", help="directory of the question files; all parts but curve need it")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: all; curve only with --runs")
    parser.add_argument(
        "--runs", metavar="DIR|FILE.yaml", nargs="+", default=[], help="training runs, or their configurations"
    )
    rules = [rule.partition(",")[0] for rule in RULES]
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=rules,
        default=rules,
        help=f"of mt_bench and spec_bench (default {' '.join(rules)})",
    )
    parser.add_argument("--run-code", action="store_true", help="run generated code in a sandbox; HumanEval needs it")
    parser.add_argument("--template", metavar="NAME", help="chat template (default: auto)")
    parser.add_argument("--dtype", choices=list(api.DTYPES), default="float32", help="default %(default)s")
    parser.add_argument("--answers", metavar="DIR", default="runs/real_model", help="answers (default %(default)s)")
    parser.add_argument("--output", metavar="DIR", default="runs/experiments", help="results (default %(default)s)")
    common.add_settings(parser, FULL, QUICK)


def run(args: argparse.Namespace) -> None:
    common.set_defaults(args, FULL, QUICK)
    args.prompts, args.questions = None, args.questions_per_category  # as spec_bench.py names them
    args.drafts = args.draft or candidate_drafts(args.base)
    args.tree_flags = ["--tree", args.tree] if args.tree else []
    parts = args.parts or [part for part in PARTS if part != "curve" or args.runs]
    if args.data is None and parts != ["curve"]:
        raise HydrajaxError("--data: got none, expected the directory of the question files")
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    with in_use(folder, "--output"):
        for part in parts:
            PARTS[part](args)
        if can_draw():
            draw_all(folder, folder / "figures")


def save(
    args: argparse.Namespace, part: str, kind: str, title: str, rows: list[dict], *remarks: str, **settings: Any
) -> None:
    """Write the result of a part; the settings are those that its figures depend on."""
    args.settings = settings
    path = Path(args.output) / f"real_model_{part}.json"
    with WholeFile(path, "--output") as args.file:
        common.write(args, kind, "", f"{title}, {folder_name(args.base)}", rows, remarks)
    print(f"written: {path}")


# --- question sets ----------------------------------------------------------------------------------------------------


def answered(args: argparse.Namespace, rule: str, *flags: str) -> Path:
    """Answer Spec-Bench under a rule with `hydrajax evaluate`, and return the directory of the answers."""
    return spec_bench.answered(args, args.drafts, rule.replace(", T ", "-"), [*RULES[rule], *args.tree_flags, *flags])


def summary_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int, dict[str, dict]]]:
    """Yield each contender's label, nodes and figures by category."""
    summary = json.loads((folder / "summary.json").read_text())
    for model_id, categories in summary["results"].items():
        yield label(args, model_id), summary["nodes"][model_id], categories


def label(args: argparse.Namespace, model_id: str) -> str:
    """Return the name of a contender without the base's."""
    return model_id.removeprefix(f"{folder_name(args.base)}-")


ONLY_MT_BENCH = ("--categories", ",".join(MT_BENCH))


def rules_of(args: argparse.Namespace) -> list[str]:
    return [rule for rule in RULES if rule.partition(",")[0] in args.rules]


def mt_bench(args: argparse.Namespace) -> None:
    rows = []
    for rule in rules_of(args):
        for name, nodes, categories in summary_of(args, answered(args, rule, *ONLY_MT_BENCH)):
            found = categories[OVERALL]
            row = {"name": f"{name}, {rule}", "draft": name, "rule": rule, "batch": 1, "nodes": nodes}
            row |= {key: found[key] for key in ("tokens_per_step", "tokens_per_second", "speedup", "equal")}
            # The interval is of the speed-up, not of the rate.
            row |= {"low": None, "high": None, "speedup_low": found["low"], "speedup_high": found["high"]}
            rows.append(row)
    sizes = {"questions": found["questions"], "max_new_tokens": args.max_new_tokens}
    save(args, "mt_bench", "speed", "MT-Bench", rows, **sizes)


def by_category(args: argparse.Namespace) -> None:
    for rule in rules_of(args):
        rows = []
        for name, _, categories in summary_of(args, answered(args, rule)):
            for category, found in categories.items():
                shown = "multi_turn" if category == "mt_bench" else category
                rows.append({"name": name, "category": shown} | found)
        sizes = {"questions": found["questions"], "max_new_tokens": args.max_new_tokens}
        part = "spec_bench" if rule == "greedy" else "spec_bench_sampled"
        remark = "multi_turn: MT-Bench's eight categories together, as Spec-Bench reports them"
        save(args, part, "categories", f"Spec-Bench, {rule}", rows, remark, rule=rule, **sizes)


def context(args: argparse.Namespace) -> None:
    """Tokens per step over the context, from the accept lengths of the greedy answers to MT-Bench."""
    folder, rows, questions = answered(args, "greedy", *ONLY_MT_BENCH), [], 0
    for model_id in json.loads((folder / "summary.json").read_text())["results"]:
        name = label(args, model_id)
        if name == AUTOREGRESSIVE:
            continue
        records = [json.loads(line) for line in whole_lines(folder / f"{model_id}.jsonl")]
        choices = [record["choices"][0] for record in records if record["category"] in MT_BENCH]
        questions = len(choices)
        steps = np.array([step for choice in choices for step in steps_of(choice)])
        for low, high in pairwise(EDGES):
            emitted = steps[(steps[:, 0] >= low) & (steps[:, 0] < high), 1]
            if len(emitted) >= FEWEST_STEPS:
                row = {"name": name, "over": "tokens of context", "at": (low + high) / 2}
                rows.append(row | {"tokens_per_step": float(emitted.mean()), "steps": len(emitted)})
    remarks = f"at: the middle of a range of contexts in which at least {FEWEST_STEPS} steps began"
    sizes = {"questions": questions, "max_new_tokens": args.max_new_tokens}
    save(args, "context", "curve", "tokens per step over the context, MT-Bench", rows, remarks, **sizes)


def steps_of(choice: dict) -> Iterator[tuple[int, int]]:
    """Yield the context of each step, in tokens, and the number of tokens that it emitted."""
    emitted = iter(choice["accept_lengths"])
    for at, count in zip(choice["prompt_tokens"], choice["decoding_steps"], strict=True):
        for tokens in islice(emitted, count):
            yield at, tokens
            at += tokens


def batch(args: argparse.Namespace) -> None:
    """Throughput on the first turns of MT-Bench by batch size."""
    everything = read_questions("spec_bench", args.data)
    questions = select(everything, list(MT_BENCH), per_category=args.batch_questions_per_category)
    sizes = {"questions": len(questions), "max_new_tokens": args.max_new_tokens, "rounds": args.batch_rounds}
    base = hydrajax.load(args.base, dtype=args.dtype)
    encode, room = make_encoder(base.tokenizer, args.template or "auto").prompt, base.config.max_positions
    prompter = Prompter(encode, room, args.max_new_tokens, base.tokenizer.bos_token_id)
    prompts = [np.array(prompter([{"role": "user", "content": each.turns[0]}])[0], np.int32) for each in questions]

    def measure(size: int) -> list[dict]:
        with common.CONSOLE.status("") as line:
            rates = measure_drafts(
                base,
                args.drafts,
                prompts,
                tree=args.tree,
                batch_size=size,
                max_new_tokens=args.max_new_tokens,
                repeats=args.batch_rounds,
                on_status=lambda text: line.update(f"batch {size}: {text}"),
            )
        return common.speed_rows([replace(rate, name=folder_name(rate.name)) for rate in rates], size)

    kept = {"base": args.base, "drafts": args.drafts, "tree": args.tree, "dtype": args.dtype, **sizes}
    parts = common.Parts(Path(args.output) / "real_model_batch.json.parts", kept | {"machine": machine()})
    rows = [row for size in args.batch_sizes for row in parts.rows(f"batch {size}", lambda size=size: measure(size))]
    save(args, "batch", "speed", "first turns of MT-Bench by batch size", rows, **sizes)
    parts.remove()


def scores(args: argparse.Namespace) -> None:
    """Scores of greedy answers; equal outputs have equal scores."""
    names, rows = ["gsm8k"], []
    if args.run_code:
        names.append("humaneval")
    else:
        print("HumanEval is left out: it runs generated code, which needs --run-code")
    own = {"draft": args.drafts, "limit": args.scored_questions, "max_new_tokens": args.score_tokens}
    given = argparse.Namespace(**vars(args) | own | {"answers": f"{args.answers}/scores-{args.scored_questions}"})
    for name in names:
        found = quality.scored(given, name, str(Path(args.data) / FILES[name]), "greedy", args.tree_flags)
        rows += [row | {"name": label(args, row["name"])} for row in found]
    sizes = {"questions": max(row["questions"] for row in rows), "max_new_tokens": args.score_tokens}
    save(args, "scores", "quality", "scores with and without drafts", rows, **sizes)


# --- training ---------------------------------------------------------------------------------------------------------


def curve(args: argparse.Namespace) -> None:
    """Tokens per step on held-out text over the tokens of training, one line per run."""
    if not args.runs:
        raise HydrajaxError("--runs: got none, expected training runs")
    rows = []
    for path in map(Path, args.runs):
        folder, tokens = training_run(path)
        lines = [line for line in read_metrics(folder / FILE) if line["kind"] == "eval" and "tokens_per_step" in line]
        if not lines:
            raise HydrajaxError(f"--runs: got {path} without evaluations, expected a run that trains heads")
        row = {"name": folder.name, "over": "training tokens (millions)"}
        rows += [
            row | {"at": each["step"] * tokens / 1e6} | {"tokens_per_step": each["tokens_per_step"]} for each in lines
        ]
    remarks = ["simulated on held-out text; training tokens: steps times batch size times length"]
    remarks += ["machine: where the curves were collected, not where the drafts were trained"]
    save(args, "curve", "curve", "tokens per step over training", rows, *remarks)


def training_run(path: Path) -> tuple[Path, int]:
    """Return the directory of a run, or of the run of a configuration, and its tokens per training step."""
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path)
        return Path(config.output), config.batch_size * config.data.length
    records = [found for found in path.glob(f"checkpoints/*/{RECORD}") if found.parent.name.isdigit()]
    if not records:
        raise HydrajaxError(f"--runs: got {path} without checkpoints, expected a run; or name its configuration")
    settings = read_record(max(records, key=lambda found: int(found.parent.name)), {"meta": OBJECT}, "--runs")["meta"]
    return path, settings["settings"]["batch_size"] * settings["settings"]["data"]["length"]


PARTS = {
    "mt_bench": mt_bench, "spec_bench": by_category, "batch": batch, "context": context, "curve": curve,
    "scores": scores,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command("real_model.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
