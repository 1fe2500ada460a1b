"""Cost of a long context in the server: chunked prefill, decode step, memory; and tokens per step over its length.

    python experiments/long_context.py --output experiments/results/long_context.json
    python experiments/long_context.py --quick

Times and memory are measured on a small random model with room for 32k tokens and Hydra++ heads, in the programs of
``hydrajax serve``, whose caches have a few sizes. The step is timed in the smallest cache that fits and in the largest.
Tokens per step are measured on the shipped model, whose context is 1024.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import CONSOLE, held_out_chunks

import hydrajax
from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.cli import options, run_command
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import batches
from hydrajax.files import WholeFile
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.machine import machine
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.trees import presets

CHUNK, STEPS, TREE, MOST = 512, 16, "cartesian-2x2", 33_024
CONFIG = LlamaConfig(4096, 256, 768, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, max_positions=MOST)
DRAFTS, NEW = ("hydra++", "draft-model", "lookup", "lookup+hydra++"), 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = [1000, 2000, 4000, 8000, 16_000, 32_000]
    parser.add_argument("--lengths", type=options.positives, metavar="S,S,...", help=f"default {lengths}")
    parser.add_argument(
        "--contexts", type=options.positives, metavar="S,S,...", help="contexts of tokens per step (default 64 to 896)"
    )
    parser.add_argument("--count", type=options.positive, help="texts for tokens per step (default 16)")
    parser.add_argument("--repeats", type=options.positive, help="timings of a step, the least counts (default 5)")
    parser.add_argument("--quick", action="store_true", help="use at most 2000 tokens, 4 texts and one repeat")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.set_defaults(full={"lengths": lengths, "contexts": [64, 128, 256, 512, 896], "count": 16, "repeats": 5})


def run(args: argparse.Namespace) -> None:
    quick = {"lengths": [500, 2000], "contexts": [64, 512], "count": 4, "repeats": 1}
    for name, value in (quick if args.quick else args.full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if max(args.lengths) + CHUNK > MOST or max(args.contexts) + NEW > 1024:
        raise hydrajax.HydrajaxError(
            f"lengths, contexts: got {args.lengths}, {args.contexts}, expected at most {MOST - CHUNK} and {1024 - NEW}"
        )
    costs = list(measured(args.lengths, args.repeats))
    taus = tokens_per_step(args.contexts, args.count)
    if args.output:
        with WholeFile(args.output, "--output") as file:
            content = {"command": "python experiments/long_context.py", "machine": machine()}
            file.write_json(content | {"costs": costs, "tokens_per_step": taus})


def measured(lengths: list[int], repeats: int):
    """Yield for each length the milliseconds per 1000 prompt tokens and per step, and megabytes, of one sequence."""
    model, base = random_base(CONFIG)
    drafter, params = random_draft(model, base, "hydra++")
    executor = FusedExecutor(model, params, Program(drafter, presets.by_name(TREE)))
    pool = ExecutorPool(executor, PoolSizes(slots=1, chunk=CHUNK))
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, MOST).astype(np.int32)
    columns = {"tokens": 7, "slots": 7, "read ms/1000": 13, "last chunk": 11, "step ms": 8, "in the largest": 15}
    columns |= {"cache MB": 9, "temp MB": 10}
    print(" ".join(name.rjust(width) for name, width in columns.items()))

    def read(length: int, chunks: list[float]):
        state, at = pool.empty(pool.prefill_cache_len(0, length)), 0
        while length - at > CHUNK:
            began = time.perf_counter()
            state = jax.block_until_ready(pool.feed(state, text[at : at + CHUNK], int(text[at + CHUNK])))
            chunks.append(time.perf_counter() - began)
            at += CHUNK
        return pool.finish(state, text[at:length], pool.neutral.replace(max_new_tokens=MOST - length))

    def step(state) -> float:
        """Return the least milliseconds of several runs, as other processes only add to them."""
        times, before = [], 0
        for number in range(repeats + 1):  # the first compiles
            began = time.perf_counter()
            state, now = pool.executor.advance(state, np.zeros(1, bool), STEPS)
            if number:
                times.append((time.perf_counter() - began) / (int(now.steps[0]) - before))
            before = int(now.steps[0])
        return 1e3 * min(times)

    for length in lengths:
        with CONSOLE.status(f"{length} tokens"):
            chunks: list[float] = []
            read(length, [])  # compiles
            began = time.perf_counter()
            state = jax.block_until_ready(read(length, chunks))
            seconds = time.perf_counter() - began
            slots = pool.cache_len_for(length + (repeats + 1) * STEPS * pool.longest_path() + pool.headroom)
            found = {"tokens": length, "places": slots, "read_ms_per_1000": 1e6 * seconds / length}
            found["last_piece_ms"] = 1e3 * statistics.median(chunks[-3:]) if chunks else None
            found["step_ms"] = step(pool.shapes.tile(state, 1, slots))
            found["step_ms_in_the_largest"] = step(pool.shapes.tile(state, 1, pool.cache_lens[-1]))
            found["cache_mb"] = pool.shapes.nbytes(1, slots) / 1e6
            found["beside_mb"] = temporary_bytes(pool, slots) / 1e6
        last = "" if found["last_piece_ms"] is None else f"{found['last_piece_ms']:.1f}"
        print(
            f"{length:7} {slots:7} {found['read_ms_per_1000']:13.1f} {last:>11} {found['step_ms']:8.2f} "
            f"{found['step_ms_in_the_largest']:15.2f} {found['cache_mb']:9.1f} {found['beside_mb']:10.1f}",
            flush=True,
        )
        yield found


def temporary_bytes(pool: ExecutorPool, slots: int) -> int:
    """Return the temporary bytes of a prefill chunk, as XLA plans them."""
    executor = pool.executor
    state = executor.abstract_state(1, slots, pool.sampling(pool.neutral))
    tokens, ones = jnp.zeros((1, CHUNK), jnp.int32), jnp.zeros(1, jnp.int32)
    feed = jax.jit(executor.engine.feed, donate_argnums=1)
    compiled = feed.lower(executor.params, state, tokens, ones, ones).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def tokens_per_step(contexts: list[int], count: int) -> list[dict]:
    """Measure tokens per step of the shipped model over `NEW` greedy tokens after held-out contexts."""
    base = hydrajax.load("shipped")
    texts = held_out_chunks(base.tokenizer, count, max(contexts))
    found = []
    print(f"\n{'τ after context':20} " + " ".join(f"{context:6}" for context in contexts))
    for draft in DRAFTS:
        m = base.with_draft(draft)
        tree = "chain-5" if DraftRef.parse(draft).kind else None
        executor = hydrajax.make_executor(m, m.program(tree=tree, max_new_tokens=NEW))
        row = {"draft": draft}
        for context in contexts:
            tokens = steps = 0
            for prompt, lengths, n_real in batches([text[-context:] for text in texts], count):
                out = executor.decode(prompt, lengths)
                tokens += int(out.lengths[:n_real].sum())
                steps += int(out.steps[:n_real].sum())
            row[str(context)] = tokens / steps
        found.append(row)
        print(f"{draft:20} " + " ".join(f"{row[str(context)]:6.2f}" for context in contexts), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
