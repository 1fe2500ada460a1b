"""Simulated tokens_per_step: the parts against brute force, the result against real decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.draft_heads import forced_logits
from helpers.loss_examples import check_ranks, drafter_of, random_params
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.bench.trees.simulation import accepted_lengths
from hydrajax.decoding.state import Params
from hydrajax.drafters.ranks import head_ranks
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import IGNORED
from hydrajax.train.tasks.heads_task import Tally
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

PROMPT, NEW, ROWS = 9, 30, 6
WIDE = presets.cartesian([12, 4])  # so wide that random heads are sometimes right


@st.composite
def trees(draw) -> TreeTopology:
    known = {()}
    for _ in range(draw(st.integers(0, 15))):
        parent = draw(st.sampled_from(sorted(path for path in known if len(path) < 4)))
        known.add((*parent, draw(st.integers(0, 4))))
    return TreeTopology.from_choices(known - {()})


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(0, 2**32 - 1))
def test_accepted_lengths_equal_brute_force(tree, seed):
    ranks = np.random.default_rng(seed).integers(0, 6, size=(4, 2, 7))  # rank 5 is in no tree
    found = accepted_lengths(tree, ranks)
    for place in np.ndindex(2, 7):
        path = tuple(ranks[(slice(None), *place)].tolist())
        assert found[place] == max((len(c) for c in tree.choices if c == path[: len(c)]), default=0)


def test_tally_by_hand():
    """Nine tokens, of which 2..8 are targets, and a chain of 2."""
    labels = np.array([[IGNORED, IGNORED, 5, 5, 5, 5, 5, 5, 5]])
    ranks = np.full((2, 1, 9), 9)
    ranks[:, 0, 1] = 0, 0  # drafted before token 2: accepts 3 and 4
    ranks[:, 0, 4] = 0, 1  # before token 5: accepts 6
    ranks[:, 0, 6] = 0, 0  # before token 7: accepts 8; a second one would be beyond the end
    tally = Tally(presets.chain(2), 2, 2)
    tally.add(ranks, labels)
    report = tally.report()
    assert report["tokens_per_step"] == 7 / 3
    # Head 0 answers at positions 0..6 for tokens 2..8, head 1 at 0..5 for 3..8: right are those set above.
    assert report["top1"] == [3 / 7, 1 / 6]
    assert report["top2"] == [3 / 7, 2 / 6]


@pytest.fixture(scope="module")
def generated(tiny_model):
    """``(prompts, greedy continuations)`` of the tiny base, each int32 [rows, tokens]."""
    model, base = tiny_model
    prompts = np.random.default_rng(0).integers(0, 61, (ROWS, PROMPT), dtype=np.int32)
    out = make_autoregressive_fn(model, max_new_tokens=NEW)(Params(base, {}), prompts)
    return prompts, np.asarray(out.tokens)


@pytest.mark.quick("hydra", "eagle3")
@pytest.mark.parametrize("name", ["hydra", "medusa", "eagle3"])
def test_ranks_equal_numpy(tiny_model, name):
    """EAGLE-3's vocabulary has half of the tokens; the others rank after all 61."""
    (model, base), drafter, bound = tiny_model, drafter_of(name), BoundBase(*tiny_model)
    draft = random_params(drafter, bound, seed=1)
    tokens = np.random.default_rng(2).integers(0, 61, (2, 11), dtype=np.int32)

    @jax.jit
    def ranks_and_logits(draft, tokens):
        aux_hidden_states = run_base(model, base, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        ranks = drafter.ranks(draft, aux_hidden_states, {"tokens": tokens}, bound, chunk_tokens=8, depth=3)
        return ranks, forced_logits(drafter, draft, aux_hidden_states, tokens, bound)

    found, logits = map(np.asarray, ranks_and_logits(draft, tokens))
    check_ranks(found, logits, tokens)


def test_of_equal_logits_the_smaller_id_ranks_first(tiny_model):
    model, base = tiny_model
    drafter = drafter_of("medusa")
    draft = jax.tree.map(jnp.zeros_like, random_params(drafter, BoundBase(model, base), seed=1))  # all logits are 0
    tokens = np.array([[4, 0, 60, 7, 3]], np.int32)
    aux_hidden_states = jnp.ones((1, 5, 32))
    bound, batch = BoundBase(model, base), {"tokens": tokens}
    ranks = jax.jit(lambda: head_ranks(drafter, draft, aux_hidden_states, batch, bound, chunk_tokens=64, depth=3))()
    assert ranks[0, 0, :3].tolist() == [60, 7, 3]


def tally_of(tree, model, base, drafter, draft, batch) -> Tally:
    forward = run_base(model, base, batch["tokens"], drafter.spec.aux_hidden_layers, batch.get("segments"))
    bound = BoundBase(model, base, block=forward.block)
    ranks = drafter.ranks(draft, forward.aux_hidden_states, batch, bound, chunk_tokens=32, depth=3)
    tally = Tally(tree, 3, 5)
    tally.add(np.asarray(ranks), batch["labels"], batch.get("segments"))
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hydra", "hydra++", "eagle", "eagle3", "mtp", "gemma4-assistant"])
def test_tokens_per_step_is_what_decoding_gives(tiny_model, generated, name):
    model, base = tiny_model
    drafter = drafter_of(name)
    draft = random_params(drafter, BoundBase(model, base), seed=1)
    prompts, outputs = generated
    decode = make_decode_fn(model, drafter, WIDE, max_new_tokens=NEW)
    out = jax.device_get(decode(Params(base, draft), prompts))
    np.testing.assert_array_equal(out.tokens, outputs)
    assert len(set(out.steps.tolist())) > 1  # else the test could not fail
    assert 1.05 < out.tokens_per_step() < 3

    tokens = np.concatenate([prompts, outputs], axis=1)
    labels = np.where(np.arange(PROMPT + NEW) < PROMPT, IGNORED, tokens)
    tally = tally_of(WIDE, model, base, drafter, draft, {"tokens": tokens, "labels": labels})
    assert (tally._tokens, tally._steps) == (out.lengths.sum(), out.steps.sum())

    # The same documents, of various lengths, packed in pairs.
    lengths = np.array([NEW, 7, 12, NEW, 1, 20])
    batch = {name: np.zeros((3, 2 * (PROMPT + NEW)), np.int32) for name in ("tokens", "labels", "segments")}
    batch["labels"][:] = IGNORED
    for document, length in enumerate(PROMPT + lengths):
        at = PROMPT + lengths[document - 1] if document % 2 else 0
        place = document // 2, slice(at, at + length)
        batch["tokens"][place], batch["labels"][place] = tokens[document, :length], labels[document, :length]
        batch["segments"][place] = 1 + document % 2
    packed = tally_of(WIDE, model, base, drafter, draft, batch)
    assert packed._tokens == lengths.sum()
    expected = [steps_up_to(out.accept_lengths[row], length) for row, length in enumerate(lengths)]
    assert packed._steps == sum(expected)
    assert packed.report()["tokens_per_step"] == lengths.sum() / sum(expected)


def steps_up_to(accept_lengths: np.ndarray, length: int) -> int:
    """Steps to generate ``length`` tokens: those of a longer run, the last one cut."""
    emitted = np.cumsum(accept_lengths[accept_lengths >= 0] + 1)
    return int(np.searchsorted(emitted, length)) + 1
