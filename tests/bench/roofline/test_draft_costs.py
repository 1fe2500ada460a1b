"""Counted operators of drafters against XLA's counts, their parameters and counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from helpers.operator_counts import abstract_params, flops, moved
from hydrajax.bench.roofline.passes import begin, draft_parameters, propose
from hydrajax.bench.shapes import PRESETS
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops.cpu import library
from hydrajax.trees import DynamicTree, presets

SEVEN = PRESETS["7b"]
TREE = presets.sparse()  # 10 parents at depths 1 and 2, 1 elsewhere
D, MLP, V = SEVEN.width, SEVEN.mlp_width, SEVEN.vocab_size
BASE = Llama(SEVEN, jnp.bfloat16)


def head_kernels(kind: str, tree=TREE, batch: int = 3):
    operators = propose(KINDS[kind].build(SEVEN, jnp.bfloat16), BASE, tree, batch, 1024)
    return [op for op in operators if op.kind == "weights"]


def test_medusa_heads_run_on_one_row_each_and_hydra_heads_once_per_parent():
    assert flops(head_kernels("medusa")) == 2 * 3 * 4 * (D * D + D * V)
    paths = [1, 10, 10, 1]
    assert [len(level.parents) for level in TREE.levels] == paths
    shared = 4 * 2 * D * 2 * D  # the hidden state and the root, once per row of the batch
    path = sum(p * k * D * 2 * D for k, p in enumerate(paths))
    assert flops(head_kernels("hydra")) == 2 * 3 * (shared + path + sum(paths) * D * V)


def test_hydra_pp_blocks_are_multiplied_three_times_and_read_once():
    """Heads below the tree are not run."""
    assert {op.name.split()[1] for op in head_kernels("hydra", presets.chain(2))} == {"0", "1"}
    blocks = [op for op in head_kernels("hydra++") if "blocks" in op.name]
    assert [op.flops for op in blocks] == [3 * 2 * 3 * p * D * D for p in (1, 10, 10, 1)]
    assert all(op.bytes == 2 * (D * D + 2 * op.rows * D) for op in blocks)


def test_every_matrix_of_the_draft_is_multiplied_with():
    """At batch 1 with one parent per level, each weight takes two operations, three times as many in shared blocks."""
    config = PRESETS["tiny"]
    drafter = KINDS["hydra++"].build(config, jnp.float32)
    model, params = abstract_params(config)
    shapes = jax.eval_shape(lambda params: drafter.init(jax.random.key(0), BoundBase(model, params)), params)
    leaves = jax.tree.leaves_with_path(shapes["heads"])
    weights = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves if "bias" not in str(path[-1])}
    wanted = sum(2 * size * (3 if "blocks" in name else 1) for name, size in weights.items())
    assert flops(propose(drafter, model, presets.chain(4), 1, 64)) == wanted
    everything = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert draft_parameters(drafter, model) == everything


STATIC, DYNAMIC = presets.sparse("eagle_26"), DynamicTree(20, 3, 4)
CASES = [("eagle3", DYNAMIC), ("eagle", STATIC), ("mtp", DYNAMIC), ("model", STATIC), ("amphista", presets.sparse())]


@pytest.mark.quick("eagle3-tree0")
@pytest.mark.parametrize(("kind", "tree"), CASES)
def test_flops_of_drafts_with_a_cache_against_xla(kind, tree, monkeypatch):
    """Levels that attend to the draft's cache and to earlier nodes, and the pass over the accepted tokens."""
    monkeypatch.setattr(library, "available", lambda: False)  # in our own kernels XLA counts nothing
    config, batch, slots = LlamaConfig(300, 64, 172, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16), 2, 600
    drafter, (model, base) = KINDS[kind].build(config, jnp.float32), abstract_params(config)
    params = jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base)
    state = jax.eval_shape(lambda: drafter.init_state(batch, slots))
    whole = jax.ShapeDtypeStruct((batch, 6), jnp.int32)
    width = len(drafter.spec.aux_hidden_layers) * config.width
    aux_hidden_states = jax.ShapeDtypeStruct((batch, 6, width), jnp.float32)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def filled(base, params, state, root):
        return drafter.propose(params, state, root, tree, BoundBase(model, base)).tokens

    def begun(base, params, state, root, aux_hidden_states, tokens):
        return drafter.begin(params, state, aux_hidden_states, tokens, root, root, BoundBase(model, base))

    for function, arguments, operators in (
        (filled, (), propose(drafter, model, tree, batch, slots)),
        (begun, (aux_hidden_states, whole), begin(drafter, model, batch, 6, slots)),
    ):
        compiled = jax.jit(function).lower(base, params, state, row, *arguments).compile()
        assert 0.85 < flops(operators) / compiled.cost_analysis()["flops"] <= 1, function


def test_heads_that_guess_at_once_read_the_bases_lm_head_once():
    for kind in ("medusa", "amphista"):
        drafter = dataclasses.replace(KINDS[kind].build(SEVEN, jnp.bfloat16), small_lm_head=LmHead(shared=True))
        operators = [op for op in propose(drafter, BASE, TREE, 3, 1024) if op.name == "lm head"]
        assert [(op.rows, op.flops) for op in operators] == [(3 * 4, 2 * 3 * 4 * D * V)]


def test_every_level_of_eagle_reads_the_cache_and_the_levels_before_it():
    drafter = KINDS["eagle"].build(SEVEN, jnp.bfloat16)
    operators = propose(drafter, BASE, TREE, 1, 1000)
    nodes, keys = [10, 10, 1], [1000 + 10, 1000 + 20, 1000 + 21]  # nodes with children, of depths 1 to 3
    scores = sum(2 * n * many * D for n, many in zip(nodes, keys, strict=True))
    assert flops(op for op in operators if op.name == "scores") == scores
    assert flops(op for op in operators if op.name == "weighted sum") == scores
    # Each level multiplies with fc and the layer, and with the lm head as the root's does.
    weights = 2 * D * D + 4 * D * D + 3 * D * MLP
    assert flops(op for op in operators if op.kind == "weights") == 2 * (sum(nodes) * weights + 22 * D * V)


def test_a_draft_model_runs_the_waiting_token_and_the_root_together():
    """A chain of 3 in closed form: passes of 2, 1 and 1 tokens in 4 layers, each with the logits of one token."""
    drafter = KINDS["model"].build(SEVEN, jnp.bfloat16)
    assert drafter.config.n_layers == 4
    operators, layer = propose(drafter, BASE, presets.chain(3), 2, 1000), 4 * D * D + 3 * D * MLP
    assert flops(op for op in operators if op.kind == "weights") == 2 * 2 * (4 * 4 * layer + 3 * D * V)
    keys = 2 * (1001 + 2) + (1001 + 3) + (1001 + 4)  # its cache has a slot more than the base's
    assert flops(op for op in operators if op.kind == "attention") == 2 * 4 * 2 * 2 * keys * D
    assert moved(op for op in operators if op.name.endswith("ranking")) == 3 * 2 * V * 4
