"""Take steps of joint training on one device and on a mesh of eight; report metrics and the sharded arrays.

The first moments after the first step go to ``{one,eight}.npz``. Argument: the folder for these and ``answer.json``.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from helpers.leaves import by_path
from hydrajax.models.adapter import Adapter
from hydrajax.models.base_model import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh, tree_shardings
from hydrajax.train.losses import Objective
from hydrajax.train.optimizer import optimizer_of
from hydrajax.train.run_config import DataConfig, JointConfig, OptimizerConfig, TrainConfig, draft_of
from hydrajax.train.tasks.joint_task import JointTask
from hydrajax.train.train_step import batch_placer, init_state, make_train_step, state_shardings

SHAPE = LlamaConfig(64, 32, 64, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=4, max_positions=64)
CONFIG = TrainConfig(
    output="unused",
    task="joint",
    model="unused",
    dtype="float32",
    steps=10,
    batch_size=8,
    tree="cartesian-2x2",
    draft=draft_of(heads="medusa", num_draft_heads=2),
    adapter=Adapter(4, 8.0, 0.1),
    joint=JointConfig(distill=True),
    objective=Objective(lm_weight=1.0, teacher_weight=0.0, chunk_tokens=32),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    data=DataConfig(format="standard_library", length=16),
)


def run(mesh, batches) -> tuple[list[dict], dict, dict]:
    """Take a step on each batch; return its metrics, which arrays are sharded, and moments after the first step."""
    model = Llama(SHAPE)
    homes = tree_shardings(mesh, abstract_base(model))
    base = jax.tree.map(
        lambda x, home: jax.device_put(8 * x if x.ndim > 1 else x, home), init_base(model, jax.random.key(3)), homes
    )
    task, optimizer = JointTask(CONFIG, None, model, base, mesh), optimizer_of(CONFIG, 10)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    noise = np.random.default_rng(2)  # B starts at zero, so A has no gradient in the first step

    def noisy(x):
        return jax.device_put(np.asarray(x) + 0.1 * noise.standard_normal(x.shape).astype(np.float32), x.sharding)

    state = init_state(jax.tree.map(noisy, task.init_params(jax.random.key(1))), optimizer, shardings)
    step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
    place, key, history = batch_placer(mesh), jax.device_put(jax.random.key(7), shardings.step), []
    for rows in batches:
        state, report = step(state, task.frozen, place({"tokens": rows, "labels": rows}), key)
        history.append({name: np.asarray(value).tolist() for name, value in report.items()})
        if len(history) == 1:
            moments = {name: np.asarray(x) for name, x in by_path(state.opt_state).items() if "/mu/" in name}
    placed = {name: x for name, x in by_path(state.opt_state).items() if "/mu/" in name}
    split = {name: x.sharding.shard_shape(x.shape) != x.shape for name, x in (by_path(state.params) | placed).items()}
    return history, split, moments


def main(folder: Path) -> None:
    batches = np.random.default_rng(0).integers(1, 64, (3, 8, 16)).astype(np.int32)
    found = {"devices": jax.device_count()}
    for name, mesh in (("one", make_mesh()), ("eight", make_mesh(4, 2))):
        history, split, moments = run(mesh, batches)
        found[name] = {"history": history, "split": split}
        np.savez(folder / f"{name}.npz", **moments)
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
