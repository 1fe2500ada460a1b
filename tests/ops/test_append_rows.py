"""Compare the kernels that write accepted rows, the GPU's interpreted on the CPU, with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax import ops
from hydrajax.ops import trace
from hydrajax.ops.gpu.append_rows import append_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_the_chosen_rows_only(dtype):
    rng = np.random.default_rng(0)
    caches = [rng.normal(size=(2, 3, 64, 16)).astype(jnp.dtype(dtype)) for _ in range(4)]
    blocks = [rng.normal(size=(2, 3, 9, 16)).astype(jnp.dtype(dtype)) for _ in range(4)]
    index, starts = np.array([[0, 4, 8, 8], [0, 0, 1, 2]], np.int32), np.array([0, 60], np.int32)
    found = jax.jit(lambda *args: append_rows(*args, interpret=True))(caches, blocks, index, starts)
    plain = jax.jit(ops.append_rows)(caches, blocks, index, starts)
    for cache, block, one, other in zip(caches, blocks, found, plain, strict=True):
        want = cache.copy()
        want[0, :, 0:4], want[1, :, 60:64] = block[0][:, index[0]], block[1][:, index[1]]
        np.testing.assert_array_equal(one, want)
        np.testing.assert_array_equal(other, want)


@pytest.mark.skipif(not trace.has_cpu_kernels(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.parametrize("batch", [1, 3])
def test_on_a_cpu_a_bfloat16_cache_is_written_in_place(batch):
    """XLA's own update of a bfloat16 array converts the whole of it to float32 and back."""
    slots, tokens = 48, 5
    starts = np.arange(batch, dtype=np.int32) * 7
    index = np.tile(np.array([0, 2, 2], np.int32), (batch, 1))

    def run(cache, block):
        def step(i, cache):
            return ops.append_rows([cache], [block + i], index, starts + i)[0]

        return jax.lax.fori_loop(0, 4, step, cache)

    cache = jnp.ones((batch, 2, slots, 16), jnp.bfloat16)
    block = jnp.arange(batch * 2 * tokens * 16, dtype=jnp.bfloat16).reshape(batch, 2, tokens, 16) / 64
    compiled = jax.jit(run, donate_argnums=0).lower(cache, block).compile()
    whole = f"[{batch},2,{slots},16]"
    assert f"f32{whole}" not in compiled.as_text()
    assert not [line for line in compiled.as_text().splitlines() if f"bf16{whole}" in line and " copy(" in line]
    want = np.asarray(cache).copy()
    for i in range(4):
        for b in range(batch):
            want[b, :, starts[b] + i : starts[b] + i + 3] = np.asarray(block + i)[b][:, index[b]]
    np.testing.assert_array_equal(compiled(cache, block), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_takes_the_rows_by_an_exact_product(dtype):
    rng = np.random.default_rng(2)
    cache = np.zeros((2, 3, 16, 8), jnp.dtype(dtype))
    block = (rng.normal(size=(2, 3, 9, 8)) * 10.0 ** rng.integers(-20, 20, (2, 3, 9, 8))).astype(jnp.dtype(dtype))
    index, starts = np.array([[0, 4, 8, 8], [0, 0, 1, 2]], np.int32), np.array([0, 12], np.int32)
    with trace.tracing(platform=trace.Platform("tpu", 1)):
        program = jax.jit(lambda *args: ops.append_rows([args[0]], [args[1]], *args[2:])).lower(
            cache, block, index, starts
        )
    assert "dot_general" in program.as_text()
    (found,) = program.compile()(cache, block, index, starts)
    np.testing.assert_array_equal(found[0, :, :4], block[0][:, index[0]])
    np.testing.assert_array_equal(found[1, :, 12:], block[1][:, index[1]])


def test_a_write_that_does_not_fit_is_moved_as_by_xla():
    cache, block = np.zeros((1, 1, 8, 16), np.float32), np.ones((1, 1, 3, 16), np.float32)
    (found,) = ops.append_rows([cache], [block], None, np.array([7], np.int32))
    np.testing.assert_array_equal(np.asarray(found)[0, 0, :, 0], [0, 0, 0, 0, 0, 1, 1, 1])
