"""The sum of a loss over chunks of positions, and its gradient in the forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.train.chunks import sum_over_chunks

UNREAD = (7, 11)


def loss_of(params, x, targets):
    """Sum the squares of the gaps of two parts, of which one has a parameter of its own."""

    def first(params, x, targets, shared):
        gap = jnp.sum((x @ params["both"] - targets) ** 2)
        return shared * gap, gap

    def second(params, x, targets, shared):
        gap = jnp.sum((x @ params["both"] * params["second"] - targets) ** 2)
        return shared * gap, gap

    return sum_over_chunks([first, second], lambda scale, i: scale, params, [x, x], [targets, targets], 0.5)


def case():
    random = np.random.default_rng(0)
    params = {"both": random.standard_normal((4, 3)), "second": random.standard_normal(3), "other": np.ones(UNREAD)}
    x, targets = random.standard_normal((5, 2, 4)), random.standard_normal((5, 2, 3))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, x, targets))


def test_gradients_of_all_chunks():
    params, x, targets = case()

    def expected(params, x):
        product = x @ params["both"]
        return 0.5 * jnp.sum((product - targets) ** 2 + (product * params["second"] - targets) ** 2)

    ours = jax.value_and_grad(lambda *args: loss_of(*args, targets), (0, 1), has_aux=True)
    (value, _), found = jax.jit(ours)(params, x)
    wanted = jax.jit(jax.value_and_grad(expected, (0, 1)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), (value, found), wanted)


def test_parameters_that_no_part_reads_are_not_carried():
    """Their gradients are zeros, which would take memory and time in every chunk."""
    params, x, targets = case()
    program = jax.make_jaxpr(jax.grad(lambda params: loss_of(params, x, targets)[0]))(params)
    (loop,) = (one for one in program.eqns if one.primitive.name == "scan")
    shapes = [var.aval.shape for var in loop.outvars]
    assert params["both"].shape in shapes
    assert UNREAD not in shapes
