"""Compare lookahead decoding with the algorithm in lists and a dictionary, which runs a full pass per token.

The reference has no window of nodes, no mask and no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import CONTEXT, NEW, VOCAB, quick_jit, shared_lab, watched_step
from helpers.refusals import refusal
from hydrajax.api import make_decode_fn
from hydrajax.bench.uncached_forward import last_logits
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import Params
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import title_of
from hydrajax.lookahead.drafter import Lookahead, as_nodes, candidates, remember
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

DRAFTERS = {
    "4-3-3": Lookahead(4, 3, 3),
    "3-4-2": Lookahead(3, 4, 2, from_text=False),
    "5-2-2, few buckets": Lookahead(5, 2, 2, buckets=5),
}
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]


class PlainLookahead:
    """One sequence. ``window[l][i]`` is level l at column i, ``pool[bucket]`` a list of n-grams, the oldest first."""

    def __init__(self, drafter: Lookahead, prompt: list[int]):
        self.w, self.n, self.g = drafter.window, drafter.ngram, drafter.guesses
        self.drafter, self.pool, self.steps, self.text = drafter, {}, 0, []
        self.window = [
            [prompt[(level * self.w + i) % len(prompt)] for i in range(self.w)] for level in range(self.n - 1)
        ]
        self.read(prompt)

    def read(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if self.drafter.from_text and len(self.text) >= self.n:
                self.meet(tuple(self.text[-self.n :]))

    def meet(self, ngram: tuple[int, ...]) -> None:
        kept = self.pool.setdefault(ngram[0] % self.drafter.buckets, [])
        if ngram in kept:
            kept.remove(ngram)
        kept.append(ngram)
        del kept[: -self.g]

    def candidates(self, root: int) -> list[tuple[int, ...]]:
        """Return the n-grams that followed the root, the latest first."""
        kept = self.pool.get(root % self.drafter.buckets, [])
        return [ngram[1:] for ngram in reversed(kept) if ngram[0] == root]

    def step(self, params, root: int, emitted: list[int]) -> None:
        """Advance the window from the text and the root, then add the emitted tokens."""
        self.window[0][0] = root
        texts = [self.text + self.window[0][: i + 1] + [level[i] for level in self.window[1:]] for i in range(self.w)]
        logits = last_logits(shared_lab().model, params, [np.array(text, np.int32) for text in texts])
        guessed = logits.argmax(axis=-1).tolist()
        if self.steps >= self.n - 2:
            for i in range(self.w):
                self.meet((*(level[i] for level in self.window), guessed[i]))
        self.window = [*self.window[1:], guessed]
        self.steps += 1
        self.read(emitted)


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node, without the root."""
    paths = {0: ()}
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and parents[node] in paths:
            paths[node] = (*paths[parents[node]], int(tokens[node]))
    return [path for path in paths.values() if path]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.quick("3-4-2")
def test_every_step_equals_the_reference(lab, name):
    """Compare window, candidates and accepted tokens of three sequences; some drafts must be accepted."""
    drafter, params = DRAFTERS[name], Params(lab.base(0), {})
    engine = make_decode_fn(lab.model, drafter, drafter.spec.default_tree, max_new_tokens=NEW).engine
    prefill, step, n_tree = quick_jit(engine.prefill), watched_step(engine), engine.program.tree.size
    texts, _ = lab.references(0, PROMPTS)
    state = prefill(params, *right_padded(PROMPTS, CONTEXT), sampling(None, len(PROMPTS), VOCAB))
    plain, accepted = [PlainLookahead(drafter, prompt) for prompt in PROMPTS], []
    while not state.output.done.all():
        was_done = np.asarray(state.output.done)
        state, proposal, outcome = jax.device_get(step(params, state))
        tokens, parents, emitted, counts = proposal.tokens, proposal.tree.parents, outcome.tokens, outcome.counts
        for row, model in enumerate(plain):
            if was_done[row]:
                continue
            at, root = len(model.text), int(texts[row, len(model.text)])
            assert tokens[row, 0] == root
            # The nodes of the tree are the distinct prefixes of the candidates.
            found = paths_of(tokens[row, :n_tree], parents[row, :n_tree])
            wanted = model.candidates(root)
            assert sorted(found) == sorted({c[:d] for c in wanted for d in range(1, len(c) + 1)})
            # The longest prefix of a candidate that matches the text is accepted, up to the limit.
            true = tuple(texts[row, at + 1 : at + drafter.ngram].tolist())
            right = [d for c in wanted for d in range(1, len(true) + 1) if c[:d] == true[:d]]
            left = len(PROMPTS[row]) + NEW - at
            assert counts[row] == min(max(right, default=0) + 1, left)
            assert emitted[row, : counts[row]].tolist() == texts[row, at : at + counts[row]].tolist()
            window = [token for level in model.window for token in level][1:]
            assert tokens[row, n_tree:].tolist() == window
            assert (parents[row, n_tree:] == -1).all()
            model.step(params.base, root, texts[row, at : at + counts[row]].tolist())
            accepted.append(int(counts[row]) - 1)
    assert max(accepted) == drafter.spec.depth
    assert [len(model.text) - len(prompt) for model, prompt in zip(plain, PROMPTS, strict=True)] == [NEW] * len(PROMPTS)


# The attention mask in the paper's figure: the current token, four and twice five tokens of the window, and two
# candidates of three tokens. W = 5, N = 4, G = 2. One line per token, with its position after the root.
FIGURE = """
0  x.... ..... ..... ... ...
1  xx... ..... ..... ... ...
2  xxx.. ..... ..... ... ...
3  xxxx. ..... ..... ... ...
4  xxxxx ..... ..... ... ...
1  x.... x.... ..... ... ...
2  xx... .x... ..... ... ...
3  xxx.. ..x.. ..... ... ...
4  xxxx. ...x. ..... ... ...
5  xxxxx ....x ..... ... ...
2  x.... x.... x.... ... ...
3  xx... .x... .x... ... ...
4  xxx.. ..x.. ..x.. ... ...
5  xxxx. ...x. ...x. ... ...
6  xxxxx ....x ....x ... ...
1  x.... ..... ..... x.. ...
2  x.... ..... ..... xx. ...
3  x.... ..... ..... xxx ...
1  x.... ..... ..... ... x..
2  x.... ..... ..... ... xx.
3  x.... ..... ..... ... xxx
"""


def test_the_mask_equals_the_figure_of_the_paper():
    drafter = Lookahead(5, 4, 2)
    tree = presets.by_name(drafter.spec.default_tree)

    @quick_jit
    def propose(ngrams, root):
        state = drafter.init_state(1, 64)
        state = state._replace(pool=remember(state.pool, ngrams, jnp.ones((1, 2), bool)))
        return drafter.propose({}, state, root, tree, None)

    proposal = propose(np.array([[[7, 1, 2, 3], [7, 4, 5, 6]]]), np.array([7]))
    lines = [line.split(maxsplit=1) for line in FIGURE.strip().splitlines()]
    places = np.array([int(place) for place, _ in lines])
    sees = np.array([[mark == "x" for mark in line.replace(" ", "")] for _, line in lines])
    # The figure orders root, window, candidates; here the tree comes first.
    in_figure = [0, *(15 + 3 * path[0] + len(path) - 1 for path in tree.choices), *range(1, 15)]
    np.testing.assert_array_equal(proposal.tree.depths[0], places[in_figure])
    np.testing.assert_array_equal(proposal.tree.mask[0], sees[np.ix_(in_figure, in_figure)])
    assert proposal.tokens[0, : tree.size].tolist() == [7, 4, 1, 5, 2, 6, 3]  # the latest first
    assert (drafter.spec.window_nodes, drafter.spec.reach) == (14, 6)


compiled_candidates = jax.jit(candidates)
compiled_nodes = jax.jit(as_nodes, static_argnums=1)


def test_the_pool_drops_the_oldest_n_grams():
    """Three buckets of two n-grams: tokens 1 and 4 share one."""
    met = [[1, 8], [2, 8], [1, 9], [1, 8], [4, 7], [2, 9], [2, 7]]
    kept = [True, True, True, True, True, False, True]
    pool = np.full((2, 3, 2, 2), -1)
    found = np.asarray(jax.jit(remember)(pool, np.array([met, met[::-1]]), np.array([kept, [False] * 7])))
    assert found[0].tolist() == [[[-1, -1], [-1, -1]], [[4, 7], [1, 8]], [[2, 7], [2, 8]]]
    assert (found[1] == -1).all()
    both = np.concatenate([found[:1]] * 2)
    assert compiled_candidates(both, np.array([1, 2])).tolist() == [[[8], [-1]], [[7], [8]]]
    assert compiled_candidates(both, np.array([4, 5])).tolist() == [[[7], [-1]], [[-1], [-1]]]


def test_candidates_with_a_common_prefix_share_nodes():
    found = np.array([[[5, 6, 7], [5, 8, 9], [5, 6, 9]], [[1, 1, 1], [2, 1, 1], [-1, -1, -1]]])
    tokens, parents = compiled_nodes(found, presets.cartesian([3, 1, 1]))
    # Node order: the first tokens of the three candidates, then their second and third tokens.
    assert tokens.tolist() == [[5, -1, -1, 6, 8, -1, 7, 9, 9], [1, 2, -1, 1, 1, -1, 1, 1, -1]]
    assert parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 4, 5, 4], [-1, 0, 0, 0, 1, 2, 3, 4, 5, 6]]
    uneven = TreeTopology.from_choices([[1], [1, 0], [1, 0, 0], [2], [2, 0], [2, 1], [6]])
    tokens, parents = compiled_nodes(found, uneven)  # [1], [2], [6], [1, 0], [2, 0], [2, 1], [1, 0, 0]
    assert tokens[0].tolist() == [5, -1, -1, 8, 6, -1, 9]
    assert parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 2, 4]


def test_a_second_turn_resets_the_window_and_keeps_the_pool():
    drafter = Lookahead(2, 3, 4, buckets=17)

    @quick_jit
    def read(state, tokens, counts):
        return drafter.begin({}, state, None, tokens, counts, None, None)

    state = read(drafter.init_state(1, 16), jnp.array([[1, 2, 3, 9]]), jnp.array([3]))
    assert state.window[0].tolist() == [[1, 2], [3, 1]]
    state = read(state._replace(steps=jnp.array([5])), jnp.array([[4, 5, 6, 7]]), jnp.array([4]))
    assert (state.window[0].tolist(), state.steps.tolist(), state.tail[0].tolist()) == ([[4, 5], [6, 7]], [0], [6, 7])
    for root, followed in [(1, [2, 3]), (2, [3, 4]), (3, [4, 5]), (4, [5, 6]), (5, [6, 7]), (6, [-1, -1])]:
        assert compiled_candidates(state.pool, np.array([root]))[0, 0].tolist() == followed


def test_names(lab):
    shape = lab.model.config, lab.model.dtype
    assert DraftRef.parse("lookahead").kind.build(*shape) == Lookahead(15, 5, 15)
    drafter = DraftRef.parse("lookahead-7-4-3").kind.build(*shape)
    assert (drafter, title_of(drafter)) == (Lookahead(7, 4, 3), "Lookahead")
    assert (drafter.name, drafter.spec.depth, drafter.spec.default_tree) == ("lookahead-7-4-3", 3, "cartesian-3x1x1")
    assert DraftRef.parse("lookahead-of-mine").kind is None
    for name, message in (
        *((name, "expected lookahead or lookahead-W-N-G") for name in ("lookahead-7", "lookahead-7-4-3-2")),
        *((f"lookahead-{n}", "expected lookahead-W-N-G with") for n in ("0-5-15", "15-1-15", "15-5-0", "15-5-1000")),
        ("lookahead-600-5-600", "= 4800 nodes per step for lookahead-600-5-600, expected at most 4096"),
    ):
        refusal(lambda name=name: DraftRef.parse(name), name, message)
