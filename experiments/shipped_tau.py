"""How good the shipped heads are: tokens_per_step on held-out files of the standard library.

    python experiments/shipped_tau.py --output experiments/results/shipped_tau.json

For each drafter the same prompts, 63-choice tree and limits: greedy over the whole continuation, greedy over its first
32 tokens (before it can fall into repetition), and exact sampling at temperature 0.7. Beside them the share of
repeated 8-grams, which flatters any drafter.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import jax
import numpy as np
from common import held_out_documents

from hydrajax import assets
from hydrajax.checkpoints.base import eos_ids, load_llama
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.decode import make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.step import Params
from hydrajax.files import WholeFile
from hydrajax.train.data import rows
from hydrajax.train.distill import cut_prompts
from hydrajax.trees import presets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=str(assets.base()))
    parser.add_argument("--heads", nargs="+", default=[str(assets.path(name)) for name in assets.DRAFTERS])
    parser.add_argument(
        "--held-out", default=str(assets.FOLDER / "ABOUT.json"), help="JSON with a list 'held_out' of files"
    )
    parser.add_argument("--tree", default="mc_sim_7b_63")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", help="JSON file")
    args = parser.parse_args()

    model, base_params = load_llama(args.base)
    ends = eos_ids(args.base)
    prompts = held_out_prompts(args)
    tree = presets.by_name(args.tree)

    def decode(drafter, params, rule, new_tokens):
        if drafter is None:
            run = make_autoregressive_fn(model, rule, max_new_tokens=new_tokens, eos_ids=ends)
        else:
            run = make_decode_fn(model, drafter, tree, rule, max_new_tokens=new_tokens, eos_ids=ends)
        outs = []
        for start in range(0, len(prompts), args.batch_size):
            batch = prompts[start : start + args.batch_size]
            outs.append(jax.device_get(run(Params(base_params, params), batch, rng=jax.random.key(start))))
        return [np.concatenate(parts) for parts in zip(*outs, strict=True)]

    tokens, lengths, *_ = decode(None, {}, Greedy(), args.new_tokens)
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
        drafter, params = load_draft(directory, model.config)
        row = {}
        for name, (rule, new_tokens) in settings.items():
            out, n_tokens, _, steps = decode(drafter, params, rule, new_tokens)
            row[name] = float(n_tokens.sum() / steps.sum())
            if isinstance(rule, Greedy) and not np.array_equal(out, tokens[:, :new_tokens]):
                raise SystemExit(f"{directory}: the output differs from autoregressive decoding")
            if isinstance(rule, ExactSampling):
                row["repeated 8-grams at 0.7"] = repeated(out, n_tokens, 8)
        report["drafters"][Path(directory).name] = row
        print(f"{Path(directory).name:12}" + "".join(f"{row[name]:34.2f}" for name in settings), flush=True)
    print(f"repeated 8-grams of the greedy text: {report['repeated_8grams']:.1%}")
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_text(json.dumps(report, indent=1) + "\n")


def held_out_prompts(args) -> np.ndarray:
    from hydrajax.text.tokenizer import load_tokenizer

    names = json.loads(Path(args.held_out).read_text())["held_out"]
    documents = [rows.all_targets(ids) for ids in held_out_documents(load_tokenizer(args.base), names)]
    return cut_prompts(documents, args.prompts, args.prompt_tokens, seed=0)


def repeated(tokens: np.ndarray, lengths: np.ndarray, n: int) -> float:
    """Share of n-grams that occurred before in the same continuation."""
    total = again = 0
    for row, length in zip(tokens, lengths, strict=True):
        grams = [tuple(row[i : i + n]) for i in range(length - n + 1)]
        total += len(grams)
        again += len(grams) - len(set(grams))
    return again / max(total, 1)


if __name__ == "__main__":
    main()
