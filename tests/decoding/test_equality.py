"""Tree decoding gives exactly the tokens of the base in float32.

The reference is the loop without a cache of `Lab.references`. Trees and drafters come from a small pool to limit
compilation; hypothesis picks from it and varies parameters, prompts and, through the oracle, which guesses are right.
"""

import jax
import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from helpers.how import sampling
from helpers.tree_tools import random_tree
from hydrajax.api import make_decode_fn
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import Params
from hydrajax.models.attention import causal_mask
from hydrajax.trees.dynamic import DynamicTree

MAX_NEW = 24
# Rounding could decide a smaller margin of the reference. Float32 logits differ by about 1e-6 between batch shapes;
# fewer than 1 in 100 random prompts are skipped.
HEALTHY = 2e-5
UNTRAINED = [("none", "root"), ("hydra++", "random"), ("eagle", "grown")]  # tests/drafters has the others
SEVERAL = (3, 11, 5)  # EOS ids

base_seeds = st.integers(0, 2)
# Lengths first: errors are likely at the ends of the range (1 and the context), which hypothesis tries.
prompts = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(0, 16), min_size=n, max_size=n))


def emitted(out, row: int) -> list[int]:
    return out.tokens[row, : out.lengths[row]].tolist()


@settings(max_examples=24, deadline=None)
@given(st.sampled_from(UNTRAINED), base_seeds, st.integers(0, 2), st.tuples(prompts, prompts, prompts))
def test_untrained_drafters_never_change_the_tokens(lab, case, base_seed, draft_seed, three):
    texts, margin = lab.references(base_seed, three)
    assume(margin > HEALTHY)
    drafter, tree = case
    decode_fn = lab.decode_fn(drafter, tree, MAX_NEW)
    out = lab.decode(decode_fn, base_seed, lab.draft(drafter, draft_seed), three)
    for row, prompt in enumerate(three):
        assert emitted(out, row) == lab.expected(texts[row], len(prompt), MAX_NEW)
        assert out.lengths[row] == min(MAX_NEW, lab.context - len(prompt))
    event(f"{drafter}: longest acceptance {out.accept_lengths.max()}")
    assert drafter != "none" or out.accept_lengths.max() <= 0


@st.composite
def any_trees(draw):
    """Draw static trees, most of which skip ranks, and dynamic ones."""
    if draw(st.booleans()):
        n_choices, depth, widest = draw(st.integers(1, 24)), draw(st.integers(1, 6)), draw(st.integers(2, 17))
        return random_tree(draw(st.integers(0, 10**6)), n_choices, depth, widest)
    expansions, top_k = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    return DynamicTree(1 + draw(st.integers(1, min(top_k + expansions * top_k**2, 24))), expansions, top_k)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["eagle", "eagle3", "hydra", "model", "sure model"]), any_trees(), base_seeds, st.integers(0, 2),
    st.lists(prompts, min_size=1, max_size=3),
)  # fmt: skip
def test_no_tree_changes_the_tokens(lab, drafter, tree, base_seed, draft_seed, some):
    """Every example compiles another tree."""
    assume(tree.depth <= lab.drafters[drafter].spec.depth)
    assume(not isinstance(tree, DynamicTree) or tree.expansions < lab.drafters[drafter].spec.depth)
    texts, margin = lab.references(base_seed, some)
    assume(margin > HEALTHY)
    decode_fn = make_decode_fn(lab.model, lab.drafters[drafter], tree, max_new_tokens=MAX_NEW)
    out = lab.decode(decode_fn, base_seed, lab.draft(drafter, draft_seed), some)
    for row, prompt in enumerate(some):
        assert emitted(out, row) == lab.expected(texts[row], len(prompt), MAX_NEW)
    event(f"{drafter}: longest acceptance {out.accept_lengths.max()}")


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from([("skips ranks", ()), ("random", ()), ("random", SEVERAL)]), base_seed=base_seeds,
    three=st.tuples(prompts, prompts, prompts), salt=st.integers(0, 99), seed=st.integers(0, 2**32 - 1),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)  # fmt: skip
def test_right_guesses_of_an_oracle_are_accepted(lab, case, base_seed, three, salt, seed, skill):
    """Accept lengths vary on every path of the tree; tokens stay the same and step counts are exact."""
    texts, margin = lab.references(base_seed, three)
    assume(margin > HEALTHY)
    right, (tree, eos_ids) = np.random.default_rng(seed).random((3, lab.context + 5)) < skill, case
    params = lab.oracle_params(texts, right, salt)
    out = lab.decode(lab.decode_fn("oracle", tree, MAX_NEW, eos_ids), base_seed, params, three)
    for row, prompt in enumerate(three):
        assert emitted(out, row) == lab.expected(texts[row], len(prompt), MAX_NEW, eos_ids)
        expected = lab.accept_lengths(lab.trees[tree], right[row], salt, len(prompt), int(out.lengths[row]))
        assert out.accept_lengths[row, : out.steps[row]].tolist() == expected


@pytest.mark.parametrize(("drafter", "tree"), [("none", "root"), ("hydra++", "random"), ("oracle", "random")])
def test_prompts_at_the_ends_of_the_context(lab, drafter, tree):
    """Prompts of one token, of the context less one, and of the whole context, which leaves no room for output."""
    random = np.random.default_rng(1)
    three = [random.integers(0, 17, size=n).tolist() for n in (1, lab.context - 1, lab.context)]
    texts, margin = lab.references(1, three)
    assert margin > HEALTHY
    params = lab.oracle_params(texts) if drafter == "oracle" else lab.draft(drafter, 0)
    out = lab.decode(lab.decode_fn(drafter, tree, MAX_NEW), 1, params, three)
    assert out.lengths.tolist() == [MAX_NEW, 1, 0]
    assert [emitted(out, row) for row in range(3)] == [
        lab.expected(text, len(prompt), MAX_NEW) for text, prompt in zip(texts, three, strict=True)
    ]
    assert out.steps[1:].tolist() == [1, 0]


@pytest.mark.parametrize("drafter", ["none", "hydra++"])
def test_a_batch_without_room_takes_no_step(lab, drafter):
    full = [[3] * lab.context] * 3
    tree = "root" if drafter == "none" else "random"
    out = lab.decode(lab.decode_fn(drafter, tree, MAX_NEW), 0, lab.draft(drafter, 0), full)
    assert out.lengths.tolist() == out.steps.tolist() == [0, 0, 0]


def test_the_cache_contains_exactly_the_accepted_tokens(lab):
    """After steps with rejections on branching paths, keys and values equal those of one pass over the tokens."""
    random = np.random.default_rng(3)
    three = [random.integers(0, 17, size=n).tolist() for n in (1, 6, 11)]
    texts, _ = lab.references(0, three)
    right = random.random((3, lab.context + 5)) < 0.7
    params = Params(lab.base(0), lab.oracle_params(texts, right, salt=5))
    engine = lab.decode_fn("oracle", "random", MAX_NEW).engine
    state = lab.quick_jit(engine.prefill)(params, *right_padded(three, 16), sampling(None, 3, lab.vocab))
    step = lab.quick_jit(engine.decode_step)
    for _ in range(6):
        state = step(params, state)
    accepted = np.asarray(state.output.accept_lengths)[:, :6]
    assert 0 in accepted
    assert accepted.max() >= 2
    positions = np.broadcast_to(np.arange(lab.context), texts.shape)
    forward = lab.quick_jit(lambda p: lab.model.apply({"params": p}, texts, positions, causal_mask(lab.context)))
    whole = forward(params.base).block
    for row, start in enumerate(map(len, three)):
        filled = start + int(state.output.lengths[row])
        assert state.target.cache.lengths[row] == filled
        for mine, full in zip(jax.tree.leaves(state.target.cache.layers), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(mine[row, :, :filled], full[row, :, :filled], atol=2e-4, rtol=1e-4)
