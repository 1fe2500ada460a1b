"""The roofline against XLA's own counts and counts by hand; devices and predictions."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.operator_counts import abstract_params, flops, moved
from hydrajax.bench.benchmark import autoregressive_bytes, first_nodes
from hydrajax.bench.roofline import devices
from hydrajax.bench.roofline.devices import DEVICES, Device
from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.roofline.passes import forward
from hydrajax.bench.roofline.prediction import Workload, predict
from hydrajax.bench.shapes import PRESETS
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.attention import causal_mask
from hydrajax.models.cache import init_cache
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops.cpu import library
from hydrajax.trees import presets

SEVEN = PRESETS["7b"]


def test_flops_against_xla(monkeypatch):
    monkeypatch.setattr(library, "available", lambda: False)  # in our own kernels XLA counts nothing
    config = LlamaConfig(1000, 256, 704, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=32)
    model, params = abstract_params(config)
    batch, nodes, slots = 2, 8, 96
    cache = jax.eval_shape(lambda: init_cache(config, batch, slots, jnp.float32))
    tokens = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)

    def run(params, tokens, cache):
        out = model.apply({"params": params}, tokens, tokens, causal_mask(nodes), cache)
        return model.apply({"params": params}, out.hidden, method="logits"), out.block

    counted = jax.jit(run).lower(params, tokens, cache).compile().cost_analysis()["flops"]
    ours = flops(forward(model, batch, nodes, slots))
    assert 0.95 < ours / counted <= 1  # XLA counts the elementwise operations too


def test_one_token_reads_every_weight_and_the_cache():
    """Against the count of `hydrajax bench` from the arrays; activations are the difference."""
    config = LlamaConfig(4000, 512, 1536, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=64, tied_lm_head=True)
    model, shapes = abstract_params(config, jnp.bfloat16)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    weights_and_cache = autoregressive_bytes(model, params, batch=1, slots=256)
    ours = moved(forward(model, 1, 1, 255))
    assert 1 < ours / weights_and_cache < 1.01


def test_prefill_computes_logits_of_the_last_token_only():
    operators = Workload(SEVEN, KINDS["none"].build(SEVEN, jnp.bfloat16), 2, 100, 2).prefill()
    assert {op.name: op.rows for op in operators if op.kind == "weights"} == {
        "qkv": 200, "out": 200, "gate up": 200, "down": 200, "lm head": 2,
    }  # fmt: skip


def test_seconds_of_a_device():
    """An operator takes the longer of arithmetic and traffic."""
    device = Device("round", flops=100.0, bandwidth=10.0)
    computes, moves = Operator("a", 1000.0, 1.0, 1, "weights"), Operator("b", 1.0, 1000.0, 1, "weights", count=3)
    assert (device.seconds(computes), device.seconds(moves)) == (10, 300)
    assert (device.memory_bound(computes), device.memory_bound(moves)) == (False, True)


KINDS_OF_DEVICES = {
    "NVIDIA H100 PCIe": ("H100-PCIe", 756e12),
    "NVIDIA A100-PCIE-40GB": ("A100-PCIe", 312e12),
    "NVIDIA L40S": None,  # another chip, of three times the speed
    "TPU v4 lite": ("TPUv4i", 137e12),
    "TPU v5 lite": ("TPUv5e", 197e12),
    "TPU v5": ("TPUv5p", 459e12),
    "NVIDIA GH200 480GB": ("GH200", 989e12),
    "cpu": None,
}


def test_device_of_a_device_kind():
    found = {kind: devices.device_of(kind) for kind in KINDS_OF_DEVICES}
    assert {kind: device and (device.name, device.flops) for kind, device in found.items()} == KINDS_OF_DEVICES


def predictions(kind="hydra++", device="H100", sizes=(1, 4, 16, 64), batches=(1,), **more):
    drafter, trees = KINDS[kind].build(SEVEN, jnp.bfloat16), first_nodes(presets.sparse(), sizes)
    return list(predict(DEVICES[device], SEVEN, drafter, trees, batches, (1024,), 2, **more))


def test_a_7b_step_at_batch_1_is_memory_bound():
    """6.6e9 weights in bfloat16 take 3.94 ms at 3350 GB/s; 64 nodes cost little at batch 1 and much at batch 32."""
    small, large = predictions("medusa", sizes=(64,), batches=(1, 32))
    assert 3.94 < small.autoregressive_step < 3.94 * 1.1
    assert small.verify / small.autoregressive_step < 1.15
    assert small.memory_bound > 0.95
    assert large.verify / large.autoregressive_step > 2  # medusa G.3: beyond batch 32 "may even have a negative effect"
    assert large.memory_bound < 0.5


def test_a_draft_without_weights_costs_nothing():
    for kind in ("none", "lookup", "lookahead"):
        (row,) = predictions(kind=kind, sizes=(1,))
        assert (row.draft_bytes, row.propose, row.observe) == (0, 0, 0)


def test_a_lookahead_window_is_verified_with_the_tree():
    """W = 15 and N = 5: 15 * 4 cells, the root included."""
    drafter, tree = KINDS["lookahead"].build(SEVEN, jnp.bfloat16), presets.cartesian([15, 1, 1, 1])
    (found,) = predict(DEVICES["H100"], SEVEN, drafter, {"candidates": tree}, (1,), (1024,), 2)
    assert found.nodes == 1 + 15 * 4 + 59
    verify = Workload(SEVEN, drafter, 2, 1024, 2).step(tree)["verify"]
    assert {operator.rows for operator in verify if operator.kind == "weights"} == {2 * 120}
