"""The roofline against medusa's printed tables, XLA's own counts, counts by hand; and the command that prints it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.cli import roofline as command
from hydrajax.cli import run_command
from hydrajax.drafters.lm_head import LmHead
from hydrajax.drafters.registry import KINDS
from hydrajax.measure.benchmark import BenchmarkRow, autoregressive_bytes, first_nodes
from hydrajax.models.attention import causal_mask
from hydrajax.models.base import BoundBase, abstract_base
from hydrajax.models.cache import init_cache
from hydrajax.models.config import PRESETS, LlamaConfig
from hydrajax.models.kernels import few_rows
from hydrajax.models.llama import Llama
from hydrajax.roofline import comparison, devices
from hydrajax.roofline.devices import DEVICES, Device
from hydrajax.roofline.medusa_tables import CANDIDATES, TABLES
from hydrajax.roofline.operators import (
    Operator,
    attention,
    draft_parameters,
    forward_operators,
    layer_operators,
    linear,
    operators_of,
)
from hydrajax.roofline.prediction import Workload, predict
from hydrajax.trees import DynamicTree, presets

SEVEN = PRESETS["7b"]


def flops(operators) -> float:
    return sum(operator.count * operator.flops for operator in operators)


def moved(operators) -> float:
    return sum(operator.count * operator.bytes for operator in operators)


def abstract_params(config: LlamaConfig, dtype=jnp.float32):
    model = Llama(config, dtype)
    return model, nn.unbox(abstract_base(model))


# --- medusa, tables 6 to 8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"table_{table.number}")
def test_every_printed_intensity(table):
    """LLaMA-33B in float16 (hidden 6656, intermediate 17920, 52 heads of 128), 7 rows of 8 columns each."""
    assert len(table.printed) == 7
    for row, printed in table.printed.items():
        assert tuple(round(value, 2) for value in table.ours(row)) == printed, f"table {table.number}, row {row}"


@pytest.mark.parametrize(
    ("number", "row", "candidates", "printed"),
    [
        (6, 128, 112, 40.73),  # the cell with the largest share of queries among what is moved
        (6, 1024, 64, 40.96),  # the text beside it: 41 times the intensity of one token
        (7, 64, 48, 33.76),
        (8, 8, 1, 7.99),  # not 8: activations count
        (8, 64, 112, 2893.91),
    ],
)
def test_what_is_typed_in_where_an_error_would_matter(number, row, candidates, printed):
    """The same cells read off the paper a second time, and worked out from table 5 with its own letters."""
    table = TABLES[number - 6]
    assert table.printed[row][CANDIDATES.index(candidates)] == printed
    h, i, n, d, q = 6656, 17_920, 52, 128, candidates
    if number == 8:
        b = row
        intensity = 2 * b * q * h * i / (2 * (b * q * (h + i) + h * i))
    else:
        b, s = (16, row) if number == 6 else (row, 1024)
        intensity = 2 * b * s * q * n * d / (2 * (b * s * q * n + b * (s + q) * n * d))
    assert round(intensity, 2) == printed


def test_table_5_is_one_formula_for_all_phases():
    """Prefill is q = s, decoding q = 1: qkv 2bsh + h², QKᵀ 2bsnd + bs²n and bsn + bsnd + bnd."""
    b, s, h, n, d = 3, 40, SEVEN.width, SEVEN.n_heads, SEVEN.head_dim
    assert linear("query", b * s, h, h, 1).bytes == 2 * b * s * h + h * h
    assert attention("scores", SEVEN, b, s, s, 1).bytes == 2 * b * s * n * d + b * s * s * n
    assert attention("scores", SEVEN, b, 1, s, 1).bytes == b * s * n + b * s * n * d + b * n * d


# --- a forward pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_flops_against_those_xla_counts(n_kv_heads, monkeypatch):
    monkeypatch.setattr(few_rows, "available", lambda: False)  # in our own kernels XLA counts nothing
    config = LlamaConfig(1000, 256, 704, n_layers=2, n_heads=8, n_kv_heads=n_kv_heads, head_dim=32)
    model, params = abstract_params(config)
    batch, nodes, slots = 2, 8, 96
    cache = jax.eval_shape(lambda: init_cache(config, batch, slots, jnp.float32))
    tokens = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)

    def forward(params, tokens, cache):
        out = model.apply({"params": params}, tokens, tokens, causal_mask(nodes), cache)
        return model.apply({"params": params}, out.hidden, method="logits"), out.block

    counted = jax.jit(forward).lower(params, tokens, cache).compile().cost_analysis()["flops"]
    ours = flops(forward_operators(config, batch, nodes, slots + nodes, 4))
    assert 0.95 < ours / counted <= 1  # XLA counts the elementwise operations too


def test_flops_of_a_layer_against_the_shapes_of_its_products():
    """Every product of a grouped-query layer as NumPy would run it."""
    c = LlamaConfig(100, 48, 80, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=8)
    batch, queries, keys = 3, 5, 11
    x, up, down = (batch * queries, 48), (48, 80), (80, 48)
    heads = [((5 * 3, 8), (8, 11)), ((5 * 3, 11), (11, 8))] * (batch * c.n_kv_heads)  # 3 query heads to a key head
    products = [(x, (48, 48)), (x, (48, 16)), (x, (48, 16)), (x, (48, 48)), (x, up), (x, up), ((15, 80), down), *heads]
    expected = 0
    for left, right in products:
        product = np.ones(left) @ np.ones(right)
        expected += 2 * product.size * left[1]
    assert flops(layer_operators(c, batch, queries, keys, 2)) == expected


def test_bytes_by_hand():
    """The tree of 4 nodes over 10 cached tokens, 2 rows, one layer of 2 query heads on 1 key-value head, 2 bytes."""
    c = LlamaConfig(50, 8, 12, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4)
    found = {operator.name: operator.bytes for operator in forward_operators(c, 2, 4, 14, 2)}
    rows, scores = 8, 2 * 2 * 4 * 14
    assert found == {
        "embedding": 2 * (8 * 8 + 8 * 8),
        "norms": 2 * 4 * 8 * 8,  # two of them, in and out
        "query": 2 * (rows * 8 + 8 * 8 + rows * 8),
        "key": 2 * (rows * 8 + 8 * 4 + rows * 4),
        "value": 2 * (rows * 8 + 8 * 4 + rows * 4),
        "scores": 2 * (rows * 8 + 2 * 14 * 4 + scores),
        "softmax": 4 * 2 * scores,
        "weighted sum": 2 * (scores + 2 * 14 * 4 + rows * 8),
        "out": 2 * (rows * 8 + 8 * 8 + rows * 8),
        "gate": 2 * (rows * 8 + 8 * 12 + rows * 12),
        "up": 2 * (rows * 8 + 8 * 12 + rows * 12),
        "silu": 2 * 3 * rows * 12,
        "down": 2 * (rows * 12 + 12 * 8 + rows * 8),
        "last norm": 2 * 2 * 8 * 8,
        "lm head": 2 * (rows * 8 + 8 * 50) + 4 * rows * 50,
    }


@pytest.mark.parametrize("tied", [False, True])
def test_one_token_reads_every_weight_and_the_cache(tied):
    """What `hydrajax bench` counts from the arrays themselves; activations are the difference."""
    config = LlamaConfig(4000, 512, 1536, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=64, tied_lm_head=tied)
    model, shapes = abstract_params(config, jnp.bfloat16)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    weights_and_cache = autoregressive_bytes(model, params, batch=1, slots=256)
    ours = moved(forward_operators(config, 1, 1, 256, 2))
    assert 1 < ours / weights_and_cache < 1.01


def test_grouped_queries_read_fewer_keys_and_values():
    full, grouped = (layer_operators(SEVEN.replace(n_kv_heads=n), 1, 1, 4096, 2) for n in (32, 8))
    for name in ("key", "value", "scores", "weighted sum"):
        before, after = (next(op for op in ops if op.name == name) for ops in (full, grouped))
        assert 3.5 < before.bytes / after.bytes < 4, name
        assert (before.flops == after.flops) == (name in ("scores", "weighted sum")), name


def test_prefill_takes_logits_of_the_last_token_alone():
    operators = Workload(SEVEN, KINDS["none"].build(SEVEN, jnp.bfloat16), 2, 100, 2).prefill()
    lm_head = operators[-1]
    assert (lm_head.name, lm_head.rows) == ("lm head", 2)
    assert {op.rows for op in operators if op.kind == "weights"} == {2, 200}


# --- the draft ------------------------------------------------------------------------------------------------------

TREE = presets.sparse()  # 10 parents at depths 1 and 2, 1 elsewhere
D, V = SEVEN.width, SEVEN.vocab_size


def head_kernels(kind: str, tree=TREE, batch: int = 3):
    operators = operators_of(KINDS[kind].build(SEVEN, jnp.bfloat16).propose_costs(tree, batch, 1024), 2)
    return [op for op in operators if op.kind == "weights"]


def test_the_tree_has_the_parents_that_the_counts_below_assume():
    assert [len(level.parents) for level in TREE.levels] == [1, 10, 10, 1]


def test_medusa_heads_run_on_one_row_each():
    assert flops(head_kernels("medusa")) == 2 * 3 * 4 * (D * D + D * V)


def test_hydra_heads_run_once_per_parent():
    paths = [1, 10, 10, 1]
    shared = 4 * 2 * D * 2 * D  # the hidden state and the root, once per row of the batch
    path = sum(p * k * D * 2 * D for k, p in enumerate(paths))
    assert flops(head_kernels("hydra")) == 2 * 3 * (shared + path + sum(paths) * D * V)


def test_hydra_pp_blocks_are_multiplied_thrice_and_read_once():
    blocks = [op for op in head_kernels("hydra++") if "blocks" in op.name]
    assert [op.flops for op in blocks] == [3 * 2 * 3 * p * D * D for p in (1, 10, 10, 1)]
    assert all(op.bytes == 2 * (D * D + 2 * op.rows * D) for op in blocks)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_draft_s_own_bytes_are_its_parameters(kind):
    """All heads run, at batch 1 on few rows: what moves is little more than the parameters."""
    parameters = draft_parameters(SEVEN, KINDS[kind].build(SEVEN, jnp.bfloat16))
    assert 1 < moved(head_kernels(kind, presets.chain(4), batch=1)) / (2 * parameters) < 1.01


def test_heads_below_the_tree_are_not_run():
    assert {op.name.split()[1] for op in head_kernels("hydra", presets.chain(2))} == {"0", "1"}


def test_every_matrix_of_the_draft_is_multiplied_with():
    """At batch 1 and one parent per level: each weight is two operations, a shared block's thrice as many."""
    config = PRESETS["tiny"]
    drafter = KINDS["hydra++"].build(config, jnp.float32)
    model, params = abstract_params(config)
    shapes = jax.eval_shape(lambda params: drafter.init(jax.random.key(0), BoundBase(model, params)), params)
    leaves = jax.tree.leaves_with_path(shapes["heads"])
    weights = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves if "bias" not in str(path[-1])}
    wanted = sum(2 * size * (3 if "blocks" in name else 1) for name, size in weights.items())
    assert flops(operators_of(drafter.propose_costs(presets.chain(4), 1, 64), 4)) == wanted
    everything = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert draft_parameters(config, drafter) == everything


STATIC, DYNAMIC = presets.sparse("eagle_26"), DynamicTree(20, 3, 4)
WITH_CACHE = [
    pytest.param(kind, tree, marks=() if (kind, tree) == ("eagle3", DYNAMIC) else pytest.mark.slow)
    for kind in ("eagle", "eagle3", "model")
    for tree in (STATIC, DYNAMIC)
]


@pytest.mark.parametrize(
    ("kind", "tree"), [*WITH_CACHE, pytest.param("amphista", presets.sparse(), marks=pytest.mark.slow)]
)
def test_what_a_draft_with_a_cache_computes_against_what_xla_counts(kind, tree, monkeypatch):
    """Levels that attend to the draft's cache and to all nodes run before, and the pass over what was accepted."""
    monkeypatch.setattr(few_rows, "available", lambda: False)  # in our own kernels XLA counts nothing
    config, batch, slots = LlamaConfig(300, 64, 172, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16), 2, 600
    drafter, (model, base) = KINDS[kind].build(config, jnp.float32), abstract_params(config)
    params = jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base)
    state = jax.eval_shape(lambda: drafter.init_state(batch, slots))
    whole = jax.ShapeDtypeStruct((batch, 6), jnp.int32)
    features = jax.ShapeDtypeStruct((batch, 6, len(drafter.reads) * config.width), jnp.float32)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def propose(base, params, state, root):
        return drafter.propose(params, state, root, tree, BoundBase(model, base)).tokens

    def observe(base, params, state, root, features, tokens):
        return drafter.begin(params, state, features, tokens, root, root, BoundBase(model, base))

    for function, arguments, costs in (
        (propose, (), drafter.propose_costs(tree, batch, slots)),
        (observe, (features, whole), drafter.begin_costs(batch, 6, slots)),
    ):
        compiled = jax.jit(function).lower(base, params, state, row, *arguments).compile()
        assert 0.85 < flops(operators_of(costs, 4)) / compiled.cost_analysis()["flops"] <= 1, function


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_heads_that_guess_at_once_read_the_bases_lm_head_once(kind):
    drafter = dataclasses.replace(KINDS[kind].build(SEVEN, jnp.bfloat16), small_lm_head=LmHead(shared=True))
    operators = [op for op in operators_of(drafter.propose_costs(TREE, 3, 1024), 2) if "lm kernel" in op.name]
    assert [(op.rows, op.flops) for op in operators] == [(3 * 4, 2 * 3 * 4 * D * V)]


def test_every_level_of_eagle_reads_the_cache_and_the_levels_before_it():
    drafter = KINDS["eagle"].build(SEVEN, jnp.bfloat16)
    scores = [op for op in operators_of(drafter.propose_costs(TREE, 1, 1000), 2) if op.name.endswith("scores")]
    nodes, keys = [10, 10, 1], [1000 + 10, 1000 + 20, 1000 + 21]  # nodes with children, of depths 1 to 3
    assert [op.flops for op in scores] == [2 * n * many * D for n, many in zip(nodes, keys, strict=True)]


@pytest.mark.parametrize("kind", ["none", "lookup"])
def test_a_draft_without_weights_costs_nothing(kind):
    (row,) = predictions(kind=kind, sizes=(1,))
    assert (row.draft_bytes, row.propose, row.observe) == (0, 0, 0)


# --- devices and predictions ----------------------------------------------------------------------------------------


def test_an_operator_takes_the_longer_of_arithmetic_and_traffic():
    device = Device("round", flops=100.0, bandwidth=10.0)
    assert device.seconds(Operator("a", 1000.0, 1.0, 1, "weights")) == 10
    assert device.seconds(Operator("b", 1.0, 1000.0, 1, "weights", count=3)) == 300
    assert device.memory_bound(Operator("b", 1.0, 1000.0, 1, "weights"))
    assert not device.memory_bound(Operator("a", 1000.0, 1.0, 1, "weights"))


def test_measured_rates_are_interpolated_in_logarithms_and_constant_beyond():
    device = Device("here", 400.0, 1e9, weight_rates=((1, 100.0), (16, 400.0)))
    rate = {rows: device.rate(Operator("", 1.0, 1.0, rows, "weights")) for rows in (1, 4, 16, 64)}
    assert rate == pytest.approx({1: 100, 4: 200, 16: 400, 64: 400})
    assert device.rate(Operator("", 1.0, 1.0, 1, "attention")) == 400  # none measured: the peak


def test_measurements_are_averaged_rate_by_rate():
    slow, fast = (Device("here", k, 10 * k, ((1, k), (4, 2 * k)), ((1, k),)) for k in (100.0, 400.0))
    mean = devices.average([slow, fast])
    assert (mean.flops, mean.bandwidth) == pytest.approx((200, 2000))
    assert dict(mean.weight_rates) == pytest.approx({1: 200, 4: 400})
    assert dict(mean.attention_rates) == pytest.approx({1: 200})
    assert devices.drift([slow, fast, mean]) == 4


def predictions(
    config=SEVEN, kind="hydra++", device="H100", sizes=(1, 4, 16, 64), batches=(1,), contexts=(1024,), **more
):
    drafter = KINDS[kind].build(config, jnp.bfloat16)
    return list(predict(DEVICES[device], config, drafter, first_nodes(TREE, sizes), batches, contexts, 2, **more))


def test_more_nodes_rows_or_context_never_take_less():
    for rows in (
        predictions(),
        predictions(sizes=(64,), batches=(1, 4, 16)),
        predictions(sizes=(64,), contexts=(1, 512, 8192)),
    ):
        steps = [row.step for row in rows]
        assert steps == sorted(steps)
        assert len(set(steps)) == len(steps)


def test_a_single_row_7b_step_waits_for_its_weights():
    """6.6e9 weights in bfloat16 at 3350 GB/s are 3.94 ms; 64 nodes at batch 1 cost the base little, at 32 a lot."""
    small, large = predictions(sizes=(64,), batches=(1, 32))
    assert 3.94 < small.autoregressive_step < 3.94 * 1.1
    assert small.verify / small.autoregressive_step < 1.15
    assert small.memory_bound > 0.95
    assert large.verify / large.autoregressive_step > 2  # medusa G.3: beyond batch 32 "may even have a negative effect"
    assert large.memory_bound < 0.5


def test_break_even_and_speedup():
    one, many = predictions(sizes=(1, 64), tokens_per_step=[1.0, 3.5])
    assert many.break_even == many.step / many.autoregressive_step
    assert many.speedup == pytest.approx(3.5 / many.break_even)
    assert one.speedup < 1  # a tree of one node still runs the prefix layer
    assert many.step == pytest.approx(many.propose + many.verify + many.accept_commit + many.observe)


def test_a_faster_memory_and_a_smaller_draft_are_faster():
    assert predictions(device="H200")[0].step < predictions(device="H100")[0].step < predictions(device="A100")[0].step
    draft = [predictions(kind=kind)[-1].step for kind in ("medusa", "hydra", "hydra++")]
    assert draft == sorted(draft)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(capsys):
    def run(*argv) -> SimpleNamespace:
        capsys.readouterr()
        argv = [str(arg) for arg in argv]
        code = run_command("hydrajax roofline", command.HELP, command.add_arguments, command.run, argv)
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


def test_command_predicts_every_cell(program, tmp_path):
    file = tmp_path / "roofline.json"
    grid = ("--tree-sizes", "1,16,64", "--batch-sizes", "1,8", "--context", "1024,4096")
    result = program("--shape", "7b", "--device", "H200", *grid, "--tokens-per-step", "1,2.5,3", "--json", file)
    assert result.code == 0, result
    report = json.loads(file.read_text())
    assert report["device"]["name"] == "H200"
    cells = [row["predicted"] for row in report["rows"]]
    found = [(cell["context"], cell["batch"], cell["nodes"]) for cell in cells]
    assert found == [(s, b, n) for s in (1024, 4096) for b in (1, 8) for n in (1, 16, 64)]
    assert all("measured" not in row for row in report["rows"])
    assert f"{cells[-1]['break_even']:.2f}" in result.out
    assert f"{cells[-1]['speedup']:.2f}x" in result.out
    assert "…" not in result.out


def test_command_prints_the_tables_and_the_operators(program):
    result = program("--tables")
    assert result.code == 0, result
    assert "168 of 168 equal" in result.out
    assert "2893.91" in result.out
    assert "…" not in result.out
    result = program("--shape", "33b", "--draft-kind", "medusa", "--operators")
    assert result.code == 0, result
    for word in ("prefill", "tree decode, 64 nodes", "weighted sum", "head 3 lm kernel"):
        assert word in result.out
    assert "…" not in result.out


def test_command_takes_eagle_and_a_tree_that_is_grown(program):
    short = ("--shape", "7b", "--draft-kind", "eagle", "--json")
    rows = json.loads(program(*short, "--context", "1024,4096").out)["rows"]
    assert [row["predicted"]["nodes"] for row in rows] == [1, 4, 16, 26] * 2
    near, far = rows[3]["predicted"], rows[7]["predicted"]
    # Of the cache four levels read 3072 more keys and values, each of 4096 numbers in 16 bits: at least that much time.
    assert far["propose"] - near["propose"] > 4 * 3072 * 2 * 4096 * 2 / 3350e9 * 1e3
    (row,) = json.loads(program(*short, "--tree", "dynamic-60-7-10").out)["rows"]
    assert (row["predicted"]["tree"], row["predicted"]["nodes"]) == ("dynamic-60-7-10", 60)
    assert row["predicted"]["propose"] > near["propose"]  # seven levels in place of four


def test_command_says_how_long_a_draft_model_s_chains_should_be(program, tmp_path):
    """The published pair of a 7B and a model of 68M parameters: 2 layers, width 768."""
    config = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 12, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = ("--shape", "7b", "--draft", tmp_path, "--acceptance", "0.6", "--batch-sizes", "1,64")
    result = program(*pair, "--json")
    assert result.code == 0, result
    alone, many = json.loads(result.out)["chains"]
    # At batch 1 both wait for their weights, but of the draft's embedding only a row is read. The base reads 6.6e9 of
    # them and the cache, 1025 keys and values of 32 layers.
    draft = 2 * (4 * 768**2 + 3 * 768 * 3072) + 768 * 32_000
    base = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 4096 * 32_000 + 32 * 2 * 1025 * 4096
    assert alone["draft_cost"] == pytest.approx(draft / base, rel=0.1)
    gains = [(1 - 0.6 ** (k + 1)) / (0.4 * (alone["draft_cost"] * k + 1)) for k in range(17)]
    assert alone["length"] == int(np.argmax(gains))
    assert alone["improvement"] == pytest.approx(max(gains))
    assert alone["roofline_speedup"] < alone["improvement"]
    assert many["roofline_length"] < alone["roofline_length"]  # with many rows the base's longer pass costs
    shown = program(*pair).out
    assert f"{alone['improvement']:.2f}x" in shown
    assert "draft model of 0.1" in shown
    assert "…" not in shown
    refused = program("--shape", "7b", "--acceptance", "0.6")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--acceptance: is for draft models" in refused.err
    refused = program("--shape", "7b", "--draft", tmp_path, "--acceptance", "1.6")
    assert (refused.code, refused.err) == (2, "hydrajax: --acceptance: must be from 0 to 1, found 1.6\n")


def test_command_reads_a_base_s_shape(program, tmp_path):
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    results = [program(*base, "--json") for base in (("--base", tmp_path), ("--shape", "tiny"))]
    assert json.loads(results[0].out)["rows"] == json.loads(results[1].out)["rows"]


QUICKLY = ("--shape", "tiny", "--draft-kind", "medusa", "--tree-sizes", "4", "--context", "64", "--repeats", "1")


def test_command_compares_with_what_was_measured_here(program, monkeypatch, tmp_path):
    """The steps' times stand in; `hydrajax bench` has tests of its own, and the slow test below measures."""
    times = {"autoregressive_step": 4.0, "step": 8.0, "propose": 1.0, "verify": 6.0, "accept_commit": 0.5}
    others = dict.fromkeys(
        ("observe", "draft_overhead", "prefill", "compile_seconds", "autoregressive_bandwidth_fraction"), 0.5
    )
    cell = {"batch": 1, "context": 64, "tree": "first-4", "nodes": 4, "depth": 2, "break_even": 2.0}
    sizes = {"autoregressive_bytes_per_step": 1, "peak_memory_bytes": 1}
    rows = [BenchmarkRow(**cell, **times, **others, **sizes)]
    monkeypatch.setattr(comparison, "run_benchmark", lambda *args, **settings: iter(rows))
    peak = Device("here", 1e9, 1e9, ((1, 0.5e9), (4, 1e9)), ((1, 0.5e9), (4, 1e9)))
    monkeypatch.setattr(comparison, "Meter", lambda *args: SimpleNamespace(measure=lambda: peak))
    file = tmp_path / "here.json"
    result = program(*QUICKLY, "--device", "here", "--dtype", "float32", "--json", file)
    assert result.code == 0, result
    report = json.loads(file.read_text())
    predicted = report["rows"][0]["predicted"]
    assert report["rows"][0]["measured"] == rows[0].as_dict()
    assert report["device"]["weight_rates"] == [[1, pytest.approx(0.5e9)], [4, pytest.approx(1e9)]]
    assert f"{predicted['step'] / 8 - 1:+.0%}" in result.out
    assert f"{predicted['verify']:.3g} (6)" in result.out
    assert report["drift"] == 1
    assert "…" not in result.out


def test_rates_measured_here_are_positive_and_a_bandwidth_is_no_less_than_a_copy_s(monkeypatch):
    monkeypatch.setattr(devices, "CPU_ROWS", (1, 4))
    monkeypatch.setattr(devices, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(devices, "copy_bandwidth", lambda megabytes: 1e6)
    tiny = PRESETS["tiny"]
    here = devices.Meter(tiny, jnp.float32, weight_bytes=200_000, slots=32, repeats=1).measure()
    assert [rows for rows, _ in here.weight_rates] == [rows for rows, _ in here.attention_rates] == [1, 4]
    assert all(rate > 0 for _, rate in here.weight_rates + here.attention_rates)
    assert here.flops == max(rate for _, rate in here.weight_rates)
    assert here.bandwidth == max(1e6, 2 * here.weight_rates[0][1])  # 4 bytes for every 2 operations


@pytest.mark.slow
def test_command_measures_here_beside_the_prediction(program):
    result = program(*QUICKLY, "--device", "here", "--dtype", "float32", "--json")
    assert result.code == 0, result
    (row,) = json.loads(result.out)["rows"]
    for verb in ("autoregressive_step", "step", "verify", "propose", "accept_commit"):
        assert row["predicted"][verb] > 0, verb
        assert row["measured"][verb] > 0, verb


def test_mistakes_end_in_one_line(program, tmp_path):
    cases = {
        "exactly one of --shape and --base": [],
        "--shape: found '8x7b', allowed are tiny": ["--shape", "8x7b"],
        "--base: no such file": ["--base", tmp_path / "none"],
        "invalid choice: 'B200'": ["--shape", "7b", "--device", "B200"],
        "--dtype: found 'float32', the peaks of --device A100": [
            *("--shape", "7b", "--device", "A100", "--dtype", "float32")
        ],
        "tree sizes: must be from 1 to 64, found 65": ["--shape", "7b", "--tree-sizes", "65"],
        "depth 5 is deeper than the drafter": ["--shape", "7b", "--tree", "chain-5"],
        "tree: dynamic-8-1-4 needs a drafter that can grow trees, not PromptLookup": [
            *("--shape", "7b", "--draft-kind", "lookup", "--tree", "dynamic-8-1-4")
        ],
        "dynamic-8-1-4 has another shape at every step, a sweep over tree sizes needs one": [
            *("--shape", "7b", "--tree", "dynamic-8-1-4", "--tree-sizes", "2")
        ],
        "must be an integer from 1 up, found 'x'": ["--shape", "7b", "--batch-sizes", "1,x"],
        "--tokens-per-step: one for each of 2 tree sizes is needed, found 1": [
            *("--shape", "7b", "--tree-sizes", "1,16", "--tokens-per-step", "3")
        ],
        "from 1 to 5 are possible, found 6.0": ["--shape", "7b", "--tree-sizes", "64", "--tokens-per-step", "6"],
        "must be numbers with commas between them, found '1;2'": ["--shape", "7b", "--tokens-per-step", "1;2"],
        "--json: cannot write": ["--shape", "7b", "--json", tmp_path / "no" / "such" / "file"],
        "--context: must be at most the model's 1024, found 4096": ["--shape", "tiny", "--context", "64,4096"],
    }
    for message, arguments in cases.items():
        result = program(*arguments)
        assert result.code == 2, (message, result)
        assert result.err.count("\n") == 1, result.err
        assert message in result.err
