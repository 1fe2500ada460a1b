"""Drafters for models with random weights."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.measure.random_models import LM_HEADS, drafter_for
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import PRESETS

MODEL = Llama(PRESETS["tiny"], jnp.dtype("float32"))


def test_heads_have_the_lm_head_that_was_chosen():
    assert drafter_for(MODEL, "hydra++", "low-rank").lm_head == LM_HEADS["low-rank"]
    assert drafter_for(MODEL, "medusa").lm_head.rank is None


@pytest.mark.parametrize(("kind", "title"), [("eagle", "EAGLE"), ("eagle3", "EAGLE-3"), ("lookup", "Lookup")])
def test_where_there_is_none_to_choose(kind, title):
    assert drafter_for(MODEL, kind).spec.supports_dynamic_tree == (kind != "lookup")
    with pytest.raises(HydrajaxError, match=f"^lm_head: found 'shared', {title} has none to choose, only full is"):
        drafter_for(MODEL, kind, "shared")
