"""Bases in 8 and 4 bits with drafts: the same text as token by token, and drafts that are quantised too."""

from __future__ import annotations

import jax
import pytest

import hydrajax
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


def test_drafts_of_a_float_base_stay_floats():
    assert quantized_parts(hydrajax.load("shipped", "medusa").params.draft) == 0
