"""One optimizer step of any task, with micro-batches and sharding; non-finite steps are skipped."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from hydrajax.ops import trained_order
from hydrajax.ops.trace import tracing
from hydrajax.sharding import distribute, in_order, jit_on, laid_out, replicated

Batch = dict[str, Any]  # arrays with a leading batch axis


class TrainState(NamedTuple):
    """The state of a run between steps, all of which a checkpoint holds.

    Attributes:
        params: trained parameters, float32.
        opt_state: of the optimizer, each moment sharded like its parameter.
        step: int32 number of steps, skipped ones included; determines the data and the random numbers of the next.
        bad_steps: int32 number of steps in a row that were skipped for a non-finite loss or gradient.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    bad_steps: Int[Array, ""]


class Loss(Protocol):
    """A loss that is a sum over micro-batches."""

    def prepared(self, batch: Batch, rng: Array) -> Batch:
        """Return the whole batch with what the loss draws for each sequence."""
        del rng
        return batch

    def totals(self, batch: Batch) -> Any:
        """Return the target counts of the whole batch, by which its sums are divided."""

    def __call__(self, params, frozen, batch: Batch, totals, rng: Array, step: Array) -> tuple[Array, dict[str, Array]]:
        """Return a micro-batch's share of the batch's loss and metrics. ``step`` is the state's, for schedules."""


def init_state(params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Return the state before the first step, with sharded moments: a plain ``jit(optimizer.init)`` replicates them."""
    params = laid_out(params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    zero = np.zeros((), np.int32)
    return TrainState(params, opt_state, distribute(zero, shardings.step), distribute(zero, shardings.bad_steps))


def abstract_state(params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Return the state as sharded `jax.ShapeDtypeStruct`, from abstract or real parameters, without allocating it."""
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), zero, zero)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def state_shardings(mesh: Mesh, params, param_shardings, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the shardings of the state: moments like their parameter, counters replicated.

    On a TPU they include the order of a kernel's axes in memory (`hydrajax.ops.trained_order`).

    A moment's path ends in its parameter's path, whatever transformations wrap it.
    (`optax.tree_utils.tree_map_params` does not see through `optax.partition`, which Muon uses.)
    """
    everywhere = replicated(mesh)
    shapes = {tuple(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    param_shardings = jax.tree.map(lambda x, home: in_order(home, trained_order(x.shape)), params, param_shardings)
    homes = {tuple(path): home for path, home in jax.tree.leaves_with_path(param_shardings)}

    def home(path, leaf):
        endings = (tuple(path[start:]) for start in range(len(path)))
        return next((homes[end] for end in endings if shapes.get(end) == leaf.shape), everywhere)

    moments = jax.tree.map_with_path(home, jax.eval_shape(optimizer.init, params))
    return TrainState(param_shardings, moments, everywhere, everywhere)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: sequences over the ``data`` axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def batch_placer(mesh: Mesh) -> Callable[[dict[str, np.ndarray]], Batch]:
    """Return a function that puts a batch of host arrays, complete in every process, on the mesh."""
    sharding = batch_sharding(mesh)
    return lambda batch: {name: distribute(array, sharding) for name, array in batch.items()}


def at_precision(matmul_precision: str | None) -> AbstractContextManager[None]:
    """Trace matmuls with `jax.default_matmul_precision`; None: JAX's setting."""
    return jax.default_matmul_precision(matmul_precision) if matmul_precision else nullcontext()


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    accumulation: int,
    shardings: TrainState,
    frozen_shardings,
    matmul_precision: str | None = None,
) -> Callable:
    """Return a jitted ``step(state, frozen, batch, rng) -> (state, metrics)``, which donates ``state``.

    ``batch`` is a dict of arrays ``[B, ...]`` sharded over ``data``. ``metrics`` are ``loss``, the global ``grad_norm``
    before clipping, ``bad_steps`` and what the loss reports. A step whose loss or gradient is not finite changes only
    the counters.

    Args:
        accumulation: number of micro-batches, which divides B. Their gradients are summed in float32 and equal the
            whole batch's.
        shardings, frozen_shardings: of the state and of ``frozen``.
        matmul_precision: of the loss, its gradient and Muon, see `jax.default_matmul_precision`. None: JAX's setting.
    """

    def gradients(params, frozen, batch, rng, step):
        batch = loss.prepared(batch, rng)
        totals = loss.totals(batch)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        if accumulation == 1:
            return value_and_grad(params, frozen, batch, totals, rng, step)
        # Sequence i goes to micro-batch i mod A, so that it stays on its device.
        micro_batches = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(sums, indexed):
            index, micro_batch = indexed
            out = value_and_grad(params, frozen, micro_batch, totals, jax.random.fold_in(rng, index), step)
            return jax.tree.map(jnp.add, sums, out), None

        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(value_and_grad, params, frozen, first, totals, rng, step)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, (jnp.arange(accumulation), micro_batches))[0]

    def step(state: TrainState, frozen, batch: Batch, rng):
        with at_precision(matmul_precision), tracing(sharded_tokens=True):
            key = jax.random.fold_in(rng, state.step)
            (value, metrics), grads = gradients(state.params, frozen, batch, key, state.step)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
        metrics = metrics | {"loss": value, "grad_norm": grad_norm, "bad_steps": bad_steps}
        return TrainState(params, opt_state, state.step + 1, bad_steps), metrics

    everywhere = shardings.step
    return jit_on(
        everywhere.mesh,
        step,
        in_shardings=(shardings, frozen_shardings, batch_sharding(everywhere.mesh), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
