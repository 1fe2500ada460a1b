"""Compare a drafter with an added lookup branch with the combined tree in lists and dictionaries."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import CONTEXT, DRAFTERS, NEW, VOCAB, quick_jit, shared_lab
from helpers.lab import TREES as LAB_TREES
from helpers.tree_tools import random_tree
from hydrajax.api import make_decode_fn
from hydrajax.bench.questions.contenders import folder_name
from hydrajax.bench.timing import example_topology
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.decode_loop import run_steps
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.several import with_lookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets

ADDED = 4
TREES = LAB_TREES | {"shallow": random_tree(3, 9, depth=2, widest=6)}
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]


def chain_of(text: list[int], lookup: PromptLookup, length: int) -> list[int]:
    """Return the tokens after the latest of the longest earlier matches, of up to 4 tokens."""
    for n in range(lookup.longest, lookup.shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                return (text[end:] * length)[:length]
    return []


def combined(tokens: list[int], parents: list[int], chain: list[int], added: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of the ``added`` nodes: the part of the chain that is not in the tree."""
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    at, rest = 0, list(chain)
    while rest and (at, rest[0]) in nodes:
        at = nodes[at, rest.pop(0)]
    new = (rest + [-1] * added)[:added]
    return new, [at, *range(len(tokens), len(tokens) + added - 1)]


def longest_true_path(tokens: list[int], parents: list[int], true: list[int]) -> int:
    depths = {0: 0}
    for node in range(1, len(tokens)):
        depth = depths.get(parents[node])
        if depth is not None and depth < len(true) and tokens[node] == true[depth]:
            depths[node] = depth + 1
    return max(depths.values())


@functools.cache
def steps_of(name: str, tree: str):
    """Return prefill and a step that also returns the proposal, with and without lookup."""
    lab = shared_lab()
    engine = make_decode_fn(lab.model, with_lookup(DRAFTERS[name], ADDED), TREES[tree], max_new_tokens=NEW).engine

    def step(params, state):
        proposal = engine.propose(params, state)
        base, drafted = engine.bind(params), state.draft.drafter
        alone = engine.program.drafter.drafter.propose(
            params.draft, drafted, state.target.root, engine.program.tree, base
        )
        parents = jnp.broadcast_to(alone.tree.parents, alone.tokens.shape)
        forward, logits = engine.verify(params, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        seen = alone.tokens, parents, proposal.tokens, proposal.tree.parents, outcome.tokens, outcome.counts
        return engine.observe(params, state, proposal, outcome), seen

    return quick_jit(engine.prefill), quick_jit(step)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("hydra", "shallow"),
        ("hydra++", "random"),
        ("hydra", "grown"),
        ("medusa", "root"),
        ("eagle", "cartesian"),
        ("model", "skips ranks"),
    ],
)
@pytest.mark.quick("hydra-shallow")
def test_every_step_equals_the_reference(lab, name, tree):
    """Compare the nodes of the heads, those of the chain and the accepted tokens of three sequences."""
    prefill, step = steps_of(name, tree)
    lookup, batch = PromptLookup(), len(PROMPTS)
    params = Params(lab.base(0), lab.draft(name, 0))
    texts, _ = lab.references(0, PROMPTS)
    padded = np.full((batch, CONTEXT), VOCAB - 1, np.int32)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    places = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    ends = places + NEW
    state = prefill(params, padded, places, sampling(None, batch, VOCAB))
    deeper = shared = gained = 0
    while not state.output.done.all():
        was_done = np.asarray(state.output.done)
        state, found = jax.device_get(step(params, state))
        for row in np.flatnonzero(~was_done):
            alone, above, tokens, parents, emitted, count = (array[row].tolist() for array in found)
            before, true = texts[row, : places[row] + 1].tolist(), texts[row, places[row] + 1 : ends[row]].tolist()
            assert tokens[: len(alone)] == alone
            assert parents[: len(alone)] == above
            chain = chain_of(before, lookup, TREES[tree].depth + ADDED)
            assert (tokens[len(alone) :], parents[len(alone) :]) == combined(alone, above, chain, ADDED)
            accepted = longest_true_path(tokens, parents, true)
            assert count == accepted + 1
            assert emitted[:count] == [before[-1], *true[:accepted]]
            deeper += accepted > TREES[tree].depth
            shared += parents[len(alone)] > 0
            gained += accepted > longest_true_path(alone, above, true)
            places[row] += count
    assert (places == ends).all()
    assert deeper > 0 or TREES[tree].depth >= ADDED - 1
    assert gained > 0
    assert shared > 0 or not TREES[tree].depth


# --- decoding ---------------------------------------------------------------------------------------------------------


@functools.cache
def decoder(name: str, tree, rule=None, eos_ids: tuple[int, ...] = ()):
    drafter = with_lookup(DRAFTERS[name], ADDED)
    return make_decode_fn(shared_lab().model, drafter, tree, rule, max_new_tokens=NEW, eos_ids=eos_ids)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [Greedy(), ExactSampling(0.5), ExactSampling(0.9, top_k=6)])
def test_decoding_gives_the_tokens_of_the_base(lab, seed, rule):
    """Cases cover random trees and each kind of heads."""
    name = ["hydra", "medusa", "amphista", "hydra++"][seed]
    tree = random_tree(10 + seed, 12, depth=3, widest=5)
    found = lab.decode(decoder(name, tree, rule), 0, lab.draft(name, 0), PROMPTS, rule=rule, seed=seed)
    expected = lab.plainly(PROMPTS, rule, seed)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.steps.sum() < expected.steps.sum()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 5, 11])
def test_endings_inside_the_branch(lab, limit):
    """The limit or EOS can be anywhere among the accepted tokens."""
    texts, _ = lab.references(0, PROMPTS)
    tree, heads = TREES["cartesian"], lab.draft("hydra", 0)
    found = lab.decode(decoder("hydra", tree), 0, heads, PROMPTS, limits=limit)
    for row, prompt in enumerate(PROMPTS):
        assert found.tokens[row, : found.lengths[row]].tolist() == lab.expected(texts[row], len(prompt), limit)
    eos = int(texts[0, len(PROMPTS[0]) + limit])
    ended = lab.decode(decoder("hydra", tree, eos_ids=(eos,)), 0, heads, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        assert ended.tokens[row, : ended.lengths[row]].tolist() == lab.expected(texts[row], len(prompt), NEW, (eos,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hydra++", "model"])
def test_a_second_turn_equals_one_long_prompt(lab, name):
    """Text after an answer gives the same result as one prompt with everything before."""
    engine = make_decode_fn(lab.model, with_lookup(DRAFTERS[name], ADDED), TREES["chain"], max_new_tokens=8).engine
    params, drawn = Params(lab.base(0), lab.draft(name, 0)), sampling(None, 2, VOCAB)
    prompt, lengths = np.array([[3, 1, 4, 1], [2, 7, 0, 0]], np.int32), np.array([4, 2], np.int32)
    more, counts = np.array([[5, 3, 1, 0], [9, 0, 0, 0]], np.int32), np.array([3, 1], np.int32)
    start = quick_jit(functools.partial(engine.prefill, slots=CONTEXT + 20))
    loop = quick_jit(lambda params, state: run_steps(engine, params, state))
    first = loop(params, start(params, prompt, lengths, drawn))
    extended = quick_jit(engine.extend)(params, first, more, counts, drawn)
    answers = [result_of(state.output).ids() for state in (first, loop(params, extended))]
    before = [prompt[row, : lengths[row]].tolist() + answers[0][row] for row in range(2)]
    whole = [text + more[row, : counts[row]].tolist() for row, text in enumerate(before)]
    texts, _ = lab.references(0, whole)
    for row in range(2):
        assert answers[1][row] == lab.expected(texts[row], len(whole[row]), 8)
    # The history of lookup does not depend on chunking either.
    prompt, lengths = right_padded([np.array(text, np.int32) for text in whole], 16)
    found, fresh = extended.draft.sources[0], start(params, prompt, lengths, drawn).draft.sources[0]
    np.testing.assert_array_equal(found.lengths, fresh.lengths)
    np.testing.assert_array_equal(found.latest, fresh.latest)
    for row, length in enumerate(map(len, whole)):
        np.testing.assert_array_equal(found.tokens[row, :length], fresh.tokens[row, :length])
        np.testing.assert_array_equal(found.previous[row, :, :length], fresh.previous[row, :, :length])


@pytest.mark.slow
def test_typical_acceptance_covers_tree_and_branch(lab):
    """If every token passes the threshold, the longest path is accepted, which is the branch."""
    rule = Typical(epsilon=0.0)
    found = lab.decode(decoder("hydra", TREES["one node"], rule), 0, lab.draft("hydra", 0), PROMPTS, rule=rule)
    assert found.accept_lengths.max() in (ADDED, ADDED + 1)


@pytest.mark.slow
def test_it_is_never_worse_than_either_alone_on_average(lab):
    steps = {}
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, 6).tolist() for seed in range(8)]
    tree, heads = TREES["cartesian"], lab.draft("hydra", 0)
    lookup = make_decode_fn(lab.model, PromptLookup(), presets.chain(ADDED), max_new_tokens=NEW)
    ways = {"both": decoder("hydra", tree), "heads": lab.decode_fn("hydra", "cartesian", NEW), "lookup": lookup}
    for name, decode_fn in ways.items():
        params = {} if name == "lookup" else heads
        found = [lab.decode(decode_fn, 0, params, prompts[i : i + 4]) for i in (0, 4)]
        steps[name] = sum(int(out.steps.sum()) for out in found)
    assert steps["both"] < min(steps["heads"], steps["lookup"])


# --- names and errors -------------------------------------------------------------------------------------------------


def test_names():
    for name, inner, nodes in (("lookup+hydra++", "hydra++", 5), ("lookup-8+path/to+heads", "path/to+heads", 8)):
        ref = DraftRef.parse(name)
        assert (ref.name, ref.nodes, ref.sources) == (inner, nodes, ("lookup",))
        assert ref.wrap(DRAFTERS["hydra++"]) == with_lookup(DRAFTERS["hydra++"], nodes)
    assert not any(DraftRef.parse(name).sources for name in ("lookup", "hydra++", "./lookup+x", None, PromptLookup()))
    for name in ("lookup+", "lookup+lookup", "lookup+none", "lookup-3+lookahead-3-3-3", "lookup+lookup+hydra"):
        with pytest.raises(HydrajaxError, match=r"expected heads or a model after 'lookup\+'"):
            DraftRef.parse(name)
    with pytest.raises(HydrajaxError, match=r"^draft: got 1000 nodes for lookup and corpus, expected 0 to 999$"):
        DraftRef.parse("lookup-1000+hydra")
    assert folder_name("lookup-8+path/to/heads") == "lookup-8+heads"
    assert title_of(with_lookup(DRAFTERS["hydra++"])) == "Hydra++ with lookup"


def test_sizes():
    drafter, tree = with_lookup(DRAFTERS["hydra++"], 7), presets.cartesian([2, 2])
    assert (drafter.spec.verified_nodes(tree), drafter.spec.longest_path(tree)) == (14, 9)


@pytest.mark.parametrize("tree", ["root", "shallow", "grown"])
def test_timing_uses_a_tree_of_the_same_shape(lab, tree):
    """`example_topology`, which is used for timing, has the shapes and the depth of a proposal."""
    drafter, heads = with_lookup(DRAFTERS["hydra"], ADDED), lab.draft("hydra", 0)
    engine = make_decode_fn(lab.model, drafter, TREES[tree], max_new_tokens=NEW).engine
    base = BoundBase(lab.model, lab.base(0))

    def propose():
        return drafter.propose(heads, drafter.init_state(2, 30), jnp.zeros(2, jnp.int32), TREES[tree], base).tree

    proposed, timed = jax.eval_shape(propose), jax.eval_shape(lambda: example_topology(engine, 2))
    for name in ("parents", "depths", "mask", "paths"):
        assert getattr(timed, name).shape == getattr(proposed, name).shape
    assert proposed.depth == engine.depth == TREES[tree].depth + ADDED


def test_it_is_hashable_and_its_state_has_a_leading_batch_axis():
    drafter = with_lookup(DRAFTERS["hydra"])
    assert hash(drafter) == hash(dataclasses.replace(drafter))
    state = jax.eval_shape(lambda: drafter.init_state(3, 20))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state))
