"""Bases in 8 and 4 bits with drafts: the same text as token by token. Drafts of few bits, with any base."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hydrajax
from hydrajax import assets
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models import backend
from hydrajax.models.quantized import QUANTIZED, Int8Tiles

PROMPTS = ["def add(a, b):\n", "import os\n\n\nclass Reader:\n    def", "for i in"]


def quantized_parts(params) -> int:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Int8Tiles))
    return sum(isinstance(leaf, Int8Tiles) for leaf in leaves)


@pytest.mark.skipif(not backend.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.parametrize("quantize", QUANTIZED)
def test_a_batch_with_a_draft_gives_the_text_without_one(quantize):
    m = hydrajax.load("shipped", "hydra++", quantize=quantize)
    assert quantized_parts(m.params.draft) >= 8
    drafted = m.generate(PROMPTS, tree="cartesian-2x2", max_new_tokens=24, batch_size=3)
    alone = m.generate(PROMPTS, draft="none", tree="root", max_new_tokens=24, batch_size=1)
    assert [list(one.output_ids) for one in drafted] == [list(one.output_ids) for one in alone]
    assert sum(one.steps for one in drafted) < 0.7 * sum(len(one.output_ids) for one in drafted)


def test_heads_in_int8_are_computed_in_int8_whatever_the_base(tmp_path):
    """Only heads whose file holds floats are computed in floats, with a float base."""
    m = hydrajax.load("shipped", "medusa")
    export_heads(tmp_path, *load_draft(assets.path("medusa"), m.model.config), format="native", dtype=jnp.float32)
    widened = m.with_draft(tmp_path)
    few_bits = backend.has_few_bits()
    assert (quantized_parts(m.params.draft) >= 8) == few_bits
    assert quantized_parts(widened.params.draft) == quantized_parts(m.params.base) == 0
    by_name = {"none": m, "int8": m, "float": widened}
    texts = {
        name: model.generate(
            PROMPTS,
            tree="root" if name == "none" else "chain-3",
            draft="none" if name == "none" else None,
            max_new_tokens=24,
        )
        for name, model in by_name.items()
    }
    ids = {name: [list(one.output_ids) for one in generated] for name, generated in texts.items()}
    assert ids["int8"] == ids["float"] == ids["none"]
    steps = {name: sum(one.steps for one in generated) for name, generated in texts.items()}
    assert abs(steps["int8"] - steps["float"]) <= 0.1 * steps["float"] < 0.1 * steps["none"]
