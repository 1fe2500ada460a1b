"""Bases in 8 and 4 bits with drafts: the same text as token by token. Drafts of few bits, with any base."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from helpers.refusals import refusal
from hydrajax import assets
from hydrajax.drafters.draft_lm_head import CLUSTERED_LM_HEAD, COPIED_LM_HEAD, LmHead
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.lowbit.int4_tiles import Int4Tiles
from hydrajax.lowbit.tiles import Int8Tiles
from hydrajax.models.base_model import BoundBase
from hydrajax.ops import trace

PROMPTS = ["def add(a, b):\n", "import os\n\n\nclass Reader:\n    def", "for i in"]


def quantized_parts(params, kind=Int8Tiles) -> int:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kind))
    return sum(isinstance(leaf, kind) for leaf in leaves)


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.quick("int4")
@pytest.mark.parametrize(("quantize", "kind"), [("int8", Int8Tiles), ("int4", Int4Tiles)], ids=["int8", "int4"])
def test_a_batch_with_a_draft_gives_the_text_without_one(quantize, kind):
    m = hydrajax.load("shipped", "hydra++", quantize=quantize)
    assert quantized_parts(m.params.draft, kind) >= 8
    drafted = m.generate(PROMPTS, tree="cartesian-2x2", max_new_tokens=24, batch_size=3)
    alone = m.generate(PROMPTS, draft="none", tree="root", max_new_tokens=24, batch_size=1)
    assert [list(one.output_ids) for one in drafted] == [list(one.output_ids) for one in alone]
    assert sum(one.steps for one in drafted) < 0.7 * sum(len(one.output_ids) for one in drafted)


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
def test_a_part_of_the_bases_lm_head_is_copied_in_its_own_bits(tmp_path):
    m = hydrajax.load("shipped", quantize="int4")
    config, some = m.model.config, Vocabulary(range(0, 128, 2))
    heads = MedusaHeads(1, config.width, config.vocab_size, small_lm_head=LmHead(shared=True, vocabulary=some))
    export_heads(tmp_path, heads, heads.init(jax.random.key(0), BoundBase(m.model, m.params.base)), format="native")
    copy, wanted = m.with_draft(tmp_path).params.draft[COPIED_LM_HEAD], m.params.base["embedding"].dequantized()
    assert isinstance(copy, Int8Tiles)
    np.testing.assert_array_equal(copy.dequantized(), wanted[:, some.tokens])


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.parametrize("quantize", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_clusters_of_the_lm_head_give_the_text_without_a_draft(tmp_path, quantize):
    m = hydrajax.load("shipped", quantize=quantize)
    config, base = m.model.config, BoundBase(m.model, m.params.base)
    heads = MedusaHeads(2, config.width, config.vocab_size, small_lm_head=LmHead(shared=True, clustered=True))
    export_heads(tmp_path, heads, heads.init(jax.random.key(0), base), format="native")
    clustered, shared = m.with_draft(tmp_path), m.with_draft(tmp_path, draft_lm_head="shared")
    found = clustered.params.draft[CLUSTERED_LM_HEAD]
    assert (found.tokens.shape, found.n_chosen) == ((64, 64), 24)
    assert CLUSTERED_LM_HEAD not in shared.params.draft
    drafted = clustered.generate(PROMPTS[0], tree="chain-2", max_new_tokens=12).output_ids
    assert list(drafted) == list(m.generate(PROMPTS[0], max_new_tokens=12).output_ids)
    for wrong, message in {"some": "got 'some', expected", "clustered-": "got 'clustered-', expected"}.items():
        refusal(lambda wrong=wrong: m.with_draft(tmp_path, draft_lm_head=wrong), f"draft_lm_head: {message}")
    needs = "draft_lm_head: requires a draft with the base's lm head, got"
    refusal(lambda: m.with_draft("lookup", draft_lm_head="clustered"), needs)


@pytest.fixture
def int8_and_float_heads(tmp_path):
    """Return the shipped base with its heads, whose file holds int8, and with the same heads from a file of floats."""
    m = hydrajax.load("shipped", "medusa")
    export_heads(tmp_path, *load_draft(assets.path("medusa"), m.model.config), format="native", dtype=jnp.float32)
    return m, m.with_draft(tmp_path)


def test_heads_in_int8_stay_int8_whatever_the_base(int8_and_float_heads):
    """Only heads whose file holds floats are floats, with a float base."""
    m, widened = int8_and_float_heads
    assert (quantized_parts(m.params.draft) >= 8) == trace.has_few_bits()
    assert quantized_parts(widened.params.draft) == quantized_parts(m.params.base) == 0


@pytest.mark.slow
def test_heads_in_int8_propose_nearly_what_they_do_in_floats(int8_and_float_heads):
    m, widened = int8_and_float_heads

    def run(model, **how):
        found = model.generate(PROMPTS, max_new_tokens=24, **how)
        return [list(one.output_ids) for one in found], sum(one.steps for one in found)

    (ids, steps), (float_ids, float_steps) = run(m, tree="chain-3"), run(widened, tree="chain-3")
    alone, most = run(m, tree="root", draft="none")
    assert ids == float_ids == alone
    assert abs(steps - float_steps) <= 0.1 * float_steps < 0.1 * most
