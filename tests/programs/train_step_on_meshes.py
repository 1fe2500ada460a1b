"""Take train steps of the heads on several meshes, with micro-batches and in bfloat16; report metrics and shardings.

The last batch of three has a token whose embedding is NaN. Moments and parameters after each step go to
``{run}.npz``. Arguments: the folder for these and ``answer.json``; the meshes, ``{data}x{model}``.
"""

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from helpers.leaves import by_path
from hydrajax.models.base_model import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh, tree_shardings
from hydrajax.train.losses import Objective
from hydrajax.train.optimizer import make_optimizer
from hydrajax.train.run_config import DataConfig, OptimizerConfig, TrainConfig, draft_of
from hydrajax.train.tasks.heads_task import HeadsTask
from hydrajax.train.train_step import batch_placer, init_state, make_train_step, state_shardings

SHAPE = LlamaConfig(64, 32, 64, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=4, max_positions=64)
CONFIG = TrainConfig(
    output="unused",
    model="unused",
    dtype="float32",
    steps=10,
    batch_size=8,
    tree="cartesian-2x2",
    draft=draft_of(num_draft_heads=2, prefix=True, dropout=0.2),
    objective=Objective(lm_weight=0.5, chunk_tokens=32),
    data=DataConfig(format="standard_library", length=16),
)
POISON = SHAPE.vocab_size - 1  # a token whose embedding is NaN, only in the last batch of a run


def make_batches() -> list[dict]:
    random = np.random.default_rng(0)
    tokens = random.integers(1, POISON, (3, 8, 16)).astype(np.int32)
    labels = np.where(random.random(tokens.shape) < 0.6, tokens, -100)
    labels[:, :3] = tokens[:, :3]  # sequences and micro-batches have different numbers of targets
    tokens[2, 5, 7] = POISON
    return [{"tokens": t, "labels": wanted} for t, wanted in zip(tokens, labels, strict=True)]


def weights() -> dict:
    shapes = jax.eval_shape(lambda: init_base(Llama(SHAPE), jax.random.key(0)))
    noise = np.random.default_rng(1)

    def draw(x):
        return (noise.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1) + (x.ndim == 1)).astype(np.float32)

    base = jax.tree.map(draw, shapes)
    base["embedding"][POISON] = np.nan
    return base


def same_place(tree, params) -> dict[str, bool]:
    """Compare the sharding of every array named like a parameter with that of the parameter."""
    found, homes = {}, by_path(params)
    for name, leaf in by_path(tree).items():
        for home in (x for end, x in homes.items() if name.endswith("/" + end)):
            found[name] = bool(leaf.sharding.is_equivalent_to(home.sharding, leaf.ndim))
    return found


@functools.cache
def prepared(mesh, config: TrainConfig):
    """The task, its optimizer and shardings, fresh parameters, and noisy ones as arrays of the host."""
    model = Llama(SHAPE, jnp.dtype(config.dtype))
    homes = tree_shardings(mesh, abstract_base(model))
    base = jax.tree.map(lambda x, home: jax.device_put(x.astype(config.dtype), home), weights(), homes)
    task = HeadsTask(config, None, model, base, mesh)
    optimizer = make_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=0), 10)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    fresh = task.init_params(jax.random.key(1))
    noise = np.random.default_rng(2)  # fresh heads are identities and would hide errors
    noisy = jax.tree.map(lambda x: np.asarray(x) + 0.1 * noise.standard_normal(x.shape).astype(np.float32), fresh)
    return task, optimizer, shardings, fresh, noisy


def setup(mesh, config: TrainConfig):
    """As `prepared`, also for other micro-batches of a configuration; the noisy parameters may be donated."""
    one = dataclasses.replace(config, accumulation=1)
    task, optimizer, shardings, fresh, noisy = prepared(mesh, one)
    return task, optimizer, shardings, fresh, jax.tree.map(jax.device_put, noisy, task.param_shardings)


def run(file: Path, mesh, batches: list[dict], **changes) -> dict:
    """Take a step on each batch; write the arrays to the file and return metrics and shardings."""
    config = dataclasses.replace(CONFIG, **changes)
    task, optimizer, shardings, fresh, params = setup(mesh, config)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((fresh, task.frozen))] if mesh.size == 1 else []
    state = init_state(params, optimizer, shardings)
    base_before = jax.tree.map(np.asarray, task.frozen)
    step = make_train_step(task.loss, optimizer, config.accumulation, shardings, task.frozen_shardings)
    place, rng = batch_placer(mesh), jax.device_put(jax.random.key(7), shardings.step)
    step = step.lower(state, task.frozen, place(batches[0]), rng).compile()
    history, arrays = [], {}
    for i, batch in enumerate(batches):
        state, metrics = step(state, task.frozen, place(batch), rng)
        report = {k: np.asarray(v).tolist() for k, v in metrics.items()}
        history.append(report | {"step": int(state.step), "kept_bad_steps": int(state.bad_steps)})
        for kind in ("mu", "nu"):
            moments = by_path(getattr(state.opt_state[1][0], kind))
            arrays |= {f"{i}/{kind}/{k}": np.asarray(v) for k, v in moments.items()}
        arrays |= {f"{i}/params/{k}": np.asarray(v) for k, v in by_path(state.params).items()}
    np.savez(file, **arrays)
    unchanged = jax.tree.map(lambda a, b: np.array_equal(a, np.asarray(b), equal_nan=True), base_before, task.frozen)
    return {
        "history": history,
        "base_unchanged": all(jax.tree.leaves(unchanged)),
        "state_sizes": sorted(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim),
        "param_sizes": sorted(x.size for x in jax.tree.leaves(state.params)),
        "dtypes": sorted({str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim}),
        "split": {k: x.sharding.shard_shape(x.shape) != x.shape for k, x in by_path(state.params).items()},
        "same_place": same_place(state.opt_state, state.params),
        "distinct_buffers": len(set(pointers)) == len(pointers),
        "normed": sorted(set(re.findall(r"f32\[([\d,]+)\]\S* rsqrt\(", step.as_text()))),
    }


def divided_muon(mesh, params) -> dict:
    """Compare Muon's update with and without a division over the mesh, and a device's operations."""
    noise = np.random.default_rng(2)
    params = params["prefix"]  # seven matrices, three of them in one kernel
    grads = jax.tree.map(lambda x: jax.device_put(noise.standard_normal(x.shape).astype("f4"), x.sharding), params)
    updates, flops = [], []
    for home in (None, mesh):
        optimizer = make_optimizer(OptimizerConfig(name="muon", warmup_steps=0), 10, home)
        state = init_state(
            params, optimizer, state_shardings(mesh, params, jax.tree.map(lambda x: x.sharding, params), optimizer)
        )
        compiled = jax.jit(optimizer.update).lower(grads, state.opt_state, params).compile()
        updates.append(jax.device_get(compiled(grads, state.opt_state, params)[0]))
        flops.append(compiled.cost_analysis()["flops"])
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(a).max()), *updates)
    return {"gap": max(jax.tree.leaves(gaps)), "flops": flops}


def main(folder: Path, *meshes: str) -> None:
    HeadsTask._flops = lambda *_: 0.0  # counted by tracing once more, and not read here
    found, batches = {"devices": jax.device_count()}, make_batches()
    for name in meshes:
        data, model = map(int, name.split("x"))
        found[name] = run(folder / f"{name}.npz", make_mesh(data, model), batches[: 3 if data == model else 2])
    plain = draft_of(num_draft_heads=2)  # micro-batches and rounding do not depend on the kind of heads
    for parts in (1, 4):
        file = folder / f"parts{parts}.npz"
        found[f"parts{parts}"] = run(file, make_mesh(2, 2), batches[:1], draft=plain, accumulation=parts)
    found["bfloat16"] = run(folder / "bfloat16.npz", make_mesh(), batches[:2], draft=plain, dtype="bfloat16")

    mesh = make_mesh(4, 2)
    task, _, _, _, params = setup(mesh, CONFIG)
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(OptimizerConfig(name=name), 10)
        shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
        found[name] = {
            "init_state": same_place(init_state(params, optimizer, shardings).opt_state, params),
            "plain": same_place(jax.jit(optimizer.init)(params), params),
            "split": {k: x.sharding.shard_shape(x.shape) != x.shape for k, x in by_path(params).items()},
        }
    found["muon_divided"] = divided_muon(mesh, params)
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
