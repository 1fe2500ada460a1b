"""Compare the proposals of a draft model, its ranks and its reading of long messages with full passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.lab import VOCAB, quick_jit
from helpers.noise import noise
from helpers.numpy_heads import HeadsInNumPy
from helpers.refusals import refusal
from helpers.tree_tools import random_tree
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.models.attention import QUERY_CHUNK, causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree

# Three families and sizes, with a vocabulary equal to the base's, a smaller and a larger one.
SMALL = LlamaConfig(61, 16, 24, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8)
MODELS = {
    "llama": SMALL,
    "mistral": SMALL.replace(n_layers=2, sliding_window=4, vocab_size=64),
    "qwen2": SMALL.replace(qkv_bias=True, vocab_size=50),
}


def random_params(model: Llama, seed: int = 1):
    return noise(jax.eval_shape(lambda: init_base(model, jax.random.key(0))), seed)


def whole_pass(model: Llama, params, text: list[int]):
    """Return keys and values and logits of a full pass without a cache."""
    # Causal attention ignores the padding, so texts of many lengths share one program.
    length = len(text)
    tokens = np.pad(np.array([text], np.int32), ((0, 0), (0, -length % 16)))
    block, logits = _pass_over(model, params, tokens)
    cut = jax.tree.map(lambda x: x[:, :, :length], block)
    return cut, np.asarray(logits, np.float64)[0, :length]


@functools.partial(quick_jit, static_argnums=0)
def _pass_over(model: Llama, params, tokens):
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    forward = model.apply({"params": params}, tokens, positions, causal_mask(tokens.shape[1]))
    return forward.block, model.apply({"params": params}, forward.hidden, method="logits")


@pytest.fixture(
    scope="module",
    params=["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "mistral")],
)
def drafted(request, base):
    """Return ``propose(tree)`` after two chunks; after the first, the last token is pending in some sequences."""
    model = Llama(MODELS[request.param])
    drafter, params = DraftModel(model, base.config.vocab_size), random_params(model)
    texts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7]]
    waits, roots = [True, False, True], [7, 3, 40]
    known = min(model.config.vocab_size, base.config.vocab_size)

    class Plain(HeadsInNumPy):
        def __init__(self):
            self.seen = {}

        def logits(self, k, text, path):
            text = (*text, *map(int, path))
            if text not in self.seen:
                self.seen[text] = whole_pass(model, params, list(text))[1][-1, :known]
            return self.seen[text]

    def propose(tree, drafter=drafter):
        @quick_jit
        def run(params):
            batch = np.zeros((3, 7), np.int32)
            for row, text in enumerate(texts):
                batch[row, : len(text)] = text
            counts = np.array([len(text) - wait for text, wait in zip(texts, waits, strict=True)], np.int32)
            state = drafter.init_state(3, 24)
            nothing = jnp.zeros((3, 7, base.config.width))
            state = drafter.begin(params, state, nothing, jnp.asarray(batch), jnp.asarray(counts), None, base)
            last = jnp.asarray([text[-1] for text in texts], jnp.int32)
            state = state._replace(waiting=last, waits=jnp.asarray(waits))
            return drafter.propose(params, state, jnp.asarray(roots), tree, base)

        return jax.device_get(run(params))

    found = Plain()
    found.model = model
    return propose, found, [tuple(text) for text in texts], roots


@pytest.mark.slow
def test_trees_have_the_best_tokens_after_each_path(drafted):
    propose, plain, texts, roots = drafted
    tree = random_tree(3, 18, depth=4, widest=5)
    static, grown = propose(tree), propose(DynamicTree(16, 3, 4))
    for row, text in enumerate(texts):
        plain.check_proposal(tree, text, roots[row], static.tokens[row])
        assert plain.check_grown(text, grown.tokens[row], grown.tree.parents[row]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_long_message_after_an_answer(lab, waits):
    """A message longer than `QUERY_CHUNK` follows a short text whose last token is pending or not."""
    drafter, params = lab.drafters["windowed model"], lab.base(0)
    text = np.random.default_rng(1).integers(0, VOCAB, 5 + QUERY_CHUNK + 30).tolist()
    first, more = text[: 5 - waits], text[5:]

    @quick_jit
    def run(params):
        def begin(state, tokens):
            counts = jnp.asarray([len(tokens)], jnp.int32)
            return drafter.begin(params, state, None, jnp.asarray([tokens], jnp.int32), counts, None, None)

        state = begin(drafter.init_state(1, 200), first)
        state = state._replace(waiting=jnp.asarray([text[4]], jnp.int32), waits=jnp.asarray([waits]))
        return begin(state, more)

    state = jax.device_get(run(params))
    assert (state.cache.lengths.tolist(), state.waits.tolist()) == ([len(text)], [False])
    for mine, full in zip(
        jax.tree.leaves(state.cache.layers), jax.tree.leaves(whole_pass(drafter.model, params, text)[0]), strict=True
    ):
        np.testing.assert_allclose(mine[0, :, : len(text)], full[0], atol=5e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.3, 0.999])
def test_drafting_stops_below_unlikely_tokens(drafted, threshold):
    """All other nodes have the same tokens as without the threshold."""
    propose, plain, texts, roots = drafted
    tree = presets.cartesian([3, 2, 1])
    drafter = DraftModel(plain.model, 61, confidence=threshold)
    without, found = propose(tree).tokens, propose(tree, drafter)
    for row, text in enumerate(texts):
        for node in range(1, tree.size):
            path, sure = [int(roots[row])], True
            for above in tree.node_paths[node][1:]:
                if above == node:
                    break
                logits = plain.logits(len(path), text, path)
                path.append(int(without[row, above]))
                sure &= np.exp(logits[path[-1]] - np.logaddexp.reduce(logits)) >= threshold
            assert found.tokens[row, node] == (without[row, node] if sure else -1)
    assert (found.tokens == -1).any()
    if threshold > 0.9:  # only the first pass ran
        assert (found.scratch.place[1:] == -1).all()


def test_bad_settings_are_rejected(lab):
    for confidence in (-0.1, 1.0, float("nan")):
        refusal(lambda one=confidence: DraftModel(lab.model, 17, confidence=one), "draft_confidence: got")
    refusal(lambda: DraftModel(lab.model, 17, depth=0), "depth: got 0, expected at least 1")


def test_ranks_equal_those_of_full_passes(lab):
    drafter, params = lab.drafters["model"], lab.draft("model", 0)
    texts = np.random.default_rng(3).integers(0, 17, (2, 11), dtype=np.int32)
    base = BoundBase(lab.model, lab.base(0))
    found = np.asarray(quick_jit(lambda x: drafter.ranks(x, None, {"tokens": jnp.asarray(texts)}, base, 8, 3))(params))
    for row, text in enumerate(texts):
        logits = whole_pass(drafter.model, params, text.tolist())[1]
        for k in range(3):
            for t in range(len(text) - 2 - k):
                true = text[t + 2 + k]
                assert found[k, row, t] == np.sum(logits[t + 1 + k] > logits[t + 1 + k, true])
