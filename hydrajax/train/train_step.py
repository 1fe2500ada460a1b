"""One optimizer step, the same for whatever is trained: micro-batches, finite or skipped, sharded in and out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from hydrajax.sharding import distribute, replicated

Batch = dict[str, Any]  # arrays with a leading batch axis


class TrainState(NamedTuple):
    """All that a run carries from step to step, and all that a checkpoint must hold.

    params:    what is trained, float32.
    opt_state: of the optimizer, each moment sharded like its parameter.
    step:      int32 steps taken, skipped ones included: the position in the data and in the random stream.
    bad_steps: int32 steps in a row that were skipped because the loss or the gradient was not finite.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    bad_steps: Int[Array, ""]


class Loss(Protocol):
    """What is minimised, as a sum over micro-batches."""

    def totals(self, batch: Batch) -> Any:
        """How many targets the whole batch has: what its sums are divided by."""

    def __call__(self, params, frozen, batch: Batch, totals, rng: Array, step: Array) -> tuple[Array, dict[str, Array]]:
        """This micro-batch's share of the loss and of every metric: added over micro-batches they are the batch's.

        step: int32, of the state before it, for what changes in the course of a run.
        """


def init_state(params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """The state before the first step. Moments are born sharded: a plain ``jit(optimizer.init)`` replicates them."""
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    zero = np.zeros((), np.int32)
    return TrainState(params, opt_state, distribute(zero, shardings.step), distribute(zero, shardings.bad_steps))


def abstract_state(params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """The state as `jax.ShapeDtypeStruct` with shardings, from abstract (or real) parameters; nothing is allocated."""
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), zero, zero)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def state_shardings(mesh: Mesh, params, param_shardings, optimizer: optax.GradientTransformation) -> TrainState:
    """Where every leaf of the state lives: moments with their parameter, counters everywhere.

    A moment is found by its path, which ends in its parameter's whichever transformations it is wrapped in
    (`optax.tree_utils.tree_map_params` does not see through `optax.partition`, on which Muon rests).
    """
    everywhere = replicated(mesh)
    shapes = {tuple(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    homes = {tuple(path): home for path, home in jax.tree.leaves_with_path(param_shardings)}

    def home(path, leaf):
        endings = (tuple(path[start:]) for start in range(len(path)))
        return next((homes[end] for end in endings if shapes.get(end) == leaf.shape), everywhere)

    moments = jax.tree.map_with_path(home, jax.eval_shape(optimizer.init, params))
    return TrainState(param_shardings, moments, everywhere, everywhere)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the ``data`` axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def batch_placer(mesh: Mesh) -> Callable[[dict[str, np.ndarray]], Batch]:
    """Puts a batch of host arrays, whole in every process, on the mesh."""
    rows = batch_sharding(mesh)
    return lambda batch: {name: distribute(array, rows) for name, array in batch.items()}


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    accumulation: int,
    shardings: TrainState,
    frozen_shardings,
    matmul_precision: str | None = None,
) -> Callable:
    """``step(state, frozen, batch, rng) -> (state, metrics)``, jitted; ``state`` is donated, ``frozen`` only read.

    batch:   dict of arrays ``[B, ...]`` sharded over ``data``; B a multiple of ``accumulation``.
    metrics: ``loss``, the global ``grad_norm`` before clipping, and what the loss reports.

    matmul_precision: of the loss and its gradient, see `jax.default_matmul_precision`; None for what it is set to.

    Gradients of ``accumulation`` micro-batches are added in float32 and equal the whole batch's. A step whose loss or
    gradient is not finite changes nothing but the counters.
    """

    def gradients(params, frozen, batch, rng, step):
        totals = loss.totals(batch)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        if accumulation == 1:
            return value_and_grad(params, frozen, batch, totals, rng, step)
        # Row i goes to micro-batch i mod A, so that each keeps its rows on the devices where they are.
        parts = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)

        def add_part(sums, part_and_index):
            part, index = part_and_index
            out = value_and_grad(params, frozen, part, totals, jax.random.fold_in(rng, index), step)
            return jax.tree.map(jnp.add, sums, out), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(value_and_grad, params, frozen, first, totals, rng, step)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add_part, zeros, (parts, jnp.arange(accumulation)))[0]

    def step(state: TrainState, frozen, batch: Batch, rng):
        with jax.default_matmul_precision(matmul_precision) if matmul_precision else nullcontext():
            key = jax.random.fold_in(rng, state.step)
            (value, metrics), grads = gradients(state.params, frozen, batch, key, state.step)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
        metrics = metrics | {"loss": value, "grad_norm": grad_norm, "bad_steps": bad_steps}
        return TrainState(params, opt_state, state.step + 1, bad_steps), metrics

    everywhere = shardings.step
    return jax.jit(
        step,
        in_shardings=(shardings, frozen_shardings, batch_sharding(everywhere.mesh), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
