"""Low-rank, reduced and shared draft lm heads: their logits and samples."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import forced_logits
from helpers.lab import VOCAB, WIDTH, quick_jit
from helpers.noise import draft_noise
from helpers.refusals import refusal
from hydrajax.drafters.draft_lm_head import COPIED_LM_HEAD, LmHead
from hydrajax.drafters.drafter import Draw
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets

KNOWN = [1, 2, 5, 7, 8, 11, 12, 13, 16]  # the tokens of the reduced vocabulary; an index into it is another token
RANK = 6
LM_HEADS = {
    "full": LmHead(bias=True),
    "shared": LmHead(shared=True),
    "shared, bias": LmHead(shared=True, bias=True),
    "shared, reduced": LmHead(shared=True, vocabulary=Vocabulary(KNOWN)),
    "full rank": LmHead(rank=WIDTH),
    "low rank": LmHead(rank=RANK),
    "reduced": LmHead(bias=True, vocabulary=Vocabulary(KNOWN)),
    "reduced, low rank": LmHead(rank=RANK, vocabulary=Vocabulary(reversed(KNOWN))),
}
KINDS = {"medusa": MedusaHeads, "hydra": HydraHeads}


def with_lm_head(kind: str, name: str):
    return KINDS[kind](2, WIDTH, VOCAB, small_lm_head=LM_HEADS[name])


@pytest.fixture(scope="module")
def base(lab) -> BoundBase:
    return BoundBase(lab.model, lab.base(0))


def nearest_of_rank(kernel: np.ndarray, rank: int) -> np.ndarray:
    """Return the best low-rank approximation in the least-squares sense (Eckart and Young)."""
    left, weights, right = np.linalg.svd(kernel, full_matrices=False)
    return (left[:, :rank] * weights[:rank]) @ right[:rank]


def fresh_kernel(base: BoundBase, name: str) -> np.ndarray:
    """Return the matrix ``[D, V]`` of a fresh lm head, with -inf columns outside its vocabulary."""
    kernel = np.asarray(base.params["lm_head"], np.float64)
    columns = KNOWN if "reduced" in name else range(VOCAB)
    some = kernel[:, list(columns)]
    if "low rank" in name:
        some = nearest_of_rank(some, RANK)
    full = np.full(kernel.shape, np.nan)
    full[:, list(columns)] = some
    return full


@pytest.mark.quick("reduced, low rank", "shared, bias", "shared, reduced", "full rank")
@pytest.mark.parametrize("name", LM_HEADS)
def test_fresh_heads_approximate_the_base(base, name):
    """Fresh blocks are identities, so the logits of a head are the hidden state times its lm head."""
    drafter = with_lm_head("hydra" if "low" in name else "medusa", name)
    state = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
    tree = presets.cartesian([12, 1])

    @quick_jit
    def run(rng, state):
        params = drafter.init(rng, base)
        logits = forced_logits(drafter, params, state[:, None], jnp.zeros((3, 1), jnp.int32), base)
        proposal = drafter.propose(params, state, jnp.zeros(3, jnp.int32), tree, base)
        return params, logits[:, :, 0], proposal.tokens

    params, logits, tokens = jax.device_get(run(jax.random.key(0), state))
    expected = state.astype(np.float64) @ fresh_kernel(base, name)
    known = np.isfinite(expected)
    for k in range(2):
        np.testing.assert_array_equal(logits[k][~known], -np.inf)
        np.testing.assert_allclose(logits[k][known], expected[known], atol=1e-3, rtol=1e-4)
    best_first = np.argsort(np.where(known, -expected, np.inf), axis=-1)
    n_known = int(known[0].sum())
    wanted = np.where(np.arange(12) < n_known, best_first[:, :12], -1)
    assert tokens[:, 1:13].tolist() == wanted.tolist()
    sizes = {"lm_kernel": (WIDTH, n_known), "lm_down": (WIDTH, drafter.lm_head.rank), "lm_up": (RANK, n_known)}
    for leaf in ("lm_kernel", "lm_down", "lm_up"):
        if leaf in params["head_0"]:
            assert params["head_0"][leaf].shape == (sizes[leaf] if name != "full rank" or leaf != "lm_up" else (32, 17))
    assert ("lm_kernel" in params["head_0"]) == (name in ("full", "reduced"))
    assert ("lm_bias" in params["head_0"]) == drafter.lm_head.bias


LAYERS = {
    "eagle": (Eagle, None),
    "mtp": (MTP, None),
    "dspark": (DSpark, DSparkSettings(block_size=3, target_layers=(0,), markov_rank=2, confidence_head=False)),
}  # their lm head is the base's


@pytest.mark.quick("medusa", "eagle", "dspark")
@pytest.mark.parametrize("kind", ["medusa", *LAYERS])
def test_a_copy_of_the_shared_lm_head_proposes_the_same(base, kind):
    if kind in LAYERS:
        drafter_of, settings = LAYERS[kind]
        other = drafter_of.for_base(base.config, jnp.float32, settings)
        drafter, state = replace(other, vocabulary=Vocabulary(KNOWN)), other.init_state(3, 4)
    else:
        drafter, other = with_lm_head(kind, "shared, reduced"), with_lm_head(kind, "shared")
        state = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
    params = draft_noise(drafter, base, 7)
    copied = drafter.lm_head.with_copy(params, base)
    assert copied[COPIED_LM_HEAD].shape == (WIDTH, len(KNOWN))

    @quick_jit
    def proposed(params, state):
        return drafter.propose(params, state, jnp.arange(3), presets.cartesian([3, 2]), base).tokens

    tokens, blind = proposed(copied, state), proposed({**copied, COPIED_LM_HEAD: 0 * copied[COPIED_LM_HEAD]}, state)
    assert tokens.tolist() == proposed(params, state).tolist() != blind.tolist()
    assert other.lm_head.with_copy(params, base) is params


def test_samples_follow_the_reported_distribution(base):
    """Samples are token ids, -1 beyond the reduced vocabulary; log_q is -inf outside it and log softmax inside."""
    drafter = with_lm_head("hydra", "reduced")
    params = draft_noise(drafter, base, 7)
    state = np.random.default_rng(2).standard_normal((200, WIDTH)).astype(np.float32)
    tree, temperature = presets.cartesian([11, 1]), np.linspace(0.5, 2.0, 200, dtype=np.float32)

    @quick_jit
    def run(state, keys):
        root = jnp.zeros(200, jnp.int32)
        proposal = drafter.propose(params, state, root, tree, base, Draw(keys, temperature))
        first = forced_logits(drafter, params, state[:, None], root[:, None], base)[0, :, 0]
        return proposal.tokens, proposal.log_q, first

    tokens, log_q, first = jax.device_get(run(state, jax.random.split(jax.random.key(0), (200, 3))))
    assert log_q.shape == (200, len(tree.topology.inner), VOCAB)
    unknown = np.setdiff1d(np.arange(VOCAB), KNOWN)
    assert (log_q[..., unknown] == -np.inf).all()
    assert np.isfinite(log_q[..., KNOWN]).all()
    np.testing.assert_allclose(log_q[:, 0, KNOWN], first[:, KNOWN] / temperature[:, None], rtol=1e-4, atol=1e-4)
    for row in tokens[:, 1:12]:  # without replacement: the whole vocabulary, then -1
        assert sorted(row[:9]) == KNOWN
        assert row[9:].tolist() == [-1, -1]
    assert np.isin(tokens[:, 12:], KNOWN).all()
    # The first child is a sample of q: the share of the likeliest token is within three standard deviations.
    q = np.exp(log_q[:, 0] - log_q[:, 0].max(axis=-1, keepdims=True))
    q /= q.sum(axis=-1, keepdims=True)
    best = q.max(axis=-1)
    hits = (tokens[:, 1] == q.argmax(axis=-1)).sum()
    assert abs(hits - best.sum()) < 3 * np.sqrt((best * (1 - best)).sum()) + 1


def test_vocabularies_are_hashable_sets():
    assert Vocabulary([5, 1, 5]) == Vocabulary([1, 5])
    assert hash(LmHead(vocabulary=Vocabulary([5, 1]))) == hash(LmHead(vocabulary=Vocabulary([1, 5])))
    assert Vocabulary([1, 5]) != Vocabulary([1, 6])
    assert Vocabulary([3, 1]).tokens.tolist() == [1, 3]


def test_bad_settings_are_rejected():
    refusal(lambda: LmHead(shared=True, rank=3), "lm_head: got shared and a rank of 3, expected one of them")
    refusal(lambda: LmHead(rank=0), "lm_head.rank: got 0, expected at least 1")
    for tokens in ([], [3, -1]):
        refusal(lambda tokens=tokens: Vocabulary(tokens), "lm_head.vocabulary: expected at least one token id")
