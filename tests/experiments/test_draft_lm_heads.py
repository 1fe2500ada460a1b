"""Drafters with a chosen draft lm head."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from draft_lm_heads import LM_HEADS, drafter_for

from hydrajax.bench.shapes import PRESETS
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama import Llama

MODEL = Llama(PRESETS["tiny"], jnp.dtype("float32"))


def test_heads_have_the_chosen_lm_head():
    assert drafter_for(MODEL, "hydra++", "low-rank").lm_head == LM_HEADS["low-rank"]
    assert drafter_for(MODEL, "medusa").lm_head.rank is None


def test_drafters_without_a_choice():
    for kind, title in [("eagle", "EAGLE"), ("eagle3", "EAGLE-3"), ("lookup", "Lookup")]:
        assert drafter_for(MODEL, kind).spec.supports_dynamic_tree == (kind != "lookup")
        with pytest.raises(HydrajaxError, match=f"^lm_head: got 'shared', expected full: {title} has no other"):
            drafter_for(MODEL, kind, "shared")
