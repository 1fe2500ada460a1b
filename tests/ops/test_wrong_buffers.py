"""Foreign calls refuse buffers of another dtype or size instead of reading beyond them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.ops.cpu import backend as cpu
from hydrajax.ops.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler")

F32, S32, S8 = jnp.float32, jnp.int32, jnp.int8
INT8_VECTORS = [((2, 2, 3, 16), S8), ((2, 2, 3, 1), F32)]
# Results and arguments that fit: 2 sequences of 3 tokens, 4 heads, 2 of keys and values, of 16 features.
FITS = {
    "matmul": ([((3, 4), F32)], [((3, 8), F32), ((8, 4), F32)]),
    "matmul_transposed": ([((3, 4), F32)], [((3, 8), F32), ((4, 8), F32)]),
    "matmul_experts": ([((6, 4), F32)], [((3, 8), F32), ((3, 2), S32), ((5, 8, 4), F32)]),
    "matmul_few_bits": ([((3, 64), F32)], [((3, 32), F32), ((1, 1, 2048), S8), ((1, 1, 64), F32)]),
    "matmul_few_bits_experts": (
        [((6, 64), F32)],
        [((3, 32), F32), ((3, 2), S32), ((5, 1, 1, 2048), S8), *[((5, 1, 1, 64), jnp.float16)] * 2],
    ),
    "likeliest": ([((3, 4), S32), ((3, 4), F32)], [((3, 8), F32)]),
    "add_norm": ([((3, 8), F32)] * 2, [((3, 8), F32), ((8,), F32), ((3, 8), F32)]),
    "attend": ([((2, 3, 64), F32)], [((2, 4, 3, 16), F32), *[((2, 2, 5, 16), F32)] * 2, ((2, 3, 5), bool)]),
    "attend sinks": (
        [((2, 3, 64), F32)],
        [((2, 4, 3, 16), F32), *[((2, 2, 5, 16), F32)] * 2, ((2, 3, 5), bool), ((4,), F32)],
    ),
    "attend int8": ([((2, 3, 64), F32)], [((2, 4, 3, 16), F32), *INT8_VECTORS * 2, ((2, 3, 3), bool)]),
    "append_rows": ([*INT8_VECTORS], [((2, 3), S32), ((2,), S32), *INT8_VECTORS * 2]),
}


def call(name: str, results, arguments):
    settings = {"eps": np.float32(1e-5)} if name == "add_norm" else {}
    out = tuple(jax.ShapeDtypeStruct(*one) for one in results)
    aliases = {2: 0, 3: 1} if name == "append_rows" else None
    target = jax.ffi.ffi_call(f"hydrajax_{name.split()[0]}", out, input_output_aliases=aliases)
    program = jax.jit(lambda *given: target(*given, **settings))
    return jax.block_until_ready(program(*(np.ones(*one) for one in arguments)))


@pytest.mark.parametrize("name", FITS)
def test_a_wrong_buffer_is_an_error(name):
    """One buffer has one more entry along an axis, or other numbers."""
    call(name, *FITS[name])
    for which, arrays in enumerate(FITS[name]):
        for number, (shape, dtype) in enumerate(arrays):
            # Any number of experts fits, and any vocabulary.
            logits = name == "likeliest" and which == 1
            axes = range(name == "matmul_experts" and len(shape) == 3, len(shape) - logits)
            larger = [(tuple(n + (i == axis) for i, n in enumerate(shape)), dtype) for axis in axes]
            for other in [*larger, (shape, jnp.int16)]:
                given = [list(each) for each in FITS[name]]
                given[which][number] = other
                # JAX itself compares caches with the results that are written in their place.
                with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"INVALID_ARGUMENT|aliases"):
                    call(name, *given)


def test_an_entry_of_the_host_has_three_words():
    for words in (0, 2, 4):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the entry is not as declared"):
            call("call_host", [((2,), F32)], [((words,), jnp.uint32)])


def test_tokens_outside_a_block_are_the_nearest():
    cache, block = jnp.zeros((1, 1, 4, 1)), jnp.array([5.0, 6, 7]).reshape(1, 1, 3, 1)
    (found,) = cpu.append_rows([cache], [block], jnp.array([[-9, 1, 99]]), jnp.array([0]))
    assert found.ravel().tolist() == [5, 6, 7, 0]
