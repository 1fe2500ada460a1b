"""Counting in jaxprs: control flow, views of weights, weights read once, and operations that are not counted."""

import jax
import jax.numpy as jnp
import pytest

from helpers.operator_counts import flops
from hydrajax.bench.roofline import passes
from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.roofline.passes import begin, forward, observe, propose
from hydrajax.bench.roofline.traced import trace
from hydrajax.bench.shapes import PRESETS
from hydrajax.drafters.several import with_lookup
from hydrajax.formats.draft_registry import KINDS
from hydrajax.lowbit.quantized import Int8
from hydrajax.models.llama import Llama
from hydrajax.models.weights import project
from hydrajax.trees import presets

W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((3, 8), jnp.float32)
ONE = 2 * 3 * 8 * 8  # of one product of the two
BASE = Llama(PRESETS["tiny"])


def counted(function, params=W, *arguments) -> list[Operator]:
    return trace(function, {"kernel": params}, *(arguments or (X,)))[0]


def test_a_product_with_a_weight():
    (product, around) = counted(lambda p, x: jnp.tanh(jnp.tanh(x) @ p["kernel"]))
    assert product == Operator("kernel", ONE, 4 * (24 + 64 + 24), 3, "weights")
    assert around == Operator("around kernel", 0, 4 * (24 + 24), 1, "elementwise")


def scanned(p, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ p["kernel"]), None), x, length=5)[0]


def branching(p, x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["kernel"], lambda x: jnp.tanh(x @ p["kernel"]) @ x.T @ x, x)


def calling(p, x):
    unused = x @ p["kernel"]
    del unused
    return jax.checkpoint(jax.jit(jax.nn.silu))(x @ p["kernel"])


def masked(p, x):
    sees = (x > 0).astype(jnp.float32)
    return sees @ sees.T


def test_control_flow():
    """A scan counts as often as it runs, of a condition the largest branch; calls are entered, dead code is dropped.
    Products of masks are not counted.
    """
    expected = {scanned: 5 * ONE, branching: ONE + 2 * (2 * 3 * 3 * 8), calling: ONE, masked: 0}
    for run, operations in expected.items():
        assert flops(counted(run)) == operations, run.__name__
    assert not counted(masked)
    with pytest.raises(ValueError, match="loop of unknown length"):
        counted(lambda p, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ p["kernel"], x))
    assert not counted(lambda p, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x))


def test_a_weight_is_read_once_by_products_that_follow_each_other():
    def run(p, x):
        return jnp.tanh(x @ p["kernel"].reshape(8, 8)) @ p["kernel"]

    assert [(op.flops, op.bytes) for op in counted(run) if op.kind == "weights"] == [(2 * ONE, 4 * (24 + 64 + 24))]
    between = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = trace(lambda p, x: x @ p["a"] @ p["b"] @ p["a"], {"a": W, "b": between}, X)[0]
    assert [(op.name, op.count) for op in found if op.kind == "weights"] == [("a", 2), ("b", 1)]


def test_int8_weights_are_a_byte_each():
    kernel = Int8(jnp.zeros((8, 8), jnp.int8), jnp.zeros(8))
    (product,) = (op for op in counted(lambda p, x: project(x, p["kernel"]), kernel) if op.kind == "weights")
    assert (product.flops, product.bytes) == (ONE, 64 + 4 * (24 + 24))


def test_a_ranking_reads_the_output_of_its_product():
    found = {op.name: op.bytes for op in counted(lambda p, x: jax.lax.top_k(x @ p["kernel"], 2)[1])}
    assert found == {"kernel": 4 * (24 + 64 + 24), "kernel ranking": 4 * 24}


def test_layers_are_counted_as_if_each_were_traced(monkeypatch):
    """Four layers from one and two, also if a pass omits most of the last layer."""
    config = BASE.config.replace(n_layers=6)
    model = KINDS["model"].build(config, jnp.float32)
    both, chain = with_lookup(model, 3), presets.chain(3)

    def everything():
        yield propose.__wrapped__(both, BASE, chain, 2, 70)
        yield observe.__wrapped__(both, BASE, chain, 2, 70)
        yield begin.__wrapped__(model, BASE, 2, 10, 70)
        yield forward.__wrapped__(Llama(config.replace(n_layers=4)), 2, 6, 70)

    ours = [set(operators) for operators in everything()]
    assert any(operator.count % 4 for operators in ours for operator in operators)
    monkeypatch.setattr(passes, "at_depth", lambda layers, operators_at: operators_at(layers))
    assert ours == [set(operators) for operators in everything()]


def test_a_draft_model_with_lookup_runs_the_accepted_tokens_again():
    model, tree = KINDS["model"].build(BASE.config, jnp.float32), presets.chain(2)
    assert not observe(model, BASE, tree, 2, 64)
    assert flops(observe(with_lookup(model, 3), BASE, tree, 2, 64)) > flops(propose(model, BASE, tree, 2, 64))
