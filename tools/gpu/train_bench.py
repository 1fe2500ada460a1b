"""Training speed of Hydra++ heads on a frozen base of a 7B shape in bf16 with random weights, on one GPU.

    python tools/gpu/train_bench.py --out train_bench.jsonl
    python tools/gpu/train_bench.py --shape tiny --length 64 --batches 2 --repeats 2 --dtype float32

For every batch size it measures the train step (`hydrajax.train.train_step.make_train_step`): tokens per second, model
FLOPs utilisation and peak memory. The parts are compiled and timed alone: the base's forward pass, loss and gradient of
the heads on given hidden states, and the optimizer. Each batch size is written at once as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from json_lines import write_lines

from hydrajax.bench.device_memory import peak_memory
from hydrajax.bench.random_models import random_base
from hydrajax.bench.roofline.devices import device_of
from hydrajax.bench.shapes import PRESETS
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import make_mesh
from hydrajax.train.flops import forward_flops
from hydrajax.train.losses import Objective
from hydrajax.train.optimizer import make_optimizer
from hydrajax.train.run_config import DataConfig, OptimizerConfig, TrainConfig, draft_of
from hydrajax.train.tasks.heads_task import HeadsTask
from hydrajax.train.train_step import init_state, make_train_step, state_shardings

STEPS = 1000  # of the schedule, which does not affect the times


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--batches",
        type=integers,
        default=[1, 2, 4, 8],
        help="sequences per step, smallest first (default %(default)s)",
    )
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; stop before the next batch size")
    parser.add_argument("--out", type=Path, default=Path("train_bench.jsonl"))
    args = parser.parse_args(argv)

    began = time.perf_counter()
    device = jax.devices()[0]
    known = device_of(device.device_kind)
    peak = known and known.flops
    task = random_task(args)
    header = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "shape": args.shape,
        "dtype": args.dtype,
        "length": args.length,
        "base_parameters": count(task.frozen),
        "draft_parameters": count(task.abstract_params),
        "flops_per_token": task.flops_per_token,
        "peak_flops": peak,
    }
    print(json.dumps(header))
    lines = [header]
    write_lines(lines, args.out)
    for batch in args.batches:
        if time.perf_counter() - began > args.time_limit:
            print("time limit reached: the remaining batch sizes are not measured")
            break
        try:
            line = measure(task, batch, args, peak)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            line = {"batch": batch, "out_of_memory": True}
        lines.append(line)
        write_lines(lines, args.out)
        print(json.dumps(line), flush=True)
    return 0


def random_task(args: argparse.Namespace) -> HeadsTask:
    """Return a training task of Hydra++ heads (as released: 4 heads of 4 layers, dropout 0.2) on a random base."""
    config = TrainConfig(
        output="unused", model=args.shape, dtype=args.dtype, steps=STEPS, batch_size=1,
        draft=draft_of(num_draft_heads=4, n_layers=4, prefix=True, dropout=0.2),
        objective=Objective(chunk_tokens=args.chunk_tokens),
        data=DataConfig(format="standard_library", length=args.length),
    )  # fmt: skip
    model, base = random_base(PRESETS[args.shape], args.dtype)
    return HeadsTask(config, None, model, base, make_mesh())


def measure(task: HeadsTask, batch_size: int, args: argparse.Namespace, peak: float | None) -> dict:
    """Return the median milliseconds of the step and of its parts, rates and utilisation."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, task.model.config.vocab_size, (batch_size, args.length)).astype(np.int32)
    batch = jax.device_put({"tokens": tokens, "labels": tokens})
    optimizer = make_optimizer(OptimizerConfig(), STEPS)
    shardings = state_shardings(task.mesh, task.abstract_params, task.param_shardings, optimizer)
    rng = jax.device_put(jax.random.key(1), shardings.step)
    state = init_state(task.init_params(rng), optimizer, shardings)

    # The step comes first, so that the peak memory is its own.
    step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
    (state, metrics), step_time = timed(
        lambda out: step(out[0], task.frozen, batch, rng), (state, None), args.repeats
    )  # fmt: skip
    memory = peak_memory()

    forward = jax.jit(lambda base, tokens: run_base(task.model, base, tokens).hidden)
    hidden, base_time = timed(lambda _: forward(task.frozen, batch["tokens"]), None, args.repeats)
    totals = jax.jit(task.loss.totals)(batch)
    gradient = jax.jit(jax.grad(lambda *inputs: task.loss(*inputs)[0]))
    given = batch | {"hidden": hidden}
    grads, heads_time = timed(
        lambda _: gradient(state.params, task.frozen, given, totals, rng), None, args.repeats
    )  # fmt: skip

    def update(grads, state):
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    update = jax.jit(update, donate_argnums=1)
    _, optimizer_time = timed(lambda state: update(grads, state), state, args.repeats)
    rate = batch_size * args.length / step_time
    flops = rate * task.flops_per_token
    # The base's forward alone; its lm head belongs to the loss.
    base_flops = forward_flops(task.model, args.length, logits=False).total * batch_size * args.length / base_time
    return {
        "batch": batch_size,
        "step_milliseconds": step_time * 1e3,
        "base_forward_milliseconds": base_time * 1e3,
        "heads_loss_and_gradient_milliseconds": heads_time * 1e3,
        "optimizer_milliseconds": optimizer_time * 1e3,
        "tokens_per_second": rate,
        "tflops_per_second": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "base_forward_mfu": base_flops / peak if peak else None,
        "loss": float(metrics["loss"]),
        "peak_memory_bytes": memory,  # of the process so far, an earlier batch size included
    }


def timed(call, value, repeats: int):
    """Return the last result of ``value = call(value)`` and the median seconds, after one call that compiles."""
    value = jax.block_until_ready(call(value))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        value = jax.block_until_ready(call(value))
        times.append(time.perf_counter() - began)
    return value, statistics.median(times)


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    sys.exit(main())
