"""The roofline of a device of a mesh: its share of every product, collectives and memory."""

from collections import Counter

import jax.numpy as jnp
import pytest

from helpers.operator_counts import flops
from helpers.refusals import assert_refused
from hydrajax.bench.benchmark import first_nodes
from hydrajax.bench.roofline.devices import COLLECTIVE_LATENCY, DEVICES, Device
from hydrajax.bench.roofline.division import Division
from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.roofline.passes import begin, forward, observe, propose
from hydrajax.bench.roofline.prediction import predict
from hydrajax.bench.shapes import PRESETS
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets

SEVEN, SEVENTY = PRESETS["7b"], PRESETS["70b"]
EIGHT = Division(model=8)


def of_kind(operators, *kinds: str) -> list[Operator]:
    return [operator for operator in operators if operator.kind in kinds]


def by_name(operators) -> Counter:
    found: Counter = Counter()
    for operator in operators:
        found[operator.name] += operator.bytes * operator.count
    return found


@pytest.mark.parametrize(("devices", "kv_heads"), [(1, 1), (2, 2)])
def test_bytes_by_hand(devices, kv_heads):
    """A tree of 4 nodes over 10 cached tokens, batch 2, one layer of 2 heads, bfloat16; a device has one KV head."""
    c = LlamaConfig(50, 8, 12, n_layers=1, n_heads=2, n_kv_heads=kv_heads, head_dim=4)
    found = forward(Llama(c, jnp.bfloat16), 2, 4, 10, division=Division(model=devices))
    heads, mlp, vocabulary = 2 // devices, 12 // devices, 50 // devices
    rows, qkv, queries, scores = 8, 4 * (heads + 2), 2 * heads * 4 * 4, 2 * heads * 4 * 14
    assert by_name(of_kind(found, "weights", "attention")) == {
        "qkv": 2 * (rows * 8 + 8 * qkv + rows * qkv),
        # Tree and cache are a product each, which both read the queries. Scores and sums are float32.
        "scores": 2 * (2 * queries + 2 * 14 * 4) + 4 * scores,
        "weighted sum": 2 * (scores + 2 * 14 * 4) + 4 * 2 * queries,
        "out": 2 * (rows * 4 * heads + 4 * heads * 8 + rows * 8),
        "gate up": 2 * (rows * 8 + 8 * 2 * mlp + rows * 2 * mlp),
        "down": 2 * (rows * mlp + mlp * 8 + rows * 8),
        "lm head": 2 * (rows * 8 + 8 * vocabulary) + 4 * rows * vocabulary,
    }
    # In a ring of two a device sends half of the numbers twice.
    sums = dict.fromkeys(("all-reduce embedding", "all-reduce out", "all-reduce down"), 2 * rows * 8)
    assert by_name(of_kind(found, "collective")) == (sums if devices == 2 else {})
    assert by_name(of_kind(found, "elementwise")) == {
        "embedding": 2 * 2 * rows * 8,  # every device writes all rows
        "around qkv": 2 * (rows * 8 + rows * qkv),  # what the norm writes and the rotation reads
        # Queries and the tree's keys are written, and the scores read by the softmax.
        "around scores": 2 * (queries + 2 * 4 * 4) + 4 * scores,
        "around weighted sum": 2 * (scores + 2 * 4 * 4) + 4 * 2 * queries,
        "around out": 2 * (rows * 4 * heads + rows * 8),
        "around gate up": 2 * (rows * 8 + rows * 2 * mlp),
        "around down": 2 * (rows * mlp + rows * 8),
        "around lm head": 2 * rows * 8,  # its logits are the result
    }


def test_a_batch_is_divided_over_the_groups_if_it_is_even():
    base = Llama(SEVEN, jnp.bfloat16)
    groups = Division(data=2)
    assert forward(base, 4, 1, 256, division=groups) == forward(base, 2, 1, 256)
    assert forward(base, 3, 1, 256, division=groups) == forward(base, 3, 1, 256)


def test_fewer_key_value_heads_than_devices():
    """Query, key and value are divided over their inputs and summed; every device attends from all heads."""
    c = LlamaConfig(64, 16, 32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4)
    whole, part = (forward(Llama(c), 1, 2, 8, division=each) for each in (Division(), Division(model=4)))
    assert flops(of_kind(part, "attention")) == flops(of_kind(whole, "attention"))
    assert flops(of_kind(part, "weights")) == flops(of_kind(whole, "weights")) / 4
    sums = by_name(of_kind(part, "collective"))
    assert sums["all-reduce qkv"] == 2 * 3 / 4 * 4 * 2 * (4 + 2 * 2) * 4
    assert set(sums) == {"all-reduce embedding", "all-reduce qkv", "all-reduce out", "all-reduce down"}


def test_an_embedding_that_is_the_lm_head_is_divided_over_the_vocabulary():
    c = LlamaConfig(64, 16, 32, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=4, tied_lm_head=True)
    found = forward(Llama(c), 1, 2, 8, division=Division(model=4))
    (head,) = (op for op in found if op.kind == "weights" and op.name == "embedding")
    assert (head.flops, head.bytes) == (2 * 2 * 16 * 16, 4 * (2 * 16 + 16 * 16 + 2 * 16))
    assert [op.count for op in found if op.name == "all-reduce embedding"] == [1]  # the lookup's


def test_medusa_heads_gather_hidden_states_and_their_best_tokens():
    drafter = KINDS["medusa"].build(SEVEN, jnp.bfloat16)
    whole, part = (
        propose(drafter, Llama(SEVEN, jnp.bfloat16), presets.sparse(), 1, 64, each) for each in (Division(), EIGHT)
    )
    assert flops(part) == flops(whole) / 8
    found = of_kind(part, "collective")
    blocks, rankings = ([op for op in found if op.name.endswith(end)] for end in ("kernel", "ranking"))
    # The block is divided over its outputs, which the lm head needs whole.
    assert [op.bytes for op in blocks if "lm" not in op.name] == [7 / 8 * 2 * 4096] * 4
    assert len(rankings) == 4
    assert all(op.bytes < 7 * 8 * 20 for op in rankings)


def test_a_shared_block_is_gathered_after_each_application():
    drafter = KINDS["hydra++"].build(SEVEN, jnp.bfloat16)
    found = of_kind(propose(drafter, Llama(SEVEN, jnp.bfloat16), presets.chain(4), 1, 64, EIGHT), "collective")
    gathers = [op for op in found if op.name.startswith("all-gather")]
    assert sum(op.count for op in gathers if "blocks" in op.name) == 4 * 3


def test_a_draft_model_is_copied():
    drafter, base, tree = KINDS["model"].build(SEVEN, jnp.bfloat16), Llama(SEVEN, jnp.bfloat16), presets.chain(2)
    for count in (propose, observe):
        assert count(drafter, base, tree, 1, 64, EIGHT) == count(drafter, base, tree, 1, 64)
    assert begin(drafter, base, 1, 64, 64, EIGHT) == begin(drafter, base, 1, 64, 64)


def prediction(**settings):
    tree, drafter = first_nodes(presets.sparse(), [64]), KINDS["medusa"].build(SEVEN, jnp.bfloat16)
    (found,) = predict(DEVICES["H100"], SEVEN, drafter, tree, [1], [1024], 2, **settings)
    return found


def test_a_step_on_eight_devices():
    """A collective takes its latency and its bytes."""
    device = Device("round", flops=1.0, bandwidth=1.0, link=100.0, latency=2.0)
    exchange = Operator("all-reduce out", 0.0, 1000.0, 1, "collective", count=3)
    assert (device.seconds(exchange), device.memory_bound(exchange)) == (3 * (2 + 10), False)
    one, eight = prediction(), prediction(division=EIGHT)
    assert (one.collectives, one.collective_time) == (0, 0)
    # Sums: two a layer and the embedding. Tokens: one of verify. Medusa: four blocks and four rankings.
    assert eight.collectives == 2 * 32 + 1 + 1 + 8
    assert eight.collective_time == pytest.approx(
        1e3 * (eight.collectives * COLLECTIVE_LATENCY + eight.collective_bytes / 450e9)
    )
    assert one.bytes / 8 < eight.bytes < 1.1 * one.bytes / 8 + 0.1e9  # the residual stream is on every device
    computed = eight.autoregressive_step - eight.autoregressive_collective_time
    assert one.autoregressive_step / 8 < computed < 1.02 * one.autoregressive_step / 8


def test_memory_of_a_device():
    """Eight devices divide all weights except norms, the draft heads and the cache."""
    found = prediction(division=EIGHT)
    norms = (2 * 32 + 1) * 4096
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 2 * 4096 * 32_000
    assert found.base_memory == 2 * (matrices / 8 + norms)
    assert found.draft_memory == 2 * 4 * (4096**2 + 4096 + 4096 * 32_000) / 8
    assert found.cache_memory == pytest.approx(2 * 2 * 32 * (1024 + 64) * 4096 / 8, rel=1e-3)
    int8 = prediction(division=EIGHT, quantize="int8")
    halved = matrices - 4096 * 32_000  # the embedding is not quantised; each output has a float32 scale
    assert found.base_memory - int8.base_memory == pytest.approx(halved / 8, rel=0.01)
    assert int8.draft_memory == found.draft_memory


def test_heads_that_devices_cannot_share_are_refused():
    assert_refused(Division(model=5).check, (SEVENTY, "mesh: got model=5, expected a divisor of the base's 64 heads"))
    Division(model=16).check(SEVENTY)  # more than its key-value heads
