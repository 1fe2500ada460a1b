"""Compare trees out of several drafts with paths in dictionaries, and their outputs with those of the base."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import CONTEXT, DRAFTERS, NEW, TREES, VOCAB, quick_jit, watched_step
from helpers.refusals import refusal
from helpers.tree_tools import random_tree
from hydrajax.api import make_decode_fn
from hydrajax.bench.questions.contenders import folder_name
from hydrajax.bench.timing import example_topology
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.chains import Chains, estimated
from hydrajax.drafters.corpus import Corpus
from hydrajax.drafters.corpus_search import CorpusSearch
from hydrajax.drafters.drafter import CORPUS, Draw, Proposal
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.merging import merged
from hydrajax.drafters.several import FromText, Several, with_lookup
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.models.base_model import BoundBase
from hydrajax.trees.presets import by_name

BOTH = (PromptLookup(), CorpusSearch())
BRANCHED = TREES | {"shallow": random_tree(3, 9, depth=2, widest=6)}
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
ADDED = 4
LINES, DEPTH = 5, 6  # chains, and their tokens


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


@pytest.mark.quick("greedy")
@pytest.mark.parametrize(
    ("rule", "name", "tree", "more"),
    [
        pytest.param(Greedy(), "hydra", "cartesian", 6, id="greedy"),
        pytest.param(Greedy(), "text", "best-10", 6, id="text alone"),
        pytest.param(ExactSampling(0.8), "text", "chain", 6, id="sampled text"),
        pytest.param(ExactSampling(0.8), "hydra++", "grown", 6, id="sampled"),
        pytest.param(Greedy(), "eagle", "grown", 0, id="in the place of own nodes"),
    ],
)
def test_outputs_are_the_bases_and_the_corpus_shortens_them(lab, rule, name, tree, more):
    tree = TREES.get(tree) or by_name(tree)
    drafter = FromText(BOTH) if name == "text" else Several(DRAFTERS[name], BOTH, more)
    assert name == "text" or drafter.spec.verified_nodes(tree) == tree.size + more
    decode = make_decode_fn(lab.model, drafter, tree, rule, max_new_tokens=NEW)
    expected, steps = lab.plainly(PROMPTS, rule, 0), []
    for texts in ((), zip(expected.ids(), PROMPTS, strict=True)):
        params = {CORPUS: Corpus(512)} | ({} if name == "text" else lab.draft(name, 0))
        for ids, prompt in texts:
            params[CORPUS].remember(ids, prompt)
        found = lab.decode(decode, 0, params, PROMPTS, rule=rule, seed=0)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        steps.append(found.steps.sum())
    assert steps[1] < (0.6 if more else 0.8) * steps[0]
    assert more or found.accept_lengths.max() == tree.depth


def test_a_draft_that_draws_keeps_its_own_tree(lab):
    """Rejection sampling relies on q, so with no node more there is nothing but the drafter's own proposal."""
    drafter, own, tree = Several(DRAFTERS["hydra"], BOTH, 0), DRAFTERS["hydra"], TREES["cartesian"]
    params, base = lab.draft("hydra", 0) | {CORPUS: Corpus(512)}, BoundBase(lab.model, lab.base(0))
    params[CORPUS].remember([4, 5, 6] * 8, [3])

    @quick_jit
    def run(root, keys):
        state, draw = drafter.init_state(2, 20), Draw(keys, jnp.array([0.8, 1.3]))
        found = drafter.propose(params, state, root, tree, base, draw)
        return found, own.propose(lab.draft("hydra", 0), state.drafter, root, tree, base, draw)

    found, expected = run(np.array([4, 9]), jax.random.split(jax.random.key(0), (2, tree.depth + 1)))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.log_q, expected.log_q)


@pytest.mark.slow
def test_typical_acceptance_covers_tree_and_branch(lab):
    """If every token passes the threshold, the longest path is accepted, which is the branch."""
    rule, tree, hydra = Typical(epsilon=0.0), TREES["one node"], DRAFTERS["hydra"]
    params = lab.draft("hydra", 0) | {CORPUS: Corpus(512)}
    params[CORPUS].remember([4, 5, 6] * 8, PROMPTS[0])
    for drafter, longest in ((with_lookup(hydra, 4), (4, 5)), (Several(hydra, BOTH, 6), (7,))):
        decode = make_decode_fn(lab.model, drafter, tree, rule, max_new_tokens=NEW)
        assert lab.decode(decode, 0, params, PROMPTS, rule=rule).accept_lengths.max() in longest


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


@pytest.mark.parametrize(
    ("name", "tree"),
    [("hydra", "shallow"), ("hydra++", "random"), ("medusa", "root"), ("eagle", "grown"), ("model", "skips ranks")],
)
@pytest.mark.quick("hydra-shallow")
def test_every_step_equals_the_reference(lab, name, tree):
    """Compare the nodes of the heads, those of the chain and the accepted tokens of three sequences."""
    drafter, lookup = with_lookup(DRAFTERS[name], ADDED), PromptLookup()
    engine = make_decode_fn(lab.model, drafter, BRANCHED[tree], max_new_tokens=NEW).engine
    prefill, step = quick_jit(engine.prefill), watched_step(engine)

    @quick_jit
    def alone_by(params, state):
        base, drafted = engine.bind(params), state.draft.drafter
        found = drafter.drafter.propose(params.draft, drafted, state.target.root, engine.program.tree, base)
        return found.tokens, jnp.broadcast_to(found.tree.parents, found.tokens.shape)

    params = Params(lab.base(0), lab.draft(name, 0))
    texts, _ = lab.references(0, PROMPTS)
    places = np.array([*map(len, PROMPTS)], np.int32)
    ends = places + NEW
    state = prefill(params, *right_padded(PROMPTS, CONTEXT), sampling(None, len(PROMPTS), VOCAB))
    deeper = shared = gained = 0
    while not state.output.done.all():
        was_done = np.asarray(state.output.done)
        own = alone_by(params, state)
        state, proposal, outcome = step(params, state)
        found = *own, proposal.tokens, proposal.tree.parents, outcome.tokens, outcome.counts
        for row in np.flatnonzero(~was_done):
            alone, above, tokens, parents, emitted, count = (array[row].tolist() for array in jax.device_get(found))
            before, true = texts[row, : places[row] + 1].tolist(), texts[row, places[row] + 1 : ends[row]].tolist()
            assert tokens[: len(alone)] == alone
            assert parents[: len(alone)] == above
            chain = chain_of(before, lookup, BRANCHED[tree].depth + ADDED)
            assert (tokens[len(alone) :], parents[len(alone) :]) == combined(alone, above, chain, ADDED)
            accepted = longest_true_path(tokens, parents, true)
            assert count == accepted + 1
            assert emitted[:count] == [before[-1], *true[:accepted]]
            deeper += accepted > BRANCHED[tree].depth
            shared += parents[len(alone)] > 0
            gained += accepted > longest_true_path(alone, above, true)
            places[row] += count
    assert (places == ends).all()
    assert deeper > 0 or BRANCHED[tree].depth >= ADDED - 1
    assert gained > 0
    assert shared > 0 or not BRANCHED[tree].depth


@pytest.mark.parametrize("tree", ["root", "grown"])
def test_timing_uses_a_tree_of_the_same_shape(lab, tree):
    """`example_topology`, which is used for timing, has the shapes and the depth of a proposal."""
    drafter, heads = with_lookup(DRAFTERS["hydra"], ADDED), lab.draft("hydra", 0)
    engine = make_decode_fn(lab.model, drafter, TREES[tree], max_new_tokens=NEW).engine
    base = BoundBase(lab.model, lab.base(0))

    def propose():
        return drafter.propose(heads, drafter.init_state(2, 30), jnp.zeros(2, jnp.int32), BRANCHED[tree], base).tree

    proposed, timed = jax.eval_shape(propose), jax.eval_shape(lambda: example_topology(engine, 2))
    for name in ("parents", "depths", "mask", "paths"):
        assert getattr(timed, name).shape == getattr(proposed, name).shape
    assert proposed.depth == engine.depth == BRANCHED[tree].depth + ADDED


def test_names():
    several = DraftRef.parse("lookup-3+corpus+hydra++")
    assert (several.name, several.sources, several.nodes) == ("hydra++", ("lookup", "corpus"), 11)
    hydra = DRAFTERS["hydra++"]
    for name, inner, nodes in (("lookup+hydra++", "hydra++", 5), ("lookup-8+path/to+heads", "path/to+heads", 8)):
        ref = DraftRef.parse(name)
        assert (ref.name, ref.nodes, ref.sources) == (inner, nodes, ("lookup",))
        assert ref.wrap(hydra) == with_lookup(hydra, nodes)
    assert DraftRef.parse("lookup-0+hydra++").wrap(hydra) == Several(hydra, BOTH[:1], 0)
    assert DraftRef.parse("corpus-4+path/to+heads").wrap(hydra).branch_nodes == 4
    assert DraftRef.parse("corpus+lookup").wrap(DRAFTERS["none"]) == FromText(BOTH[::-1])
    alone = ("corpus", "lookup", "./corpus+x", "./lookup+x", "hydra++", None, PromptLookup())
    assert not any(DraftRef.parse(name).sources for name in alone)
    names = (None, "corpus", "hydra", "lookup-2+hydra", "corpus+hydra", "lookup")
    assert [DraftRef.parse(name, corpus=True).text for name in names] == [
        "corpus", "corpus", "corpus+hydra", "corpus+lookup-2+hydra", "corpus+hydra", "corpus+lookup",
    ]  # fmt: skip
    assert folder_name("lookup-8+path/to/heads") == "lookup-8+heads"
    assert title_of(several.wrap(hydra)) == "Hydra++ with lookup and corpus"
    assert title_of(with_lookup(hydra)) == title_of(Several(hydra, BOTH[:1], 0)) == "Hydra++ with lookup"
    assert title_of(FromText(BOTH)) == "Lookup and corpus"


def test_wrong_names():
    for name in ("corpus+", "corpus+none", "lookup+corpus+lookahead", "corpus+lookup+corpus", "corpus+corpus+hydra"):
        refusal(lambda name=name: DraftRef.parse(name), f"draft: got '{name}', expected lookup and corpus once each")
    for name in ("lookup+", "lookup+lookup", "lookup+none", "lookup-3+lookahead-3-3-3", "lookup+lookup+hydra"):
        refusal(lambda name=name: DraftRef.parse(name), "expected heads or a model after 'lookup+'")
    refusal(lambda: DraftRef.parse("lookup-3+corpus"), "expected no number of nodes without heads or a model")
    for name in ("corpus-1000+hydra", "lookup-1000+hydra"):
        message = "draft: got 1000 nodes for lookup and corpus, expected 0 to 999"
        assert refusal(lambda name=name: DraftRef.parse(name)) == message
