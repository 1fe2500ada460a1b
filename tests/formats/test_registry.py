"""Properties of every kind in the registry; new kinds are tested automatically."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from helpers.noise import noise
from hydrajax.api import make_decode_fn
from hydrajax.drafters.trainable import Trainable
from hydrajax.formats.draft_registry import KINDS, heads, kind_of, trainable, without_weights
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets

PROMPTS, MAX_NEW = [[3, 1, 4, 1, 5], [2, 7]], 12


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.quick("lookup")
def test_every_kind_decodes_the_bases_own_text(lab, name):
    drafter = KINDS[name].build(lab.model.config, jnp.float32)
    base = BoundBase(lab.model, lab.base(0))
    shapes = jax.eval_shape(lambda: drafter.init(jax.random.key(0), base))
    tree = presets.by_name(drafter.spec.default_tree)
    texts, _ = lab.references(0, PROMPTS)
    out = lab.decode(make_decode_fn(lab.model, drafter, tree, max_new_tokens=MAX_NEW), 0, noise(shapes, 3), PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        assert out.tokens[row].tolist() == lab.expected(texts[row], len(prompt), MAX_NEW)
    assert (out.accept_lengths.max() > 0) == (tree.depth > 0)
    assert KINDS[name].title


@pytest.mark.parametrize("name", KINDS)
def test_every_array_of_a_state_has_a_leading_batch_axis(lab, name):
    """So that sequences can be removed from a decode state, inserted and moved, with any drafter."""
    drafter = KINDS[name].build(lab.model.config, jnp.float32)
    chex.assert_tree_shape_prefix(drafter.init_state(3, 20), (3,))
    if name in without_weights():
        assert drafter.init(jax.random.key(0), BoundBase(lab.model, lab.base(0))) == {}
        assert kind_of(drafter) is None


def settings_of(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(heads(name).Settings)}


@pytest.mark.parametrize("name", trainable())
def test_heads_are_known_by_their_name_with_and_without_a_prefix_layer(lab, name):
    kind, base = heads(name), BoundBase(lab.model, lab.base(0))
    drafter = kind.for_base(lab.model.config, jnp.float32)
    assert isinstance(drafter, Trainable)
    assert kind_of(drafter) == name
    for prefix in (False, True) if "prefix" in settings_of(name) else ():
        drafter = kind.for_base(lab.model.config, jnp.bfloat16, kind.Settings(prefix=prefix, num_draft_heads=3))
        assert (kind_of(drafter), drafter.prefix is not None, drafter.spec.prefix_layer) == (name, prefix, prefix)
        assert (drafter.spec.depth, drafter.spec.num_draft_heads, drafter.width, drafter.vocab_size) == (3, 3, 32, 17)
        assert drafter.dtype == jnp.bfloat16
        boxed = jax.eval_shape(lambda drafter=drafter: drafter.init(jax.random.key(0), base))
        assert ("prefix" in boxed) == prefix


def test_a_setting_of_one_name_is_the_same_in_all_kinds():
    """A training file may have settings of other kinds at their defaults, and records of runs do."""
    found = [
        (field.name, field.type, field.default)
        for name in trainable()
        for field in dataclasses.fields(heads(name).Settings)
    ]
    assert len(set(found)) == len({name for name, _, _ in found})
