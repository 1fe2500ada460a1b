"""Cost of asking the host in every step: the stepped executor against the fused one.

    python experiments/stepped_cost.py --output experiments/results/stepped_cost.json

A random base of 25M parameters decodes without a draft, with Hydra++ heads and with prompt lookup. The executors decode
the same prompts in turns; a time is the median over rounds of the milliseconds per step after the prefill. Further
executors decode under a grammar that allows all tokens, which reads every tree and applies a mask in every step: as one
program that calls the host, if this machine can, and as three programs per step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.bench.shapes import PRESETS
from hydrajax.cli import options
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.decoding.stepped import SteppedExecutor
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.none import NoDrafter
from hydrajax.files import WholeFile
from hydrajax.machine import machine
from hydrajax.trees import presets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=PRESETS, default="25m")
    parser.add_argument("--batches", type=options.positives, default=[1, 8], metavar="B,B,...")
    parser.add_argument(
        "--context", type=options.positive, default=512, metavar="S", help="tokens of a prompt (default %(default)s)"
    )
    parser.add_argument("--new-tokens", type=options.positive, default=64, metavar="N")
    parser.add_argument("--rounds", type=options.positive, default=3, metavar="R")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()

    model, base = random_base(PRESETS[args.shape])
    heads = random_draft(model, base, "hydra++")
    drafts = {
        "no draft": (NoDrafter(), Params(base, {}), presets.root()),
        "hydra++, chain-4": (*heads, presets.chain(4)),
        "hydra++, cartesian-3x2x2": (*heads, presets.cartesian([3, 2, 2])),
        "lookup, chain-4": (PromptLookup(), Params(base, {}), presets.chain(4)),
    }
    rows = []
    for batch in args.batches:
        for name, (drafter, params, tree) in drafts.items():
            program = Program(drafter, tree, max_new_tokens=args.new_tokens)
            masked = program.replace(grammars=True), program.request(grammar=Everything())
            three = SteppedExecutor(model, params, *masked)
            three.host_calls = None
            executors: dict[str, Executor] = {
                "fused": FusedExecutor(model, params, program),
                "stepped": SteppedExecutor(model, params, program),
                "stepped, masked": SteppedExecutor(model, params, *masked),
                "stepped, masked, three programs": three,
            }
            found = step_ms(executors, prompts_of(batch, args.context, model.config.vocab_size), args.rounds)
            rows.append({"batch": batch, "draft": name, "nodes": tree.size} | found)
            times = ", ".join(f"{kind} {statistics.median(times):7.3f} ms" for kind, times in found["step_ms"].items())
            print(f"batch {batch}  {name:26} {times}", flush=True)
    if args.output:
        with WholeFile(args.output, "--output") as file:
            content = {"machine": machine(), "shape": args.shape, "context": args.context, "rows": rows}
            file.write_json(content)


@dataclass(frozen=True)
class Everything:
    """A grammar of all texts, and its constraint: the cost of a grammar without that of a parser."""

    error: str | None = None

    def start(self, tokenizer, vocab_size: int, eos_ids) -> Everything:
        return self

    def copy(self) -> Everything:
        return self

    def follow(self, text) -> None:
        pass

    def forced(self, most: int) -> list[int]:
        return []

    def allow(self, tokens, parents, allowed: np.ndarray) -> None:
        allowed[:] = 0xFFFFFFFF


def prompts_of(batch: int, context: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (batch, context), dtype=np.int32)


def step_ms(executors: dict[str, Executor], prompts: np.ndarray, rounds: int) -> dict:
    """Return each executor's milliseconds per step in each round, and whether all outputs are equal."""
    times: dict[str, list[float]] = {name: [] for name in executors}
    outputs = []
    for round_ in range(rounds + 1):  # the first compiles
        for name, executor in executors.items():
            given = settled_inputs(executor.program, executor.model.config, prompts)
            state = jax.block_until_ready(executor.prefill(*given))
            began = time.perf_counter()
            state, _ = executor.advance(state, np.zeros(len(prompts), bool), executor.program.max_new_tokens)
            output = jax.block_until_ready(executor.output(state))
            steps = int(output.steps.max())
            if round_:
                times[name].append((time.perf_counter() - began) * 1e3 / steps)
            else:
                outputs.append(np.asarray(output.tokens))
    return {"step_ms": times, "steps": steps, "equal": all(np.array_equal(outputs[0], one) for one in outputs)}


if __name__ == "__main__":
    main()
