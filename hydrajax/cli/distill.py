"""``hydrajax distill``: text that a base writes itself, for its draft heads to learn from.

``python -m hydrajax.train.distill`` is the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from hydrajax.cli import run_command
from hydrajax.cli.options import positive, seed
from hydrajax.errors import HydrajaxError

PROG = "python -m hydrajax.train.distill"
HELP = "let a base continue prompts cut from its training data; the output trains heads (data.format: generations)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="a head-training run: its model and data")
    parser.add_argument("--output", metavar="FILE.jsonl", required=True)
    parser.add_argument("--count", metavar="N", type=positive, default=2000, help="continuations (default %(default)s)")
    parser.add_argument("--prompt-tokens", metavar="N", type=positive, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", metavar="N", type=positive, default=192, help="default %(default)s")
    parser.add_argument(
        "--temperatures",
        metavar="T,T",
        type=temperatures,
        default=(0.0, 0.7),
        help="shared out evenly; 0 is greedy (default 0,0.7)",
    )
    parser.add_argument(
        "--held-out", action="store_true", help="continue the held-out documents in place of the others"
    )
    parser.add_argument("--batch-size", metavar="B", type=positive, default=32, help="default %(default)s")
    parser.add_argument("--seed", metavar="S", type=seed, default=0, help="default %(default)s")
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace the file's")


def temperatures(text: str) -> tuple[float, ...]:
    """An argparse type: temperatures from 0 up, with commas between them."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 up with commas between, found '{text}'")
    return values


def run(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from hydrajax.api import load
    from hydrajax.files import WholeFile
    from hydrajax.train.config import load_config
    from hydrajax.train.data.dataset import documents
    from hydrajax.train.distill import continuations, cut_prompts

    config = load_config(args.config, args.overrides)
    if config.task != "heads":
        raise HydrajaxError("--config: distillation needs the config of a head-training run")
    base = load(config.model, dtype=config.dtype)
    found = documents(config.data, base.tokenizer, config.seed, print)
    prompts = cut_prompts(found.held_out if args.held_out else found.train, args.count, args.prompt_tokens, args.seed)
    per_prompt = np.resize(np.asarray(args.temperatures), args.count)
    written = continuations(
        base.model, base.params.base, prompts, per_prompt, args.new_tokens, base.eos_ids, args.batch_size, args.seed
    )
    began, tokens = time.perf_counter(), 0
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with WholeFile(args.output, "--output") as file, progress:
        for _, record in progress.track(written, args.count, description="continue"):
            file.write_text(json.dumps(record) + "\n")
            tokens += len(record["output_ids"])
    print(f"{args.count} continuations, {tokens:,} tokens in {time.perf_counter() - began:.0f} s")


def main(argv: list[str] | None = None) -> int:
    return run_command(PROG, HELP, add_arguments, run, sys.argv[1:] if argv is None else argv)
