"""Compile a training step for described TPUs."""

from __future__ import annotations

import time

import described_tpu
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from compiled_step import Case, Compiled
from jax.experimental import topologies
from jax.sharding import Mesh

from hydrajax.measure.device_memory import nbytes
from hydrajax.measure.shapes import SHAPES
from hydrajax.models import platforms, products
from hydrajax.models.base_model import abstract_base
from hydrajax.sharding import AXES, in_order
from hydrajax.train.dry_run import abstract_run, abstract_task
from hydrajax.train.run_config import load_config, recipes
from hydrajax.train.train_step import batch_sharding, make_train_step

RECIPE = "hydra_pp"


def compile_train(case: Case) -> Compiled:
    """Compile a step of the recipe on ``case.batch`` rows of ``case.context`` tokens in one micro-batch.

    The devices share all weights. The bytes are those of the base, and of the state twice.
    """
    chip = described_tpu.CHIPS[case.device]
    topology = chip.topology if case.devices == 1 else chip.eight
    devices = topologies.get_topology_desc(f"{case.device}:{topology}", "tpu").devices[: case.devices]
    mesh = Mesh(np.array(devices).reshape(1, -1), **AXES)
    changes = {"model": "a-directory", "dtype": case.dtype, "batch_size": case.batch, "accumulation": 1}
    changes |= {"data.length": case.context, "mesh.model": case.devices}
    config = load_config(recipes()[RECIPE], [f"{name}={value}" for name, value in changes.items()])
    shape = SHAPES[case.shape]
    shape = shape.replace(n_layers=case.layers or shape.n_layers)
    began = time.perf_counter()
    with (
        platforms.traced_for(described_tpu.platform(case.device, case.devices)),
        described_tpu.described(case.device, case.devices),
    ):
        task = abstract_task(config, shape, mesh)
        optimizer, shardings, state = abstract_run(config, task, mesh)
        step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
        ids = jax.ShapeDtypeStruct((case.batch, case.context), jnp.int32, sharding=batch_sharding(mesh))
        rng = jax.eval_shape(lambda: jax.random.key(0))
        frozen = jax.tree.map(_stored, abstract_base(task.model), task.frozen, is_leaf=_is_boxed)
        lowered = step.lower(state, frozen, dict.fromkeys(("tokens", "labels"), ids), rng)
        program = lowered.compile()
    moved = nbytes(frozen) + 2 * nbytes((state.params, state.opt_state))
    flops = int(task.flops_per_token * case.batch * case.context)
    seconds = time.perf_counter() - began
    return Compiled(program.as_text(), moved, flops, program.memory_analysis().temp_size_in_bytes, seconds)


def _stored(box: nn.LogicallyPartitioned, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    home = in_order(x.sharding, products.stored_order(x.shape, x.dtype, box.names))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)


def _is_boxed(x) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)
