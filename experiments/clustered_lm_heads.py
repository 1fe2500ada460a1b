"""Clustered draft lm heads against the whole one and a reduced vocabulary: time, best tokens missed, tokens per step.

    python experiments/clustered_lm_heads.py --questions mt_bench_question.jsonl
    python experiments/clustered_lm_heads.py --parts time --shapes smollm2 gemma

``time``: milliseconds of an lm head in 8 bits for 1, 4 and 8 rows, in interleaved rounds. Rows of the large shapes are
random: such rows have no clusters, so their time has a meaning and their missed tokens would have none. ``missed``: of
SmolLM2's hidden states at its own answers, the share whose best token is in no chosen cluster, over all tokens and the
drafts' 8,192. ``drafts``: milliseconds to propose, and of the step, and tokens per step of SmolLM2's drafts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hydrajax
from hydrajax import plugins
from hydrajax.bench.questions.sets import read_questions
from hydrajax.bench.report.tables import print_table
from hydrajax.bench.rounds import in_rounds, seconds
from hydrajax.bench.timing import StepTimer
from hydrajax.cli import options, run_command
from hydrajax.drafters.clusters import CLUSTER, FEWEST, SHARE, Clusters
from hydrajax.drafters.draft_lm_head import CLUSTERED_LM_HEAD, LmHead
from hydrajax.files import WholeFile
from hydrajax.machine import machine
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.models.weights import project
from hydrajax.ops import top_tokens

SHAPES = {"smollm2": (49_152, 576), "1b": (128_256, 2048), "8b": (128_256, 4096), "gemma": (262_144, 2560)}
ROWS, VOCABULARY, CALLS, STEPS, CONTEXT = (1, 4, 8), 8192, 20, 32, 512
TREES = {"hydra++": ("chain-1", "chain-3", "dynamic-8-2-4"), "dspark": ("chain-3", "dynamic-8-5-3")}
KINDS = ("shared", "clustered-16", "clustered-24", "clustered-32", "clustered-48")


def time(args: argparse.Namespace, prompts: list) -> list[dict]:
    """Return the time of each lm head, with its best token, by shape and rows."""
    random, found = np.random.default_rng(0), []
    kind = plugins.find("weights", "int8").stores("lm_head")
    for name in args.shapes:
        vocab, width = SHAPES[name]
        count = vocab // CLUSTER
        whole = kind.of(random.standard_normal((width, vocab), np.float32))
        centroids, n_chosen = kind.of(random.standard_normal((width, count), np.float32)), max(count // SHARE, FEWEST)
        tokens = random.permutation(vocab).astype(np.int32).reshape(-1, CLUSTER)
        clusters = Clusters(centroids, tokens, whole.split(count), n_chosen, vocab)
        some = kind.of(random.standard_normal((width, VOCABULARY), np.float32))
        heads = {"whole": whole, f"vocabulary of {VOCABULARY}": some, f"{n_chosen} of {count} clusters": clusters}
        for rows in ROWS:
            x = jnp.asarray(random.standard_normal((rows, width), np.float32))
            calls = {title: lm_head_timer(head, x) for title, head in heads.items()}
            for title, times in in_rounds(calls, args.rounds).items():
                found.append({"shape": name, "rows": rows, "lm head": title, "ms": statistics.median(times)})
    return found


def lm_head_timer(head, x: jax.Array):
    """Compile CALLS products, each of which reads the result of the one before; return their mean time."""

    @jax.jit
    def run(head, x):
        def once(_, x):
            if isinstance(head, Clusters):
                best = LmHead(shared=True).top(head.logits(x), 1)
            else:
                best = top_tokens(project(x, head, jnp.float32), 1)
            return x + 1e-6 * (best % 2)

        return jax.lax.fori_loop(0, CALLS, once, x)

    head = jax.device_put(head)
    run(head, x)
    return lambda number: seconds(run, head, x) * 1e3 / CALLS


def missed(args: argparse.Namespace, prompts: list) -> list[dict]:
    """Return the share of best tokens outside the chosen clusters, at the base's answers."""
    m = hydrajax.load("smollm2")
    answers = m.generate(prompts, max_new_tokens=args.max_new_tokens)
    base, run = BoundBase(m.model, m.params.base), jax.jit(lambda p, x: run_base(m.model, p, x, (0,)).hidden)
    hidden = []
    for one in answers:
        ids = np.zeros((1, 1024), np.int32)
        text = [*one.prompt_ids, *one.output_ids][:1024]
        ids[0, : len(text)] = text
        hidden.append(np.asarray(run(m.params.base, ids))[0, len(one.prompt_ids) - 1 : len(text) - 1])
    hidden, found = np.concatenate(hidden), []
    vocabularies = {"all": None, f"{VOCABULARY}": m.with_draft("hydra++").drafter.lm_head.vocabulary}
    for name, vocabulary in vocabularies.items():
        lm_head = LmHead(shared=True, vocabulary=vocabulary)
        best = lm_head.top(lm_head.of_base(jnp.asarray(hidden), base.logits), 1)
        took = seconds(lambda lm_head=lm_head: lm_head.with_clusters({}, base)[CLUSTERED_LM_HEAD].tokens)
        clusters = lm_head.with_clusters({}, base)[CLUSTERED_LM_HEAD]
        for n_chosen in (8, 16, 24, 32, 48, 64, 96):
            logits = dataclasses.replace(clusters, n_chosen=n_chosen).logits(jnp.asarray(hidden))
            share = float(np.mean(np.asarray(lm_head.top(logits, 1) != best)))
            row = {"tokens": name, "clusters": len(clusters.tokens), "chosen": n_chosen, "missed": share}
            found.append(row | {"positions": len(hidden), "clustering_seconds": took})
    return found


def drafts(args: argparse.Namespace, prompts: list) -> list[dict]:
    """Return the times and the tokens per step of each draft, kind of lm head and tree."""
    found = []
    for draft, trees in TREES.items():
        models = {kind: hydrajax.load("smollm2", draft, draft_lm_head=kind) for kind in args.kinds}
        timers, taus = {}, {}
        for kind, m in models.items():
            for tree in trees:
                executor = m.executor(m.program(tree=tree, max_new_tokens=STEPS * 8)).with_program(eos_ids=())
                timer = StepTimer(executor, 1, CONTEXT, STEPS)
                timers |= {(kind, tree, "propose"): timer.propose(), (kind, tree, "step"): timer.step()}
                answers = m.generate(prompts, tree=tree, max_new_tokens=args.max_new_tokens)
                taus[kind, tree] = sum(len(x.output_ids) for x in answers) / sum(x.steps for x in answers)
        times = in_rounds(timers, args.rounds)
        for (kind, tree), tau in taus.items():
            row = {"draft": draft, "tree": tree, "lm head": kind, "tokens_per_step": tau}
            for phase in ("propose", "step"):
                first, own = times[args.kinds[0], tree, phase], times[kind, tree, phase]
                row[f"{phase}_ms"] = statistics.median(own)
                row[f"{phase}_ratio"] = statistics.median(a / b for a, b in zip(own, first, strict=True))
            found.append(row)
    return found


PARTS = {"time": time, "missed": missed, "drafts": drafts}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="of lm heads; ratios are to the first")
    parser.add_argument("--questions", metavar="FILE", help="question set, for missed tokens and drafts")
    parser.add_argument("--count", type=options.positive, default=24, help="questions (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=options.positive, default=64, help="default %(default)s")
    parser.add_argument("--rounds", type=options.positive, default=15, help="default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE.json", default=Path("runs/clustered_lm_heads.json"))


def run(args: argparse.Namespace) -> None:
    jax.config.update("jax_platforms", "cpu")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    questions = read_questions(args.questions) if args.questions else []
    questions = questions[:: max(len(questions) // args.count, 1)][: args.count]
    prompts = [[{"role": "user", "content": one.turns[0]}] for one in questions]
    prompts = prompts or ["The capital of France is", "def area(width, height):"]
    with WholeFile(args.output, "--output") as file:
        results = {}
        for part in args.parts:
            rows = results[part] = PARTS[part](args, prompts)
            print_table(list(rows[0]), [[_text(value) for value in row.values()] for row in rows], title=part)
        file.write_json({"machine": machine(), "arguments": options.recorded(args), "results": results})


def _text(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
