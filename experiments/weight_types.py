"""Measure perplexity, distance from float32 and the tokens per step of the drafts for each type of weights.

    python experiments/weight_types.py --output experiments/results/weight_types_18m.json
    python experiments/weight_types.py --base smollm2 --draft hydra++ --draft dspark --prompts FILE.jsonl

Perplexity, KL and agreement are teacher-forced on held-out source code. Drafts decode greedily with their own trees,
and every text is compared with the one that the same type writes without a draft. No time is measured. With --output,
types that were measured before an interruption are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
from common import Parts, held_out_chunks, prompts_of

import hydrajax
from hydrajax import plugins
from hydrajax.api import DTYPES
from hydrajax.bench.quantization import logit_effect
from hydrajax.cli import options, run_command
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.language_model import LanguageModel
from hydrajax.machine import machine
from hydrajax.text.answers import Generation

REFERENCE = "float32"
TYPES = (
    REFERENCE,
    "bfloat16",
    *(name for name in plugins.Group("weights") if name != "fp8"),
)  # fp8 products require a GPU
SHIPPED = ("medusa", "hydra", "hydra++", "draft-model", "lookup")
SETTINGS = ("base", "draft", "texts", "text_tokens", "prompts", "count", "prompt_tokens", "new_tokens")
BATCH = 4  # nodes of a step stay below the 64 rows whose products do not depend on each other


def main() -> int:
    return run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", metavar="DIR|NAME", default="shipped")
    add("--draft", metavar="DIR|NAME", action="append", default=[], help=f"repeatable (default {', '.join(SHIPPED)})")
    add("--types", nargs="+", choices=TYPES, default=list(TYPES), metavar="TYPE", help=f"of {', '.join(TYPES)}")
    add("--texts", type=options.positive, default=24, metavar="N", help="held-out texts (default %(default)s)")
    add("--text-tokens", type=options.positive, default=256, metavar="N", help="of each text (default %(default)s)")
    add("--prompts", metavar="FILE.jsonl", help="prompts to continue (default: held-out texts)")
    add("--count", type=options.positive, default=16, metavar="N", help="prompts (default %(default)s)")
    add("--prompt-tokens", type=options.positive, default=64, metavar="N", help="of held-out texts (default 64)")
    add("--new-tokens", type=options.positive, default=128, metavar="N", help="per prompt (default %(default)s)")
    add("--output", type=Path, metavar="FILE.json", help="result (default: print only)")


def run(args: argparse.Namespace) -> int:
    if args.base != "shipped" and not args.draft:
        raise HydrajaxError("--draft: got none, expected drafts for this base")
    args.draft = args.draft or list(SHIPPED)
    plain = hydrajax.load(args.base, dtype=REFERENCE)
    texts, prompts = held_out_chunks(plain.tokenizer, args.texts, args.text_tokens), prompts_of(args, plain)

    def measured(name: str) -> list[dict]:
        return [row_of(name, plain, texts, prompts, args)]

    if args.output is None:
        return 0 if all_equal([row for name in args.types for row in measured(name)]) else 1
    with WholeFile(args.output, "--output") as file:
        about = {"machine": machine(), "settings": {name: getattr(args, name) for name in SETTINGS}}
        parts = Parts(Path(f"{args.output}.parts"), about)
        rows = [row for name in args.types for row in parts.rows(name, partial(measured, name))]
        file.write_json(about | {"rows": rows})
    parts.remove()
    return 0 if all_equal(rows) else 1


def row_of(name: str, plain: LanguageModel, texts: list, prompts: list, args: argparse.Namespace) -> dict:
    """Measure one type."""
    loaded = plain if name == REFERENCE else load(args.base, name)
    effect = logit_effect((plain.model, plain.params.base), (loaded.model, loaded.params.base), texts)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params.base)) / 1e6
    row = {"type": name, "megabytes": size} | asdict(effect) | {"tokens_per_step": {}, "differing": {}}
    print(
        f"{name:9} {size:6.1f} MB  perplexity {effect.perplexity_after:.4g}  KL {effect.kl:.2g}  "
        f"same likeliest token {effect.agreement:.2%}",
        flush=True,
    )
    expected = generate(loaded, "root", prompts, args)
    for draft in args.draft:
        drafted = loaded.with_draft(draft)
        found = generate(drafted, drafted.default_tree(), prompts, args)
        rate = sum(one.new_tokens for one in found) / sum(one.steps for one in found)
        differing = sum(one.output_ids != other.output_ids for one, other in zip(found, expected, strict=True))
        row["tokens_per_step"][draft], row["differing"][draft] = rate, differing
        print(
            f"    {draft:14} {rate:.3f} tokens per step, {differing} of {len(prompts)} texts differ from those without "
            "a draft",
            flush=True,
        )
    return row


def load(base: str, name: str) -> LanguageModel:
    return hydrajax.load(base, dtype=name) if name in DTYPES else hydrajax.load(base, dtype=REFERENCE, quantize=name)


def generate(loaded: LanguageModel, tree, prompts: list, args: argparse.Namespace) -> list[Generation]:
    return loaded.generate(prompts, tree=tree, max_new_tokens=args.new_tokens, batch_size=BATCH)


def all_equal(rows: Sequence[dict]) -> bool:
    return not any(count for row in rows for count in row["differing"].values())


if __name__ == "__main__":
    sys.exit(main())
