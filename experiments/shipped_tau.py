"""Tokens per step of the shipped heads on held-out files, from the starts of functions.

    python experiments/shipped_tau.py --output experiments/results/shipped_tau.json

Every drafter has the same prompts, tree (63 choices) and limits. Measured are greedy decoding, its first 32 tokens
(before the text can become repetitive) and exact sampling at temperature 0.7, and the share of repeated 8-grams, which
makes every drafter look better.
"""

from __future__ import annotations

import argparse
import platform
from itertools import islice
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax import assets
from hydrajax.bench.questions.held_out import held_out_files, held_out_prompts
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.files import WholeFile
from hydrajax.trees import presets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=str(assets.base()))
    parser.add_argument("--heads", nargs="+", default=[str(assets.path(name)) for name in assets.HEADS])
    parser.add_argument("--tree", default="mc_sim_7b_63")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", help="JSON file")
    args = parser.parse_args()

    base = hydrajax.load(args.base, dtype="float32")
    found = held_out_prompts(held_out_files(), base.tokenizer, args.prompt_tokens)
    prompts = np.array([prompt.ids for prompt in islice(found, args.prompts)], np.int32)
    tree = presets.by_name(args.tree)

    def decode(executor: Executor) -> list[np.ndarray]:
        outs = []
        for number, (prompt, lengths, n_real) in enumerate(batches(prompts, args.batch_size)):
            out = jax.device_get(executor.decode(prompt, lengths, jax.random.key(number * args.batch_size)))
            outs.append([part[:n_real] for part in (out.tokens, out.lengths, out.steps)])
        return [np.concatenate(parts) for parts in zip(*outs, strict=True)]

    tokens, lengths, _ = decode(hydrajax.make_executor(base, base.program(tree="root", max_new_tokens=args.new_tokens)))
    report = {
        "tree": args.tree, "prompts": len(prompts), "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens,
        "repeated_8grams": repeated(tokens, lengths, 8),
        "machine": platform.processor() or platform.machine(), "jax": jax.__version__, "drafters": {},
    }  # fmt: skip
    settings = {
        "greedy": (Greedy(), args.new_tokens),
        "greedy, first 32 tokens": (Greedy(), 32),
        "exact sampling, temperature 0.7": (ExactSampling(0.7), args.new_tokens),
    }
    print(f"{'':12}" + "".join(f"{name:>34}" for name in settings), flush=True)
    for directory in args.heads:
        loaded, row = base.with_draft(directory), {}
        for name, (rule, new_tokens) in settings.items():
            request = hydrajax.Request(rule, max_new_tokens=new_tokens)
            executor = hydrajax.make_executor(loaded, loaded.program(request, tree=tree), request)
            out, n_tokens, steps = decode(executor)
            row[name] = float(n_tokens.sum() / steps.sum())
            if isinstance(rule, Greedy) and not np.array_equal(out, tokens[:, :new_tokens]):
                raise SystemExit(f"{directory}: the output differs from that of autoregressive decoding")
            if isinstance(rule, ExactSampling):
                row["repeated 8-grams at 0.7"] = repeated(out, n_tokens, 8)
        report["drafters"][Path(directory).name] = row
        print(f"{Path(directory).name:12}" + "".join(f"{row[name]:34.2f}" for name in settings), flush=True)
    print(f"repeated 8-grams of the greedy text: {report['repeated_8grams']:.1%}")
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_json(report)


def repeated(tokens: np.ndarray, lengths: np.ndarray, n: int) -> float:
    """Return the share of n-grams that occurred earlier in the same continuation."""
    total = again = 0
    for row, length in zip(tokens, lengths, strict=True):
        grams = [tuple(row[i : i + n]) for i in range(length - n + 1)]
        total += len(grams)
        again += len(grams) - len(set(grams))
    return again / max(total, 1)


if __name__ == "__main__":
    main()
