"""Clustered draft lm heads: their logits, against NumPy and transformers, and the clusters."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.lab import VOCAB, WIDTH, quick_jit
from helpers.noise import draft_noise
from helpers.refusals import refusal
from hydrajax.drafters.balanced_means import balanced_clusters
from hydrajax.drafters.clusters import Clusters, clusters_of, over_all
from hydrajax.drafters.draft_lm_head import CLUSTERED_LM_HEAD, LmHead, Mask
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.lowbit.quantized import Int8
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama import Llama
from hydrajax.ops import trace
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, DynamicTree

KNOWN = Vocabulary([1, 2, 5, 7, 8, 11, 12, 13, 16])
ALL = 99
RANDOM = np.random.default_rng(3)


def clusters(rows: np.ndarray, n_chosen: int, size: int = 4) -> Clusters:
    centroids, tokens, n_chosen = clusters_of(rows, n_chosen, size)
    return Clusters(jnp.asarray(centroids), jnp.asarray(tokens), None, n_chosen, len(rows))


def reference(found: Clusters, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the logits of all tokens by NumPy, -inf outside the best clusters."""
    scores, out = hidden @ np.asarray(found.centroids), np.full((len(hidden), len(rows)), -np.inf)
    for row, best in enumerate(np.argsort(-scores, axis=1)[:, : found.n_chosen]):
        tokens = np.asarray(found.tokens)[best].reshape(-1)
        tokens = tokens[tokens >= 0]
        out[row, tokens] = rows[tokens] @ hidden[row]
    return out


def test_clusters_are_of_equal_sizes_and_find_groups():
    groups = np.repeat(np.eye(8), 6, axis=0)[RANDOM.permutation(48)]
    rows = (5 * groups + 0.1 * RANDOM.standard_normal((48, 8))).astype(np.float32)
    found = balanced_clusters(rows, 6)
    assert sorted(found.reshape(-1)) == list(range(48))
    assert all(len({int(groups[token].argmax()) for token in each}) == 1 for each in found)
    for n, size in ((1, 4), (9, 4), (50, 8), (130, 64)):  # the places that are left are -1
        some = balanced_clusters(RANDOM.standard_normal((n, 5)), size)
        assert sorted(some[some >= 0]) == list(range(n))
        assert some.shape == (-(-n // size), size)


KINDS = {
    "medusa": (lambda base, known: MedusaHeads(2, WIDTH, VOCAB, small_lm_head=LmHead(shared=True, vocabulary=known))),
    "eagle": (lambda base, known: replace(Eagle.for_base(base.config, jnp.float32), vocabulary=known)),
    "dspark": (lambda base, known: replace(
        DSpark.for_base(base.config, jnp.float32, DSparkSettings(block_size=3, target_layers=(0,), markov_rank=2)),
        vocabulary=known,
    )),
}  # fmt: skip
TREES = {"static": presets.cartesian([3, 2]), "grown": DynamicTree(6, 1, 3), "best": BestFirstTree(5, 2)}


@pytest.mark.quick("medusa-grown", "dspark-static")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_clusters_propose_what_the_whole_lm_head_does(lab, kind, tree):
    if tree == "best" and kind != "medusa":
        pytest.skip("the tree of one pass")
    base = BoundBase(lab.model, lab.base(0))
    drafter = KINDS[kind](base, KNOWN if kind != "eagle" else None)
    params = draft_noise(drafter, base, 7)
    rows = np.asarray(base.head_kernel()).T[KNOWN.tokens if kind != "eagle" else slice(None)]
    state = drafter.init_state(3, 4)
    state = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype), state)

    @quick_jit
    def proposed(params, state):
        return drafter.propose(params, state, jnp.arange(3), TREES[tree], base).tokens

    if tree == "best":
        tree = "static"
    tokens = proposed(params, state)
    found = {n: proposed(params | {CLUSTERED_LM_HEAD: clusters(rows, n)}, state) for n in (ALL, 1)}
    assert found[ALL].tolist() == tokens.tolist() != found[1].tolist()


@pytest.mark.parametrize("stored", ["own", "tied", "tied int8"])
def test_a_row_reads_its_own_tokens_of_the_bases_lm_head(lab, stored):
    params = dict(lab.base(0))
    if stored != "own":
        kernel = np.asarray(params.pop("lm_head"))
        params["embedding"] = kernel.T if stored == "tied" else jax.device_put(Int8.of(kernel))
    base = BoundBase(Llama(lab.model.config.replace(tied_lm_head=stored != "own", logits_divisor=3.0)), params)
    hidden = RANDOM.standard_normal((2, 3, WIDTH)).astype(np.float32)
    tokens = RANDOM.integers(0, VOCAB, (2, 3, 5)).astype(np.int32)
    some, whole = quick_jit(base.logits)(hidden, tokens), np.asarray(quick_jit(base.logits)(hidden))
    np.testing.assert_allclose(some, np.take_along_axis(whole, tokens, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_few_clusters_are_numpys(rows):
    weight = RANDOM.standard_normal((40, 16)).astype(np.float32)
    hidden, found = RANDOM.standard_normal((rows, 16)).astype(np.float32), clusters(weight, 3, 6)
    logits = found.logits(hidden, lambda x, tokens: jnp.einsum("rd,rmd->rm", x, weight[tokens]))
    expected = reference(found, hidden, weight)
    np.testing.assert_allclose(over_all(logits), expected, rtol=1e-5, atol=1e-5)
    head, more = LmHead(shared=True), RANDOM.standard_normal((rows, 40)).astype(np.float32)
    for chosen, wanted in ((logits, expected), (logits + more, expected + more), (logits[:1], expected[:1])):
        ids, log_p = head.likeliest(chosen, 3)
        assert ids.tolist() == head.top(chosen, 3).tolist() == np.argsort(-wanted, axis=1)[:, :3].tolist()
        log_q = wanted - np.log(np.sum(np.exp(wanted), axis=1, keepdims=True))
        np.testing.assert_allclose(log_p, np.take_along_axis(log_q, np.asarray(ids), 1), atol=1e-4)
    assert head.top(logits, 30)[0, 18:].tolist() == [-1] * 12


def test_a_grammar_allows_chosen_tokens_or_none():
    weight, hidden = RANDOM.standard_normal((40, 16)).astype(np.float32), RANDOM.standard_normal((1, 2, 16))
    found = clusters(weight, 2, 8)
    logits = found.logits(hidden, lambda x, tokens: jnp.einsum("brd,brmd->brm", x, weight[tokens]))
    whole = np.asarray(over_all(logits))
    second_best, unchosen = int(np.argsort(-whole[0, 0])[1]), int(np.argmin(whole[0, 1]))
    words = np.zeros((1, 2, 2), np.uint32)
    for row, token in enumerate((second_best, unchosen)):
        words[0, row, token // 32] = 1 << (token % 32)
    mask = Mask(LmHead(shared=True), jnp.asarray(words))
    tokens, log_p = mask.keep_likely(*mask.lm_head.likeliest(mask.over(logits), 2))
    assert tokens.tolist() == [[[second_best, -1], [-1, -1]]]
    assert not np.isnan(log_p).any()
    assert log_p[0, 0, 0] == 0


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_copy_in_tiles_multiplies_the_same_clusters(rows):
    groups = np.repeat(RANDOM.standard_normal((64, 4)), 50, axis=1)  # far apart: x is rounded to 8 bits
    kernel = (groups + 0.3 * RANDOM.standard_normal((64, 200))).astype(np.float32)
    base = SimpleNamespace(config=SimpleNamespace(vocab_size=200), logits=None, head_kernel=lambda _: kernel)
    found = LmHead(shared=True).with_clusters({}, base, 2)[CLUSTERED_LM_HEAD]
    assert found.tokens.shape == (4, 64)
    assert found.kernels.values.shape[:2] == (4, 1)
    hidden = RANDOM.standard_normal((rows, 64)).astype(np.float32)
    plain = replace(found, centroids=found.centroids.dequantized(), kernels=None)
    logits, expected = over_all(found.logits(hidden)), reference(plain, hidden, kernel.T)
    assert np.array_equal(np.isfinite(logits), np.isfinite(expected))
    some = np.isfinite(expected)
    np.testing.assert_allclose(np.asarray(logits)[some], expected[some], atol=0.4)  # of numbers up to 30


def test_only_the_bases_lm_head_is_clustered():
    refusal(lambda: LmHead(clustered=True), "lm_head.clustered: got true, expected false")
