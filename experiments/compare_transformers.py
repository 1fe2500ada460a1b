"""Compare greedy decoding in hydrajax and in transformers on the CPU, interleaved in one run.

    python experiments/compare_transformers.py --random 25m
    python experiments/compare_transformers.py --base DIR --draft DIR --tree mc_sim_7b_63

transformers is measured with its dynamic and its static cache; the faster one counts. Needs the extra `test` (torch).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from side_by_side import side_by_side
from transformers import LlamaConfig, LlamaForCausalLM

import hydrajax
from hydrajax.bench.shapes import PRESETS
from hydrajax.trees import presets


def save_random_base(name: str, directory: Path, seed: int) -> None:
    """Write a random LLaMA of a preset's shape as a Hugging Face directory, which both sides load."""
    c = PRESETS[name]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.mlp_width,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base", help="Hugging Face LLaMA directory")
    source.add_argument("--random", choices=sorted(PRESETS), help="use random weights of this shape")
    parser.add_argument("--draft", help="released Hydra or Medusa directory")
    parser.add_argument("--tree", default="mc_sim_7b_63")
    parser.add_argument("--context", type=int, default=512, help="tokens of prompt and answer (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    jax.config.update("jax_platforms", "cpu")

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(args.base or scratch)
        if args.random:
            save_random_base(args.random, directory, args.seed)
        loaded = hydrajax.load(directory, args.draft)
        reference = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        reference.generation_config.eos_token_id = None  # both sides continue after EOS, for equal work

    config = loaded.model.config
    new = args.max_new_tokens
    length = min(args.context, config.max_positions) - new
    if length < 1:
        parser.error(f"--context: got {args.context}, expected more than --max-new-tokens ({new})")
    prompt = np.random.default_rng(args.seed).integers(3, config.vocab_size, (1, length), dtype=np.int32)
    prompt_torch = torch.from_numpy(prompt).long()

    def with_transformers(cache):
        def run():
            with torch.inference_mode():
                ids = reference.generate(
                    prompt_torch,
                    attention_mask=torch.ones_like(prompt_torch),
                    do_sample=False,
                    max_new_tokens=new,
                    cache_implementation=cache,
                    pad_token_id=0,
                )
            return ids[0, length:].numpy()

        return run

    def with_hydrajax(fn, params):
        return lambda: np.asarray(fn(params, prompt).tokens[0])

    plain = hydrajax.make_autoregressive_fn(loaded.model, max_new_tokens=new)
    ways = {
        "transformers, dynamic cache": with_transformers("dynamic"),
        "transformers, static cache": with_transformers("static"),
        "hydrajax, autoregressive": with_hydrajax(plain, hydrajax.Params(loaded.params.base, {})),
    }
    if args.draft:
        tree = presets.by_name(args.tree)
        fn = hydrajax.make_decode_fn(loaded.model, loaded.drafter, tree, max_new_tokens=new)
        ways[f"hydrajax, {args.tree}"] = with_hydrajax(fn, loaded.params)

    outputs, seconds = side_by_side(ways, args.repeats)
    rates = {name: new / median for name, median in seconds.items()}
    best = max(rate for name, rate in rates.items() if name.startswith("transformers"))
    first = next(iter(outputs.values()))
    table = Table("decoder", "tokens/s", "against transformers' best", "same ids")
    results = {}
    for name, rate in rates.items():
        same = bool(np.array_equal(outputs[name], first))
        results[name] = {"tokens_per_second": rate, "ratio": rate / best, "same_ids": same}
        table.add_row(name, f"{rate:.1f}", f"{rate / best:.2f}x", "yes" if same else "NO")
    print(f"prompt {length} + {new} new tokens, float32, {args.threads} torch threads, median of {args.repeats}")
    Console().print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"arguments": vars(args) | {"json": str(args.json)}, "results": results}, indent=1)
        )
    return 0 if all(result["same_ids"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
