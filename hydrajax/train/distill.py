"""``python -m hydrajax.train.distill``: let the base write the text that its draft heads then learn from.

Heads draft what the base is about to say, so its own continuations are closer to their task than the text it was
trained on (medusa 2.3.2, self-distillation). Greedy text is what greedy decoding meets; sampled text has more variety.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from hydrajax.cli import run_command
from hydrajax.cli.options import positive, seed
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.decode import make_autoregressive_fn
from hydrajax.decoding.step import Params
from hydrajax.errors import HydrajaxError
from hydrajax.train.data.rows import Document

PROG = "python -m hydrajax.train.distill"
HELP = "Let a base continue prompts cut from its training data; the output trains heads (data.format: generations)."


def cut_prompts(documents: Sequence[Document], count: int, length: int, seed: int) -> np.ndarray:
    """``count`` stretches of ``length`` tokens from random places, int32 ``[count, length]``, longer documents oftener.

    Raises `HydrajaxError` where no document is that long.
    """
    long_enough = [ids for ids, _ in documents if len(ids) >= length]
    if not long_enough:
        raise HydrajaxError(f"--prompt-tokens: no document has {length} tokens")
    random = np.random.default_rng(seed)
    weights = np.array([len(ids) - length + 1 for ids in long_enough], float)
    chosen = random.choice(len(long_enough), size=count, p=weights / weights.sum())
    starts = random.integers(0, weights[chosen].astype(int))
    return np.stack([long_enough[i][start : start + length] for i, start in zip(chosen, starts, strict=True)])


def continuations(
    model, base_params, prompts: np.ndarray, temperatures: np.ndarray, new_tokens: int, eos_ids, batch: int, seed: int
) -> Iterator[tuple[int, dict]]:
    """``(index, {"prompt_ids", "output_ids", "temperature"})``, prompts of one temperature decoded in batches."""
    for temperature in np.unique(temperatures):
        rule = ExactSampling(float(temperature)) if temperature else Greedy()
        decode = make_autoregressive_fn(model, rule, max_new_tokens=new_tokens, eos_ids=eos_ids)
        indices = np.flatnonzero(temperatures == temperature)
        for start in range(0, len(indices), batch):
            chosen = indices[start : start + batch]
            filled = np.resize(chosen, batch)  # one compiled shape; the repeats are not used
            out = jax.device_get(
                decode(Params(base_params, {}), prompts[filled], rng=jax.random.fold_in(jax.random.key(seed), start))
            )
            for row, index in enumerate(chosen):
                output = out.tokens[row, : out.lengths[row]].tolist()
                record = {"prompt_ids": prompts[index].tolist(), "output_ids": output}
                yield int(index), record | {"temperature": float(temperature)}


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
    """An argparse type."""
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


if __name__ == "__main__":
    sys.exit(main())
