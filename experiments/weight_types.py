"""What each type of weights does to a base: perplexity, distance from float32, and the tokens per step of its drafts.

    python experiments/weight_types.py --output experiments/results/weight_types_18m.json
    python experiments/weight_types.py --base smollm2 --draft hydra++ --draft dspark --prompts FILE.jsonl

Perplexity, KL and agreement are teacher-forced on held-out source code. Drafts decode greedily with their own trees,
and every text is compared with the one that the same type writes without a draft. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from common import held_out_chunks, prompts_of

import hydrajax
from hydrajax.api import DTYPES
from hydrajax.cli import options, run_command
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.machine import machine
from hydrajax.measure.quantization import logit_effect
from hydrajax.models.low_bit_types import FP8, QUANTIZED

REFERENCE = "float32"
TYPES = (REFERENCE, "bfloat16", *(name for name in QUANTIZED if name != FP8))  # fp8 products require a GPU
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
    if args.output is None:
        return 0 if all_equal(rows_of(args)) else 1
    with WholeFile(args.output, "--output") as file:
        rows = rows_of(args)
        settings = {name: getattr(args, name) for name in SETTINGS}
        file.write_text(json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1) + "\n")
    return 0 if all_equal(rows) else 1


def rows_of(args: argparse.Namespace) -> list[dict]:
    plain = hydrajax.load(args.base, dtype=REFERENCE)
    texts, prompts = held_out_chunks(plain.tokenizer, args.texts, args.text_tokens), prompts_of(args, plain)
    rows = []
    for name in args.types:
        loaded = plain if name == REFERENCE else load(args.base, name)
        effect = logit_effect((plain.model, plain.params.base), (loaded.model, loaded.params.base), texts)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params.base)) / 1e6
        row = {"type": name, "megabytes": size} | asdict(effect) | {"tokens_per_step": {}, "differing": {}}
        print(
            f"{name:9} {size:6.1f} MB  perplexity {effect.perplexity_after:.4g}  KL {effect.kl:.2g}  "
            f"same likeliest token {effect.agreement:.2%}",
            flush=True,
        )
        expected, _ = decode(loaded, "root", prompts, args.new_tokens)
        for draft in args.draft:
            drafted = loaded.with_draft(draft)
            found, row["tokens_per_step"][draft] = decode(drafted, drafted.default_tree(), prompts, args.new_tokens)
            row["differing"][draft] = sum(not np.array_equal(*pair) for pair in zip(found, expected, strict=True))
            print(
                f"    {draft:14} {row['tokens_per_step'][draft]:.3f} tokens per step, "
                f"{row['differing'][draft]} of {len(prompts)} texts differ from those without a draft",
                flush=True,
            )
        rows.append(row)
    return rows


def load(base: str, name: str) -> LanguageModel:
    return hydrajax.load(base, dtype=name) if name in DTYPES else hydrajax.load(base, dtype=REFERENCE, quantize=name)


def decode(
    loaded: LanguageModel, tree, prompts: Sequence[np.ndarray], new_tokens: int
) -> tuple[list[np.ndarray], float]:
    """Return each prompt's new tokens, and the tokens per step of all."""
    executor: Executor = make_executor(loaded, loaded.spec(tree=tree, max_new_tokens=new_tokens))
    texts, tokens, steps = [], 0, 0
    for prompt, lengths, n_real in batches(prompts, min(BATCH, len(prompts))):
        out = jax.device_get(executor.decode(prompt, lengths, jax.random.key(0)))
        texts += [row[:length] for row, length in zip(out.tokens[:n_real], out.lengths[:n_real], strict=True)]
        tokens, steps = tokens + out.lengths[:n_real].sum(), steps + out.steps[:n_real].sum()
    return texts, float(tokens / steps)


def all_equal(rows: Sequence[dict]) -> bool:
    return not any(count for row in rows for count in row["differing"].values())


if __name__ == "__main__":
    sys.exit(main())
