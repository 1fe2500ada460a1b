"""Calls of Python within a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax import ops

HOST = ops.host_calls()
pytestmark = pytest.mark.skipif(HOST is None, reason="the library is not built")


@jax.jit
def sums(entry, x, count):
    """Return x after the host has added its sum ``count`` times."""

    def step(carry):
        x, taken = carry
        (added,) = HOST.call_host(entry, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, taken)
        return added, taken + 1

    return jax.lax.while_loop(lambda carry: carry[1] < count, step, (x, jnp.int32(0)))[0]


X = np.array([1, 2], np.int32)


def test_a_loop_calls_the_host_in_every_step():
    seen = []

    def add(x, taken, result):
        seen.append(taken.view(np.int32).item())
        result.view(np.int32)[:] = x.view(np.int32) + x.view(np.int32).sum()

    for count in (3, 0, 1):  # one program, with functions at other addresses
        with HOST.calling(add) as (entry,):
            found = jax.block_until_ready(sums(entry, X, count))
        expected = X
        for _ in range(count):
            expected = expected + expected.sum()
        np.testing.assert_array_equal(found, expected)
    assert seen == [0, 1, 2, 0]


def test_an_error_of_the_host_ends_the_program():
    def fail(x, taken, result):
        if taken.view(np.int32).item() == 2:
            raise ValueError("step 2")

    with pytest.raises(ValueError, match="step 2"), HOST.calling(fail) as (entry,):
        jax.block_until_ready(sums(entry, X, 1000))


def test_a_function_that_is_gone_ends_the_program():
    with HOST.calling(lambda *arrays: None) as (entry,):
        pass
    with pytest.raises(jax.errors.JaxRuntimeError, match="hydrajax_call_host: the host's function has failed"):
        jax.block_until_ready(sums(entry, X, 1000))
