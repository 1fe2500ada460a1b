"""Decode functions inside other programs: steps of one's own, transformations, exports, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hydrajax
from helpers.lab import VOCAB
from helpers.programs import ENVIRONMENT
from helpers.refusals import refusal
from hydrajax.api import make_decode_fn
from hydrajax.decoding.state import Params
from hydrajax.lowbit.kernels import few_bits
from hydrajax.ops import trace
from hydrajax.ops.cpu import experts

NEW = 8
PROMPT = jnp.asarray(np.random.default_rng(7).integers(0, VOCAB, (2, 16)), jnp.int32)
LENGTHS = jnp.array([16, 5])
KEYS = jax.random.split(jax.random.key(3), 2)


def made(lab, name: str = "lookup", rule=None, **keywords):
    tree = lab.drafters[name].spec.default_tree if name.startswith("corpus") else "chain-2"
    decode_fn = make_decode_fn(lab.model, lab.drafters[name], tree, rule, max_new_tokens=NEW, **keywords)
    return decode_fn, Params(lab.base(0), lab.draft(name, 0))


@pytest.mark.quick("model-exact")
@pytest.mark.parametrize("rule", ["greedy", "exact"])
@pytest.mark.parametrize("drafter", ["lookup", "model", "corpus with hydra"])
def test_steps_of_ones_own(lab, drafter, rule):
    """More steps than are needed, in a loop and donated one by one, give the result of the whole function."""
    decode_fn, params = made(lab, drafter, rule)

    def own(params, prompt, lengths, keys):
        state = decode_fn.prefill(params, prompt, lengths, keys, limits=jnp.array([NEW, 3]))
        final = jax.lax.fori_loop(0, NEW + 2, lambda _, state: decode_fn.decode_step(params, state), state)
        return state, decode_fn.result(final)

    given = params, PROMPT, LENGTHS, KEYS
    state, found = lab.quick_jit(own)(*given)
    expected = lab.quick_jit(decode_fn)(*given, limits=jnp.array([NEW, 3]))
    assert expected.lengths.tolist() == [NEW, 3]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    if drafter == "model":
        step = lab.quick_jit(decode_fn.decode_step, donate_argnums=1)
        for _ in range(NEW):
            before, state = state, step(params, state)
            assert before.target.cache.lengths.is_deleted()
        jax.tree.map(np.testing.assert_array_equal, decode_fn.result(state), expected)
        assert not KEYS.is_deleted()


def test_transformations_trace(lab):
    """Trace through our kernels, NumPy on the host and 64-bit mode. The page compares tokens."""
    decode_fn, params = made(lab)
    of_limits = jax.vmap(lambda limits: decode_fn(params, PROMPT, limits=limits))
    assert jax.eval_shape(of_limits, jnp.ones((3, 2), jnp.int32)).tokens.shape == (3, 2, NEW)

    def of_tokens(base):
        return decode_fn(Params(base, {}), PROMPT).tokens.sum() * base["norm"]["scale"].sum()

    assert jax.eval_shape(jax.grad(of_tokens), params.base).keys() == params.base.keys()

    def steps(prompt):
        state = decode_fn.decode_step(params, decode_fn.prefill(params, prompt))
        return decode_fn.result(state), decode_fn(params, prompt)

    with jax.enable_x64(True):
        out = jax.eval_shape(steps, np.asarray(PROMPT, np.int64))
    assert {str(x.dtype) for x in jax.tree.leaves(out)} == {"int32"}


def test_refusals(lab):
    decode_fn, params = made(lab)
    with_logprobs, _ = made(lab, logprobs=0)

    def loss(base):
        return with_logprobs(Params(base, {}), PROMPT).logprobs.sum()

    for differentiate in (jax.grad(loss), jax.grad(jax.jit(loss)), jax.grad(jax.checkpoint(loss))):
        refusal(partial(differentiate, params.base), "logprobs: have no gradient; pass jax.lax.stop_gradient(params)")
    jax.eval_shape(jax.grad(lambda base: loss(jax.lax.stop_gradient(base))), params.base)
    exporting = export.export(jax.jit(partial(decode_fn, params)))
    for shape in ("2, t", "b, 16"):
        symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.int32)
        refusal(partial(exporting, symbolic), f"prompt: got the symbolic shape ({shape}), expected integers: export")
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    on_rows = partial(jax.shard_map, partial(decode_fn, params), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    refusal(partial(on_rows(), PROMPT), "shard_map: got check_vma=True, expected jax.shard_map(..., check_vma=False)")
    explicit = jax.sharding.NamedSharding(jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,)), P("rows"))
    placed = jax.device_put(PROMPT, explicit)
    for call in (decode_fn, jax.jit(decode_fn), decode_fn.prefill):
        refusal(partial(call, params, placed), "mesh: got int32[2@rows,16] over Explicit axes")


@pytest.mark.skipif(not trace.has_cpu_kernels(), reason="the CPU kernels were not built, or several devices")
def test_kernels_of_experts_under_vmap():
    rng = np.random.default_rng(0)
    x, chosen = rng.normal(size=(3, 2, 32)).astype(np.float32), rng.integers(0, 4, (3, 2, 2), np.int32)
    weight, tiles = rng.normal(size=(4, 32, 64)).astype(np.float32), rng.integers(-9, 9, (4, 1, 1, 8, 64, 4), np.int8)
    floats = partial(experts.matmul_experts, weight=weight, dtype=jnp.float32)
    for kernel in (floats, lambda *rows: few_bits.matmul_experts(*rows, 64, tiles, np.ones((4, 1, 1, 64), np.float16))):
        one_by_one = [kernel(*one) for one in zip(x, chosen, strict=True)]
        np.testing.assert_array_equal(jax.vmap(kernel)(x, chosen), one_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_an_exported_program_in_another_process(lab, tmp_path, kernels):
    """With our kernels it needs them registered, without them JAX alone."""
    pytest.importorskip("flatbuffers")
    decode_fn, params = made(lab)
    leaves, structure = jax.tree.flatten(params)
    run = jax.jit(lambda leaves, prompt: decode_fn(jax.tree.unflatten(structure, leaves), prompt).tokens)
    with trace.tracing(platform=trace.platform().replace(cpu_kernels=kernels)):
        exported = export.export(run, disabled_checks=hydrajax.export_checks() * kernels)(leaves, PROMPT)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "given", *leaves, PROMPT, decode_fn(params, PROMPT).tokens)
    program = f"""if True:
        import sys, jax, numpy as np
        if {kernels}:
            import hydrajax; hydrajax.export_checks()
        *leaves, prompt, expected = np.load("given.npz").values()
        program = jax.export.deserialize(bytearray(open("program", "rb").read()))
        assert (program.call(leaves, prompt) == expected).all() and ("hydrajax" in sys.modules) == {kernels}"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=os.environ | ENVIRONMENT)
