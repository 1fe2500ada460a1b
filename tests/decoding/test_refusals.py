"""What `make_decode_fn` and `decode_fn` refuse, and the padding of prompts."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrajax.api import make_decode_fn
from hydrajax.decoding.prompt_batch import bucket
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_bucket_is_a_power_of_two_within_the_context(length, context):
    width = bucket(length, context)
    assert width >= length
    if length <= context:
        power = 16
        while power < length:
            power *= 2
        assert width == min(power, context)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (presets.chain(5), "depth 5 is deeper than the drafter, which proposes 4 tokens ahead"),
        (TreeTopology.from_choices([[17]]), "rank 17 does not exist in a vocabulary of 17 tokens"),
    ],
)
def test_a_tree_the_drafter_cannot_fill_is_refused(lab, tree, message):
    with pytest.raises(HydrajaxError, match=message):
        make_decode_fn(lab.model, lab.drafters["hydra"], tree)


def test_no_tokens_wanted_is_refused(lab):
    with pytest.raises(HydrajaxError, match="max_new_tokens: must be at least 1, found 0"):
        make_decode_fn(lab.model, lab.drafters["hydra"], presets.chain(2), max_new_tokens=0)


@pytest.mark.parametrize(
    ("prompt", "lengths", "message"),
    [
        (np.zeros((2, 41), int), None, "prompt 0: has 41 tokens, the model's context is 40"),
        (np.zeros((2, 41), int), [40, 41], "prompt 1: has 41 tokens, the model's context is 40"),
        (np.zeros((2, 0), int), None, "prompt 0: is empty"),
        (np.zeros((2, 5), int), [5, 0], "prompt 1: is empty"),
        (np.array([[1, 2], [3, 17]]), None, r"prompt 1: token id 17 is outside the vocabulary 0\.\.16"),
        (np.array([[1, -1]]), None, "prompt 0: token id -1 is outside the vocabulary"),
        (np.zeros((2, 5), int), [5], "lengths: must be one per prompt row"),
        (np.zeros((2, 5), int), [5, 6], "lengths: row 1 has length 6, the prompt has 5 columns"),
        (np.zeros((2, 5), int), [-1, 5], "lengths: row 0 has length -1"),
        (np.zeros((1, 5), int), [3.9], r"lengths: must be int32 \[batch\], found float64"),
        (np.zeros(5, np.int32), None, r"prompt: must be int32 \[batch, tokens\], found int32 \[5\]"),
        (np.zeros((1, 5), np.float32), None, r"prompt: must be int32 \[batch, tokens\], found float32 \[1, 5\]"),
        (np.array([[1, 2**32 + 1]]), None, "prompt 0: token id 4294967297 is outside the vocabulary"),
    ],
)
def test_bad_prompts_are_refused(lab, prompt, lengths, message):
    params = Params(lab.base(0), lab.draft("hydra", 0))
    decode_fn = lab.decode_fn("hydra", "random", 24)
    with pytest.raises(HydrajaxError, match=message):
        decode_fn(params, prompt, lengths)


def test_ids_in_the_padding_are_not_looked_at(lab):
    """Padding may hold anything, -1 or 10**6 included: the same text comes out."""
    decode_fn = make_decode_fn(lab.model, lab.drafters["medusa"], presets.chain(2), max_new_tokens=4)
    params = Params(lab.base(0), lab.draft("medusa", 0))
    lengths = np.array([3, 1], np.int32)
    outs = []
    for padding in (0, -1, 10**6):
        prompt = np.full((2, 6), padding)
        prompt[0, :3], prompt[1, :1] = [4, 5, 6], [7]
        outs.append(jax.device_get(decode_fn(params, prompt, lengths)))
    for out in outs[1:]:
        np.testing.assert_array_equal(out.tokens, outs[0].tokens)
