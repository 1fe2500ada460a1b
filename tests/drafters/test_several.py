"""Compare trees out of several drafts with paths in dictionaries, and their outputs with those of the base."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.lab import DRAFTERS, NEW, TREES, quick_jit, shared_lab
from helpers.tree_tools import random_tree
from hydrajax.api import make_decode_fn
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.chains import Chains, estimated
from hydrajax.drafters.corpus import Corpus
from hydrajax.drafters.corpus_search import CorpusSearch
from hydrajax.drafters.drafter import CORPUS, Draw, Proposal
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.merging import merged
from hydrajax.drafters.several import FromText, Several
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.models.base_model import BoundBase
from hydrajax.trees.presets import by_name

BOTH = (PromptLookup(), CorpusSearch())
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
LINES, DEPTH = 5, 6  # chains, and their tokens

# --- estimates --------------------------------------------------------------------------------------------------------


def votes(tokens, lengths, survival, doubt) -> list[list[float]]:
    """Return the estimates of each chain, chain by chain."""
    weights = [doubt ** (max(lengths) - length) if length else 0 for length in lengths]
    found = []
    for line, length in zip(tokens, lengths, strict=True):
        found.append([])
        right = 1.0
        for place in range(len(line)):
            if not length or min(line[: place + 1]) < 0:
                break
            right *= survival[min(length + place, len(survival)) - 1]
            agree = [w for w, other in zip(weights, tokens, strict=True) if other[: place + 1] == line[: place + 1]]
            found[-1].append(right * sum(agree) / sum(weights))
    return found


def test_estimates():
    rng, survival, doubt = np.random.default_rng(0), (0.3, 0.5, 0.8), 0.6
    tokens = rng.integers(-1, 2, (20, LINES, DEPTH))
    tokens[:, :, 0] = 1
    lengths = rng.integers(0, 6, (20, LINES))
    found = jax.jit(functools.partial(estimated, survival=survival, doubt=doubt))(tokens, lengths)
    for row in range(len(tokens)):
        expected = votes(tokens[row].tolist(), lengths[row].tolist(), survival, doubt)
        for line in range(LINES):
            p = np.exp(found.log_p[row, line])
            np.testing.assert_allclose(p, [*expected[line], *[0] * DEPTH][:DEPTH], rtol=1e-5)


# --- the tree ---------------------------------------------------------------------------------------------------------


def random_case(seed: int, rows: int):
    """Return a static tree filled with random tokens, and random chains, whose paths often meet."""
    rng, tree = np.random.default_rng(seed), random_tree(seed, 9, depth=3, widest=3)
    tokens = rng.integers(0, 9, (rows, tree.size))
    for row, children in ((row, children) for row in range(rows) for children in tree.children):
        own = children[children >= 0]
        tokens[row, own] = rng.choice(4, len(own), replace=False)  # siblings differ
    log_p = np.zeros((rows, tree.size))
    for node in range(1, tree.size):
        log_p[:, node] = log_p[:, tree.parents[node]] + np.log(rng.uniform(0.2, 0.95, rows))
    tokens[0, -1] = -1
    chains = rng.integers(0, 3, (rows, LINES, DEPTH))
    chains[:, :, 4:][rng.random((rows, LINES, 2)) < 0.3] = -1
    chains = np.where(np.cumsum(chains < 0, axis=2) > 0, -1, chains)
    estimates = np.cumsum(np.log(rng.uniform(0.2, 0.95, chains.shape)), axis=2)
    estimates = np.where(chains < 0, -np.inf, estimates)
    chains[1], estimates[1] = -1, -np.inf  # nothing found
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), tree.topology, log_p=jnp.asarray(log_p, jnp.float32))
    return tree, proposal, Chains(jnp.asarray(chains, jnp.int32), jnp.asarray(estimates, jnp.float32))


def best_paths(tree, proposal: Proposal, chains: Chains, row: int, size: int) -> dict[tuple[int, ...], float]:
    """Return the paths with the highest estimates."""
    tokens, found = np.asarray(proposal.tokens)[row], {}
    for node in range(1, tree.size):
        path = tuple(tokens[tree.node_paths[node][1 : tree.depths[node] + 1]].tolist())
        if min(path) >= 0:
            found[path] = float(proposal.log_p[row, node])
    for line, log_p in zip(np.asarray(chains.tokens)[row].tolist(), np.asarray(chains.log_p)[row], strict=True):
        for place in range(DEPTH):
            if line[place] >= 0:
                path = tuple(line[: place + 1])
                found[path] = max(found.get(path, -math.inf), float(log_p[place]))
    return dict(sorted(found.items(), key=lambda item: -item[1])[: size - 1])


@pytest.mark.parametrize("seed", range(3))
def test_the_tree_has_the_best_paths(seed):
    rows, size = 24, (7, 14, 60)[seed]
    tree, proposal, chains = random_case(seed, rows)
    merge = jax.jit(lambda proposal, chains: merged(proposal._replace(tree=tree.topology), chains, size, DEPTH))
    found = jax.device_get(merge(proposal._replace(tree=()), chains))
    for row in range(rows):
        expected = best_paths(tree, proposal, chains, row, size)
        tokens, parents = found.tokens[row].tolist(), found.tree.parents[row].tolist()
        assert (tokens[0], parents[0]) == (proposal.tokens[row, 0], -1)
        paths = {0: ()}
        for node in range(1, size):
            assert (tokens[node] < 0) == (parents[node] < 0)
            if tokens[node] >= 0:
                paths[node] = (*paths[parents[node]], tokens[node])  # a parent comes first
        assert len(set(paths.values())) == len(paths)
        assert set(paths.values()) == {(), *expected}


# --- decoding ---------------------------------------------------------------------------------------------------------


@functools.cache
def decoder(name: str, tree, rule=None, more: int = 6):
    drafter = FromText(BOTH) if name == "text" else Several(DRAFTERS[name], BOTH, more)
    return make_decode_fn(shared_lab().model, drafter, tree, rule, max_new_tokens=NEW)


def drafts(lab, name: str, texts=()) -> dict:
    """Return the parameters of a draft that has seen these texts."""
    corpus = Corpus(512)
    for ids, prompt in texts:
        corpus.remember(ids, prompt)
    return {CORPUS: corpus} if name == "text" else {**lab.draft(name, 0), CORPUS: corpus}


CASES = [
    pytest.param(Greedy(), "hydra", "cartesian"),
    pytest.param(Greedy(), "text", "best", marks=pytest.mark.slow),
    pytest.param(ExactSampling(0.8), "text", "chain", marks=pytest.mark.slow),
    pytest.param(ExactSampling(0.8), "hydra++", "grown", marks=pytest.mark.slow),
    pytest.param(Greedy(), "eagle", "grown", marks=pytest.mark.slow),
    pytest.param(Greedy(), "model", "cartesian", marks=pytest.mark.slow),
    pytest.param(Greedy(), "medusa", "root", marks=pytest.mark.slow),
    pytest.param(ExactSampling(0.8), "medusa", "random", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rule", "name", "tree"), CASES)
def test_outputs_are_the_bases_and_the_corpus_shortens_them(lab, rule, name, tree):
    tree = by_name("best-10") if tree == "best" else TREES[tree]
    expected = lab.plainly(PROMPTS, rule, 0)
    texts = list(zip(expected.ids(), PROMPTS, strict=True))
    first = lab.decode(decoder(name, tree, rule), 0, drafts(lab, name), PROMPTS, rule=rule, seed=0)
    again = lab.decode(decoder(name, tree, rule), 0, drafts(lab, name, texts), PROMPTS, rule=rule, seed=0)
    np.testing.assert_array_equal(first.tokens, expected.tokens)
    np.testing.assert_array_equal(again.tokens, expected.tokens)
    assert again.steps.sum() < 0.6 * first.steps.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hydra", "eagle"])
@pytest.mark.parametrize("tree", ["cartesian", "grown"])
def test_chains_take_the_place_of_the_drafters_own_nodes(lab, name, tree):
    """With no node more, a step verifies as many nodes as with the drafter alone."""
    tree, drafter = TREES[tree], Several(DRAFTERS[name], BOTH, 0)
    assert drafter.spec.verified_nodes(tree) == tree.size
    expected = lab.plainly(PROMPTS, Greedy(), 0)
    texts = list(zip(expected.ids(), PROMPTS, strict=True))
    found = {}
    for known, corpus in (("nothing", ()), ("the texts", texts)):
        found[known] = lab.decode(decoder(name, tree, None, 0), 0, drafts(lab, name, corpus), PROMPTS)
        np.testing.assert_array_equal(found[known].tokens, expected.tokens)
    assert found["the texts"].steps.sum() < 0.8 * found["nothing"].steps.sum()
    assert found["the texts"].accept_lengths.max() == tree.depth


def test_a_draft_that_draws_keeps_its_own_tree(lab):
    """Rejection sampling relies on q, so with no node more there is nothing but the drafter's own proposal."""
    drafter, own, tree = Several(DRAFTERS["hydra"], BOTH, 0), DRAFTERS["hydra"], TREES["cartesian"]
    params, base = drafts(lab, "hydra", [([4, 5, 6] * 8, [3])]), BoundBase(lab.model, lab.base(0))

    @quick_jit
    def run(root, keys):
        state, draw = drafter.init_state(2, 20), Draw(keys, jnp.array([0.8, 1.3]))
        found = drafter.propose(params, state, root, tree, base, draw)
        return found, own.propose(lab.draft("hydra", 0), state.drafter, root, tree, base, draw)

    found, expected = run(np.array([4, 9]), jax.random.split(jax.random.key(0), (2, tree.depth + 1)))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.log_q, expected.log_q)


@pytest.mark.slow
def test_drawn_nodes_keep_their_places(lab):
    """Rejection sampling relies on q, so with no node more the tree is the drafter's own."""
    rule, tree = RejectionSampling(0.8), TREES["cartesian"]
    alone = make_decode_fn(lab.model, DRAFTERS["hydra"], tree, rule, max_new_tokens=NEW)
    texts = [([4, 5, 6] * 8, prompt) for prompt in PROMPTS]
    expected = lab.decode(alone, 0, lab.draft("hydra", 0), PROMPTS, rule=rule, seed=0)
    found = lab.decode(decoder("hydra", tree, rule, 0), 0, drafts(lab, "hydra", texts), PROMPTS, rule=rule, seed=0)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.steps, expected.steps)


@pytest.mark.slow
def test_typical_acceptance_covers_long_chains(lab):
    rule = Typical(epsilon=0.0)
    texts = [([4, 5, 6] * 8, prompt) for prompt in PROMPTS]
    found = lab.decode(decoder("hydra", TREES["one node"], rule), 0, drafts(lab, "hydra", texts), PROMPTS, rule=rule)
    assert found.accept_lengths.max() == 7


def test_names():
    several = DraftRef.parse("lookup-3+corpus+hydra++")
    assert (several.name, several.sources, several.nodes) == ("hydra++", ("lookup", "corpus"), 11)
    assert DraftRef.parse("corpus-4+path/to+heads").wrap(DRAFTERS["hydra"]).branch_nodes == 4
    assert title_of(several.wrap(DRAFTERS["hydra++"])) == "Hydra++ with lookup and corpus"
    assert DraftRef.parse("corpus+lookup").wrap(DRAFTERS["none"]) == FromText(BOTH[::-1])
    assert title_of(FromText(BOTH)) == "Lookup and corpus"
    assert not any(DraftRef.parse(name).sources for name in ("corpus", "lookup", "./corpus+x", "hydra++", None))
    names = (None, "corpus", "hydra", "lookup-2+hydra", "corpus+hydra", "lookup")
    assert [DraftRef.parse(name, corpus=True).text for name in names] == [
        "corpus", "corpus", "corpus+hydra", "corpus+lookup-2+hydra", "corpus+hydra", "corpus+lookup",
    ]  # fmt: skip
    for name in ("corpus+", "corpus+none", "lookup+corpus+lookahead", "corpus+lookup+corpus", "corpus+corpus+hydra"):
        with pytest.raises(
            HydrajaxError, match=rf"^draft: got '{re.escape(name)}', expected lookup and corpus once each"
        ):
            DraftRef.parse(name)
    with pytest.raises(HydrajaxError, match="expected no number of nodes without heads or a model"):
        DraftRef.parse("lookup-3+corpus")
    with pytest.raises(HydrajaxError, match=r"^draft: got 1000 nodes for lookup and corpus, expected 0 to 999$"):
        DraftRef.parse("corpus-1000+hydra")
    none_more = DraftRef.parse("lookup-0+hydra++").wrap(DRAFTERS["hydra++"])
    assert none_more == Several(DRAFTERS["hydra++"], BOTH[:1], 0)
    assert title_of(none_more) == "Hydra++ with lookup"


def test_sizes():
    drafter, tree = Several(DRAFTERS["hydra++"], BOTH, 7), TREES["cartesian"]
    assert drafter.spec.verified_nodes(tree) == tree.size + 7
    assert drafter.spec.longest_path(tree) == tree.depth + 7
    state = jax.eval_shape(lambda: drafter.init_state(3, 20))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state))
    assert hash(drafter) == hash(Several(DRAFTERS["hydra++"], BOTH, 7))
