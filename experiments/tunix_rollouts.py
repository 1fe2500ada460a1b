"""Time rollouts of one policy by tunix and by hydrajax in interleaved rounds. Requires the extra ``tunix``.

    python experiments/tunix_rollouts.py [--base DIR --draft DIR] --questions mt_bench_question.jsonl [--output FILE]

The policy is a base of hydrajax as a module of tunix. Every engine samples each prompt several times, with the same
settings, in random order within a round; the first round compiles and does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.qwen2 import model as qwen2
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import hydrajax
from hydrajax.integrations.tunix import HydrajaxRollout
from hydrajax.machine import machine


def policy_of(m: hydrajax.LanguageModel) -> nnx.Module:
    """Return a LLaMA as tunix' Qwen 2, whose rotary base is the configuration's (Llama 3's is not) and biases are 0."""
    c = m.config
    config = qwen2.ModelConfig(
        num_layers=c.n_layers,
        vocab_size=c.vocab_size,
        embed_dim=c.width,
        hidden_dim=c.mlp_width,
        num_heads=c.n_heads,
        head_dim=c.head_dim,
        num_kv_heads=c.n_kv_heads,
        rope_theta=int(c.rope_theta),
        norm_eps=c.norm_eps,
        use_tied_embedding=c.tied_lm_head,
    )
    found, given = qwen2.Qwen2(config, rngs=nnx.Rngs(0)), hydrajax.to_params(m, "tunix")
    for path, variable in nnx.to_flat_state(nnx.state(found, nnx.Param)):
        if (name := ".".join(map(str, path))) in given:
            variable[...] = jnp.asarray(given[name])
    return found


def prompts_of(m: hydrajax.LanguageModel, questions: str | None, count: int) -> list[str]:
    if questions is None:
        return [
            "def area(",
            "class Stack:",
            "for i in range(",
            "import os\n",
            "values = [",
            "def mean(",
            "return ",
            "x = ",
        ][:count]
    turns = [json.loads(line)["turns"][0] for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    as_chat = lambda text: m.tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return [as_chat(text) for text in sorted(turns, key=len)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="shipped")
    parser.add_argument("--draft", action="append", default=[], help="heads to measure too")
    parser.add_argument("--questions", help="JSON lines with turns; without, a few beginnings of Python code")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output")
    given = parser.parse_args()
    m = hydrajax.load(given.base, dtype="float32")
    tokenizer, policy = TokenizerAdapter(m.tokenizer), policy_of(m)
    tokenizer.pad_id()  # sets the padding of a tokenizer that has none
    texts = prompts_of(m, given.questions, given.prompts)
    longest = max(len(m.tokenizer.encode(text)) for text in texts)
    room = longest + given.max_new_tokens + 1
    config = RolloutConfig(
        max_tokens_to_generate=given.max_new_tokens,
        max_prompt_length=longest,
        top_p=1.0,
        kv_cache_size=room,
        eos_tokens=list(m.eos_ids),
    )
    c = m.config
    engines: dict[str, Any] = {
        "tunix": VanillaRollout(policy, tokenizer, CacheConfig(room, c.n_layers, c.n_kv_heads, c.head_dim))
    }
    for draft in ("none", "lookup+corpus", *given.draft):
        engines[draft] = HydrajaxRollout(policy, tokenizer, None, config, draft=draft, batch_size=given.batch_size)
    rows: list[dict[str, Any]] = []
    repeated = [text for text in texts for _ in range(given.samples)]
    temperatures = given.temperature or [0.9, 1.0]
    for temperature in temperatures:
        for turn in range(temperature != temperatures[0], given.rounds + 1):  # another one compiles nothing
            names = list(engines)
            random.Random(turn).shuffle(names)
            for name in names:
                settings = dataclasses.replace(config, temperature=temperature, seed=jax.random.PRNGKey(turn))
                began = time.perf_counter()
                out = engines[name].generate(repeated, settings)
                seconds = time.perf_counter() - began
                tokens = sum(map(len, out.tokens))
                row = {"engine": name, "temperature": temperature, "round": turn, "seconds": seconds, "tokens": tokens}
                row["tokens_per_step"] = getattr(engines[name], "tokens_per_step", 1.0)
                rows.append(row)
                print(f"{name:24} T={temperature} round {turn}: {seconds:6.1f} s {tokens / seconds:7.1f} tokens/s, "
                      f"{row['tokens_per_step']:.2f} tokens per step", flush=True)  # fmt: skip
    print(f"\n{'engine':24} {'T':>4} {'tokens/s':>9} {'of tunix':>9} {'of none':>8} {'tokens per step':>16}")
    for temperature in temperatures:
        counted = [row for row in rows if row["temperature"] == temperature and row["round"]]
        rates = {
            name: statistics.median(row["tokens"] / row["seconds"] for row in counted if row["engine"] == name)
            for name in engines
        }
        for name, rate in rates.items():
            tau = np.mean([row["tokens_per_step"] for row in counted if row["engine"] == name])
            of = f"{rate / rates['tunix']:9.2f} {rate / rates['none']:8.2f}"
            print(f"{name:24} {temperature:4} {rate:9.1f} {of} {tau:16.2f}")
    if given.output:
        found = {"machine": machine(), "settings": vars(given), "rows": rows}
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
