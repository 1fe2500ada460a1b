"""Compile a training step for described TPUs."""

from __future__ import annotations

import time

import described_tpu
import jax
import jax.numpy as jnp
import numpy as np
from compiled_step import Case, Compiled
from jax.sharding import Mesh

from hydrajax.bench.device_memory import nbytes
from hydrajax.bench.shapes import SHAPES
from hydrajax.errors import HydrajaxError
from hydrajax.models.init import abstract_base
from hydrajax.ops import trace
from hydrajax.sharding import AXES
from hydrajax.train.dry_run import abstract_run, abstract_task
from hydrajax.train.run_config import load_config, recipes
from hydrajax.train.train_step import batch_sharding, make_train_step

RECIPE = "hydra_pp"


def compile_train(case: Case) -> Compiled:
    """Compile a step of the recipe on ``case.batch`` rows of ``case.context`` tokens in one micro-batch.

    The devices share all weights. The bytes are those of the base, and of the state twice.

    Raises:
        HydrajaxError: XLA cannot print the program.
    """
    mesh = Mesh(np.array(described_tpu.devices_of(case.device, case.devices)).reshape(1, -1), **AXES)
    changes = {"model": "a-directory", "dtype": case.dtype, "batch_size": case.batch, "accumulation": 1}
    changes |= {"data.length": case.context, "mesh.model": case.devices}
    changes |= {} if case.quantize is None else {"quantize": case.quantize}
    config = load_config(recipes()[RECIPE], [f"{name}={value}" for name, value in changes.items()])
    shape = SHAPES[case.shape]
    shape = shape.replace(n_layers=case.layers or shape.n_layers)
    began = time.perf_counter()
    with (
        trace.tracing(platform=described_tpu.platform(case.device, case.devices)),
        described_tpu.described(case.device, case.devices),
    ):
        task = abstract_task(config, shape, mesh)
        optimizer, shardings, state = abstract_run(config, task, mesh)
        step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
        ids = jax.ShapeDtypeStruct((case.batch, case.context), jnp.int32, sharding=batch_sharding(mesh))
        rng = jax.eval_shape(lambda: jax.random.key(0))
        (frozen,) = described_tpu.placed_on(case.device, case.devices)(abstract_base(task.model))
        lowered = step.lower(state, frozen, dict.fromkeys(("tokens", "labels"), ids), rng)
        program = lowered.compile()
    moved = nbytes(frozen) + 2 * nbytes((state.params, state.opt_state))
    flops = int(task.flops_per_token * case.batch * case.context)
    seconds = time.perf_counter() - began
    try:
        hlo = program.as_text()
    except jax.errors.JaxRuntimeError as error:  # jaxlib 0.10 for a v6e: a collective behind products
        why = str(error).splitlines()[0]
        raise HydrajaxError(f"--what train: XLA compiled it for {case.device} and cannot print it: {why}") from error
    return Compiled(hlo, moved, flops, program.memory_analysis().temp_size_in_bytes, seconds)
