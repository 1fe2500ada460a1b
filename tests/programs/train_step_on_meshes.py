"""Take train steps on one device and on eight; report metrics and shardings.

The last of three batches has a token whose embedding is NaN. Moments and parameters after each step go to
``{run}.npz``. Arguments: the folder for these and ``answer.json``; the task, ``heads`` or ``joint``.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from helpers.leaves import by_path
from helpers.programs import answer
from hydrajax.models.adapter import Adapter
from hydrajax.models.init import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh, tree_shardings
from hydrajax.train.checkpoints import TrainCheckpoints
from hydrajax.train.losses import Objective
from hydrajax.train.optimizer import make_optimizer, optimizer_of
from hydrajax.train.run_config import DataConfig, JointConfig, OptimizerConfig, TrainConfig, draft_of
from hydrajax.train.tasks.heads_task import HeadsTask
from hydrajax.train.tasks.joint_task import JointTask
from hydrajax.train.train_step import batch_placer, init_state, make_train_step, state_shardings

SHAPE = LlamaConfig(64, 32, 64, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=4, max_positions=64)
HEADS = TrainConfig(
    output="unused",
    model="unused",
    dtype="float32",
    steps=10,
    batch_size=16,
    tree="chain-1",
    draft=draft_of(num_draft_heads=1, prefix=True),
    objective=Objective(lm_weight=0.5, chunk_tokens=32),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    data=DataConfig(format="standard_library", length=16),
)
DROPOUT = dataclasses.replace(HEADS, draft=draft_of(heads="medusa", num_draft_heads=1, dropout=0.2))
JOINT = dataclasses.replace(
    HEADS,
    task="joint",
    draft=draft_of(heads="medusa", num_draft_heads=2),
    adapter=Adapter(4, 8.0, 0.1),
    joint=JointConfig(distill=True),
    objective=Objective(lm_weight=1.0, teacher_weight=0.0, chunk_tokens=32),
)
CONFIGS = {"heads": HEADS, "joint": JOINT}
POISON = SHAPE.vocab_size - 1  # a token whose embedding is NaN, only in the last batch of a run


def make_batches() -> list[dict]:
    random = np.random.default_rng(0)
    tokens = random.integers(1, POISON, (3, 16, 16)).astype(np.int32)
    labels = np.where(random.random(tokens.shape) < 0.6, tokens, -100)
    labels[:, :3] = tokens[:, :3]  # sequences and micro-batches have different numbers of targets
    tokens[2, 5, 7] = POISON
    return [{"tokens": t, "labels": wanted} for t, wanted in zip(tokens, labels, strict=True)]


def drawn(shapes, homes, seed: int, dtype="float32"):
    """Return sharded noise: fresh heads are identities and would hide errors."""
    random = np.random.default_rng(seed)

    def draw(x, home):
        noise = random.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1) + (x.ndim == 1)
        return jax.device_put(noise.astype(np.float32).astype(dtype), home)

    return jax.tree.map(draw, shapes, homes)


def setup(mesh, config: TrainConfig):
    """Return the task on a random base, and random parameters."""
    model = Llama(SHAPE, jnp.dtype(config.dtype))
    shapes = jax.eval_shape(lambda: init_base(model, jax.random.key(0)))
    base = drawn(shapes, tree_shardings(mesh, abstract_base(model)), 1, config.dtype)
    base["embedding"] = jax.device_put(base["embedding"].at[POISON].set(jnp.nan), base["embedding"].sharding)
    task = (JointTask if config.task == "joint" else HeadsTask)(config, None, model, base, mesh)
    return task, drawn(task.abstract_params, task.param_shardings, 2)


def is_split(tree) -> dict[str, bool]:
    return {name: x.sharding.shard_shape(x.shape) != x.shape for name, x in by_path(tree).items()}


def same_place(tree, params) -> dict[str, bool]:
    """Compare the sharding of every array named like a parameter with that of the parameter."""
    found, homes = {}, by_path(params)
    for name, leaf in by_path(tree).items():
        for home in (x for end, x in homes.items() if name.endswith("/" + end)):
            found[name] = bool(leaf.sharding.is_equivalent_to(home.sharding, leaf.ndim))
    return found


def run(file: Path, mesh, batches: list[dict], config: TrainConfig):
    """Take a step on each batch and write the arrays to the file; return metrics and shardings."""
    task, params = setup(mesh, config)
    optimizer = optimizer_of(config, 10)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
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
        for name, x in by_path(state.opt_state).items():
            if moment := re.search("/((mu|nu)/.*)", name):
                arrays[f"{i}/{moment[1]}"] = np.asarray(x)
        arrays |= {f"{i}/params/{k}": np.asarray(v) for k, v in by_path(state.params).items()}
    np.savez(file, **arrays)
    unchanged = jax.tree.map(lambda a, b: np.array_equal(a, np.asarray(b), equal_nan=True), base_before, task.frozen)
    return {
        "history": history,
        "base_unchanged": all(jax.tree.leaves(unchanged)),
        "state_sizes": sorted(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim),
        "param_sizes": sorted(x.size for x in jax.tree.leaves(state.params)),
        "dtypes": sorted({str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim}),
        "split": is_split(state.params),
        "same_place": same_place(state.opt_state, state.params),
        "normed": sorted(set(re.findall(r"f32\[([\d,]+)\]\S* rsqrt\(", step.as_text()))),
    }


def divided_muon(mesh, params) -> dict:
    """Compare Muon's update with and without a division over the mesh, and a device's operations."""
    grads = drawn(params, jax.tree.map(lambda x: x.sharding, params), 2)
    updates, flops = [], []
    for home in (None, mesh):
        optimizer = make_optimizer(OptimizerConfig(name="muon", warmup_steps=0), 10, home)
        shardings = state_shardings(mesh, params, jax.tree.map(lambda x: x.sharding, params), optimizer)
        state = init_state(params, optimizer, shardings)
        compiled = jax.jit(optimizer.update).lower(grads, state.opt_state, params).compile()
        updates.append(jax.device_get(compiled(grads, state.opt_state, params)[0]))
        flops.append(compiled.cost_analysis()["flops"])
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(a).max()), *updates)
    return {"gap": max(jax.tree.leaves(gaps)), "flops": flops}


def moments(mesh, task, params, name: str) -> dict:
    """Report the places of the moments of `init_state`, and of those that XLA would choose."""
    optimizer = make_optimizer(OptimizerConfig(name=name), 10)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    return {
        "init_state": same_place(init_state(params, optimizer, shardings).opt_state, params),
        "plain": same_place(jax.jit(optimizer.init)(params), params),
        "split": is_split(params),
    }


def restored(folder: Path) -> bool:
    """Save an array on a mesh and compare it, restored on others."""
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    homes = [
        NamedSharding(make_mesh(*sizes), PartitionSpec(*axes))
        for sizes, axes in (((8, 1), ("data",)), ((4, 2), ("model", "data")), ((2, 1), (None, "data")), ((1, 1), ()))
    ]
    same = []
    with TrainCheckpoints(folder, keep=1, higher_is_better=True) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(x, homes[0])}, {})
        for home in homes:
            y = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)})[1]["x"]
            same.append(y.sharding == home and np.array_equal(x, y))
    return all(same)


def main(folder: Path, task: str) -> dict:
    found, batches, mesh = {}, make_batches(), make_mesh(4, 2)
    parts = {"accumulation": 2} if task == "heads" else {}
    runs = {"one": (make_mesh(), CONFIGS[task]), "eight": (mesh, dataclasses.replace(CONFIGS[task], **parts))}
    if task == "heads":
        runs |= {"dropout_one": (make_mesh(), DROPOUT), "dropout_eight": (mesh, DROPOUT)}
        runs["bfloat16"] = make_mesh(), dataclasses.replace(DROPOUT, dtype="bfloat16")
    for name, (home, config) in runs.items():
        found[name] = run(folder / f"{name}.npz", home, batches[: 3 if name == "dropout_one" else 2], config)
    if task == "heads":
        task, params = setup(mesh, HEADS)
        found |= {name: moments(mesh, task, params, name) for name in ("adamw", "muon")}
        attention = {name: params["prefix"]["layer"][name] for name in ("qkv", "out")}
        found["muon_divided"] = divided_muon(mesh, attention)  # four matrices, three of them in one kernel
        task, _ = setup(make_mesh(), DROPOUT)
        fresh = jax.tree.leaves((task.init_params(jax.random.key(1)), task.frozen))
        found["distinct_buffers"] = len({x.unsafe_buffer_pointer() for x in fresh}) == len(fresh)
        found["restored"] = restored(folder / "checkpoints")
    return found


if __name__ == "__main__":
    HeadsTask._flops = JointTask._flops = lambda *_: 0.0  # counted by tracing once more, and not read here
    answer(main)
