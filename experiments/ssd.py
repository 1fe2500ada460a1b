"""Speculative speculative decoding on two simulated devices, compared with the simulator.

    python experiments/ssd.py --output experiments/results/ssd.json
    python experiments/ssd.py --quick
    python experiments/ssd.py --base DIR --draft SMALLER_BASE --prompts FILE.jsonl

The base (default: the shipped one) runs on one CPU device, the draft model on another. Every fan-out has its hit rate,
seconds of the parts of a round and of whole rounds, and tokens per second. The baselines are the same pair in turn (on
two devices, and in one program on one device) and the base alone. The simulator predicts whole rounds from the measured
parts and outcomes. From the roofline of two H200 it then predicts the best fan-out for a 7B base.
"""

from __future__ import annotations

import os
import sys

# JAX reads these at its import. They come closest to one core per device: the devices share one thread in addition to
# their own ones. `cores` measures how many cores a device keeps busy.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=2",
        "--xla_cpu_multi_thread_eigen=false",
    )
)
os.environ |= {"PJRT_NPROC": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"}

import argparse
import functools
import time

import jax
import numpy as np
from common import CONSOLE, draft_model_of, program, prompts_of, speed_rows, write
from ssd_parts import part_seconds, round_seconds, times_of
from ssd_roofline import pair_times
from ssd_simulator import Outcomes, Speed, Times, best, predict

import hydrajax
from hydrajax import assets
from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.shapes import PRESETS
from hydrajax.bench.split_contest import joined, recorded, split_contest
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import Placement, last_devices
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.trees.presets import chain

FULL = {"count": 8, "prompt_tokens": 128, "new_tokens": 128, "repeats": 5, "depth": 4, "ranks": 8}
FULL |= {"fan_outs": [2, 4, 8, 12, 16]}
QUICK = {"count": 2, "prompt_tokens": 32, "new_tokens": 32, "repeats": 1, "depth": 2, "ranks": 4, "fan_outs": [4]}

# Assumed for a pair of H200, in seconds: a small message between GPUs, and the launch of a layer's kernels (12 per
# layer, docs/gpu.md, at a microsecond each inside a CUDA graph).
TRANSFER, LAUNCH = 10e-6, 12e-6
DRAFTS = {
    "68m": LlamaConfig(32_000, 768, 3072, 2, 12, 12, 64),  # JackFram/llama-68m
    "160m": LlamaConfig(32_000, 768, 3072, 12, 12, 12, 64),  # JackFram/llama-160m
    "1b": PRESETS["1b"],
}
ACCEPTANCES, DEPTHS = (0.6, 0.7, 0.8), range(1, 11)
BUDGETS, WITHIN = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), 0.01


def run(args: argparse.Namespace) -> None:
    args.settings["devices"] = len(jax.devices())
    executor, prompts = pair(args)
    remarks = [cores(executor, prompts[0])]

    # Count outcomes with the widest fan-out, then time the parts.
    wide = executor.with_fan_out(FanOut((args.ranks,) * (args.depth + 1)))
    counted = joined(recorded(wide, prompts, 1)).outcomes()
    outcomes = Outcomes.counted(counted)
    fan_outs = {0: FanOut((0,) * (args.depth + 1))} | {total: outcomes.best(total) for total in args.fan_outs}
    fan_outs = {fan_out.total: fan_out for fan_out in fan_outs.values()}
    rows = []
    with CONSOLE.status("contest"):
        settings = {"batch_size": 1, "repeats": args.repeats}
        found = split_contest(executor, [f for f in fan_outs.values() if f.total], prompts, **settings)
    by_total = {sum(row.fan_out): row for row in found if row.fan_out is not None}
    drawn = speed_rows([row.measured for row in found], 1)
    for row, figures in zip(found, drawn, strict=True):
        own = {"fan_out": row.fan_out, "hit_rate": row.hit_rate, "ready_rate": row.ready_rate}
        rows.append(figures | own)
    parts, rounds = {}, {}
    prompt, lengths = right_padded(prompts[:1], max(map(len, prompts)))
    for total, fan_out in fan_outs.items():
        with CONSOLE.status(f"rounds with {total} outcomes"):
            prepared = executor.with_fan_out(fan_out)
            parts[total] = part_seconds(prepared, prompt, lengths)
            rounds[total] = round_seconds(prepared, prompt, lengths, args.repeats)
    # Rounds are timed on one prompt, so the simulator gets the outcomes of that prompt.
    one = Outcomes.counted(joined(recorded(wide, prompts[:1], 1)).outcomes())
    print(f"\n{'outcomes':>8} {'hits':>6} {'prepare':>8} {'round':>8} {'predicted':>9} {'hidden':>7} {'predicted':>9}")
    in_turn, measured_draft = rounds[0], parts[0]["miss"]
    for total, fan_out in fan_outs.items():
        speed = predict(times_of(parts, total), one, fan_out)
        hidden = (in_turn - rounds[total]) / measured_draft
        row = next(row for row in rows if row["fan_out"] == by_total[total].fan_out)
        row |= {"parts_ms": {name: 1e3 * value for name, value in parts[total].items() if value == value}}
        row |= {"round_ms": 1e3 * rounds[total], "predicted_round_ms": 1e3 * speed.seconds}
        row |= {"hidden": hidden, "predicted_hidden": speed.hidden, "predicted_hit_rate": speed.hit_rate}
        print(
            f"{total:8} {by_total[total].hit_rate or 0:6.0%} {1e3 * parts[total]['prepare']:8.2f} "
            f"{1e3 * rounds[total]:8.2f} {1e3 * speed.seconds:9.2f} {hidden:7.0%} {speed.hidden:9.0%}",
            flush=True,
        )
    args.settings["outcomes"] = counted.tolist()
    exponent = outcomes.exponent
    remarks.append(
        f"Of {int(counted.sum())} rounds {outcomes.accept_lengths[-1]:.0%} accepted the whole chain; F guesses "
        f"missed the bonus token as (1 + F) ** -{exponent:.2f}. Milliseconds of the parts are from one prompt."
    )
    args.settings["h200"], lines = extrapolation(min(exponent, 4.0))
    remarks += lines
    title = f"Drafting ahead on two CPU devices, chains of {args.depth}"
    write(args, "speed", "", title, rows, remarks)


# --- the pair ---------------------------------------------------------------------------------------------------------


def pair(args: argparse.Namespace) -> tuple[SplitExecutor, list[np.ndarray]]:
    """Return an executor with base and draft on separate devices, and prompts."""
    placement = Placement(draft=last_devices(1))
    m = hydrajax.load(args.base or assets.base(), draft_model_of(args), dtype=args.dtype, placement=placement)
    executor = hydrajax.make_executor(m, m.program(tree=chain(args.depth), max_new_tokens=args.new_tokens))
    return executor, prompts_of(args, m)


def cores(executor: SplitExecutor, prompt: np.ndarray) -> str:
    """Measure how many cores one device and two devices keep busy in a forward pass of the base."""
    model, ids = executor.model, np.tile(prompt, (8, 1))

    @jax.jit
    def work(params, ids):
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        mask = np.tri(ids.shape[1], dtype=bool)
        return model.apply({"params": params}, ids, positions, mask).hidden.sum()

    both = [jax.device_put(executor.params.base, device) for device in jax.devices()]

    def busy(params: list) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready([work(one, ids) for one in params])
        return time.perf_counter() - wall, time.process_time() - cpu

    busy(both)
    one = min(busy(both[:1]) for _ in range(5))
    two = min(busy(both) for _ in range(5))
    return (
        f"One device kept {one[1] / one[0]:.2f} cores busy, two at once {two[1] / two[0]:.2f}; two took "
        f"{two[0] / one[0]:.2f} times as long as one (1 on an idle machine)."
    )


# --- two H200 ---------------------------------------------------------------------------------------------------------


def extrapolation(exponent: float) -> tuple[list[dict], list[str]]:
    """Predict the best fan-out (the smallest within 1%) of a 7B base for every draft, acceptance and chain.

    Returns:
        The grid of predictions, and one line for the best chain of each draft and acceptance.
    """
    grid, lines = [], []

    @functools.cache
    def times(name: str, depth: int, total: int) -> Times:
        settings = {"depth": depth, "outcomes": total, "transfer": TRANSFER, "launch": LAUNCH}
        return pair_times(DEVICES["H200"], PRESETS["7b"], DRAFTS[name], **settings)

    for name in DRAFTS:
        for acceptance in ACCEPTANCES:
            found: list[tuple[int, Speed, Speed]] = []
            for depth in DEPTHS:
                outcomes = Outcomes.power_law(depth, acceptance, exponent, ranks=256)
                costs = functools.partial(times, name, depth)
                ahead = best(costs, outcomes, BUDGETS, within=WITHIN)
                turn = predict(costs(0), outcomes, FanOut((0,) * (depth + 1)))
                found.append((depth, ahead, turn))
                grid.append(
                    {"draft": name, "acceptance": acceptance, "depth": depth, "fan_out": list(ahead.fan_out.counts)}
                    | {"hit_rate": ahead.hit_rate, "hidden": ahead.hidden, "speedup_over_in_turn": ahead.speedup}
                    | {"tokens_per_second": ahead.tokens_per_second, "in_turn": turn.tokens_per_second}
                )
            depth, ahead, _ = max(found, key=lambda row: row[1].tokens_per_second)
            turn_depth, _, turn = max(found, key=lambda row: row[2].tokens_per_second)
            lines.append(
                f"Two H200 by their roofline, 7B base, {name} draft, {acceptance:.0%} accepted: best chain "
                f"{depth}, {ahead.fan_out.total} outcomes {list(ahead.fan_out.counts)}, {ahead.hit_rate:.0%} hits, "
                f"{ahead.tokens_per_second:.0f} tokens/s; in turn chain {turn_depth}, "
                f"{turn.tokens_per_second:.0f} tokens/s: {ahead.tokens_per_second / turn.tokens_per_second:.2f} times."
            )
            print(lines[-1])
    return grid, lines


if __name__ == "__main__":
    sys.exit(program(__doc__, run, FULL, QUICK))
