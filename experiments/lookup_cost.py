"""Time of prompt lookup in a step over the length of the context: propose, and add three tokens to the text.

    python experiments/lookup_cost.py --output experiments/results/lookup_cost.json

The text is held-out source code, and the base does not run. Times are the least of several runs of 200 steps in one
compiled loop, as other processes only add to them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hydrajax
from hydrajax.bench.questions.held_out import held_out_files
from hydrajax.cli import options
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.files import WholeFile
from hydrajax.machine import machine
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

STEPS, EMITTED = 200, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=options.positives, default=[1000, 4000, 16_000, 64_000], metavar="S,S,...")
    parser.add_argument("--trees", nargs="+", default=["chain-5", "cartesian-4x2x2"], metavar="NAME")
    parser.add_argument("--repeats", type=options.positive, default=9, metavar="R")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()

    tokenizer = hydrajax.load("shipped").tokenizer
    text = np.concatenate([tokenizer(text)["input_ids"] for _, text in held_out_files()]).astype(np.int32)
    rows = []
    for name in args.trees:
        for context in args.contexts:
            found = {"tree": name, "context": context} | measured(presets.by_name(name), text, context, args.repeats)
            rows.append(found)
            times = f"step {found['step_us']:7.1f} us, prompt {found['prompt_ms']:7.2f} ms"
            print(f"{name:16} {context:6}  {times}", flush=True)
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_json({"machine": machine(), "rows": rows})


def measured(tree: TreeTopology, text: np.ndarray, context: int, repeats: int) -> dict[str, float]:
    """Return microseconds of a step and milliseconds of the prompt at this context, for one sequence."""
    drafter, room = PromptLookup(), EMITTED * STEPS + tree.depth + 2
    text = np.resize(text, (1, context + room))

    @jax.jit
    def begin(prompt):
        count = jnp.full(1, context, jnp.int32)
        return drafter.begin({}, drafter.init_state(1, context + room), None, prompt, count, None, None)

    def step(i, carry):
        state, following, total = carry
        root = following[:, EMITTED * i]
        proposed = drafter.propose({}, state, root, tree, None).tokens
        new = jax.lax.dynamic_slice_in_dim(following, EMITTED * i, tree.depth + 1, axis=1)
        # Tokens after the emitted ones depend on the proposal, so that XLA cannot reorder writing and reading.
        new = jnp.where(jnp.arange(tree.depth + 1) < EMITTED, new, jnp.min(proposed))
        state = drafter.advance({}, state, None, new, jnp.full(1, EMITTED, jnp.int32), None, None)
        return state, following, total + jnp.sum(proposed)

    loop = jax.jit(lambda carry: jax.lax.fori_loop(0, STEPS, step, carry), donate_argnums=0)
    prompt, following = jnp.asarray(text[:, :context]), text[:, context:]
    begun, stepped = [], []
    for _ in range(repeats + 1):  # the first compiles
        at = time.perf_counter()
        state = jax.block_until_ready(begin(prompt))
        begun.append(time.perf_counter() - at)
        carry = jax.block_until_ready((state, jnp.array(following), jnp.zeros((), jnp.int32)))
        at = time.perf_counter()
        jax.block_until_ready(loop(carry))
        stepped.append(time.perf_counter() - at)
    return {"step_us": min(stepped[1:]) * 1e6 / STEPS, "prompt_ms": min(begun[1:]) * 1e3}


if __name__ == "__main__":
    main()
