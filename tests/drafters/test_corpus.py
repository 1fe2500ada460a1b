"""Compare the suffix corpus and its search with lists of past texts."""

import copy
import pickle
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hydrajax.decoding.state import Params
from hydrajax.drafters.corpus import CONTEXT, END, NOTHING, Corpus
from hydrajax.drafters.corpus_search import CorpusSearch, Tail
from hydrajax.drafters.drafter import CORPUS
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import remember

CAPACITY, DEPTH = 200, 6


def text_of(rng, length: int) -> list[int]:
    """Return a text that repeats itself often."""
    return np.cumsum(rng.integers(0, 2, length)).__mod__(4).tolist()


def context_before(ring: np.ndarray, place: int) -> list[int]:
    return [int(ring[(place - 1 - back) % len(ring)]) for back in range(CONTEXT)]


class Listed:
    """The same corpus as a list of cells, each with its number and whether text can be continued there."""

    def __init__(self):
        self.cells = [(END, False)] * CAPACITY

    def remember(self, ids, prompt=()):
        whole = len(ids) <= CAPACITY - 2 * CONTEXT - 1
        ids = ids[-(CAPACITY - 2 * CONTEXT - 1) :]
        before = list(prompt)[-CONTEXT:] if whole else []
        self.cells += [(token, False) for token in before] + [(token, True) for token in ids] + [(END, False)]

    def ring(self) -> tuple[np.ndarray, set[int]]:
        """Return the cells by place, and the places whose token and context are all there."""
        ring, first = np.full(CAPACITY, END), len(self.cells) - CAPACITY
        for number in range(first, len(self.cells)):
            ring[(number - CAPACITY) % CAPACITY] = self.cells[number][0]
        usable = range(first + CONTEXT, len(self.cells))
        return ring, {(number - CAPACITY) % CAPACITY for number in usable if self.cells[number][1]}


def filled(seed: int, texts: int) -> tuple[Corpus, Listed]:
    rng, corpus, listed = np.random.default_rng(seed), Corpus(CAPACITY), Listed()
    for number in range(texts):
        ids, prompt = text_of(rng, int(rng.integers(0, 60))), text_of(rng, int(rng.integers(0, 50)))
        if number == 2:
            ids = text_of(rng, 2 * CAPACITY)
        if ids:
            corpus.remember(ids, prompt)
            listed.remember(ids, prompt)
    return corpus, listed


def test_the_index_is_sorted_and_complete():
    for texts in (1, 2, 3, 11):
        corpus, listed = filled(texts, texts)
        index, (ring, places) = corpus.index, listed.ring()
        order = np.asarray(index.order)[: int(index.count[0])].tolist()
        np.testing.assert_array_equal(index.tokens, ring)
        assert len(order) == len(corpus) == len(places)
        assert set(order) == places
        contexts = [context_before(ring, place) for place in order]
        assert contexts == sorted(contexts)


def test_of_equal_contexts_the_latest_comes_first():
    corpus = Corpus(CAPACITY)
    for _ in range(3):
        corpus.remember([1, 2], [3] * CONTEXT)
    order = np.asarray(corpus.index.order)[: len(corpus)].tolist()
    assert [place for place in order if place % (CONTEXT + 3) == CONTEXT] == [102, 67, 32]


def test_a_corpus_is_what_it_was_when_the_program_was_called():
    corpus = Corpus(CAPACITY)
    count = jax.jit(lambda params: params[CORPUS].index.count[0])
    assert count({CORPUS: corpus}) == 0
    corpus.remember([5, 6, 7])
    assert count({CORPUS: corpus}) == 3
    corpus.clear()
    assert count({CORPUS: corpus}) == len(corpus) == 0
    assert count._cache_size() == 1
    assert Params({}, {CORPUS: corpus}).corpus is corpus
    assert Params({}, {}).corpus is Params({}, ()).corpus is None


@pytest.mark.parametrize(
    "copied",
    [
        lambda corpus: jax.tree.map(lambda x: x, corpus),
        lambda corpus: jax.tree.map(np.asarray, corpus),
        lambda corpus: pickle.loads(pickle.dumps({CORPUS: corpus}))[CORPUS],
        copy.copy,
        copy.deepcopy,
        lambda corpus: jax.device_put(corpus, jax.devices()[-1]),
        jax.jit(lambda corpus: corpus),
    ],
)
def test_a_copy_remembers_by_itself(copied):
    corpus, listed = filled(7, 5)
    found = copied(corpus)
    assert (len(found), found.capacity) == (len(corpus), CAPACITY)
    untouched, home = jax.device_get(corpus.index), getattr(found.index.tokens, "sharding", None)
    later = [text_of(np.random.default_rng(8), length) for length in (20, 40, 150)]
    for text in later:
        found.remember(text)
        listed.remember(text)
    index, (ring, places) = found.index, listed.ring()
    np.testing.assert_array_equal(index.tokens, ring)
    assert set(np.asarray(index.order)[: len(found)].tolist()) == places
    assert home in (None, index.tokens.sharding)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(corpus.index), untouched)
    found.clear()
    assert len(found) == found.index.count[0] == 0 < len(corpus)


def test_outputs_are_remembered_if_the_draft_reads_a_corpus():
    corpus, result = Corpus(CAPACITY), SimpleNamespace(output_ids=[1, 2, 3], prompt_ids=[4])
    remember(SimpleNamespace(params=Params({}, {CORPUS: corpus})), result)
    assert len(corpus) == 3
    assert np.asarray(corpus.index.tokens)[:5].tolist() == [4, 1, 2, 3, END]
    remember(SimpleNamespace(params=Params({}, {})), result)
    assert len(corpus) == 3


def test_sizes_out_of_range():
    for tokens in (0, 2 * CONTEXT, 2**24 + 1):
        with pytest.raises(HydrajaxError, match=rf"^corpus: got {tokens} tokens, expected 65 to 16777216$"):
            Corpus(tokens)


search = CorpusSearch()


@jax.jit
def found_chains(corpus, tail, root):
    given = {CORPUS: corpus}, tail, root, DEPTH
    return search.chains(*given), search.best_matches(*given)[1]


def tail_of(texts: list[list[int]]) -> tuple[Tail, np.ndarray]:
    """Return the state before the last token of each text, and these tokens."""
    width = CONTEXT - 1
    tokens = [([NOTHING] * width + text[:-1])[-width:] for text in texts]
    lengths = np.array([len(text) - 1 for text in texts], np.int32)
    return Tail(np.array(tokens, np.int32), lengths), np.array([text[-1] for text in texts], np.int32)


def match_length(ring, place: int, text: list[int]) -> int:
    agree = [a == b for a, b in zip(context_before(ring, place), text[::-1], strict=False)]
    return [*agree, False].index(False)


@pytest.mark.parametrize("seed", [3, 4])
def test_search_finds_the_longest_matches(seed):
    corpus, listed = filled(seed, 9)
    ring, places = listed.ring()
    rng = np.random.default_rng(seed)
    texts = [text_of(rng, int(rng.integers(1, 50))) for _ in range(6)]
    some = sorted(places)[7]
    texts += [context_before(ring, some)[::-1], [3, 9]]  # a whole context, and a token that was never seen
    texts[-2] = [token for token in texts[-2] if token >= 0]
    chains, found = jax.device_get(found_chains(corpus, *tail_of(texts)))
    for row, text in enumerate(texts):
        lengths = sorted((match_length(ring, place, text) for place in places), reverse=True)[: search.matches]
        expected = followers(ring, places, text)
        assert found[row].tolist() == lengths
        assert (chains.log_p[row, :, 0] > -np.inf).tolist() == [length > 0 for length in lengths]
        for tokens, log_p in zip(chains.tokens[row], chains.log_p[row], strict=True):
            kept = tuple(tokens[tokens >= 0].tolist())
            assert kept in expected
            assert (np.diff(log_p[: len(kept)]) <= 0).all()
            assert (log_p[len(kept) :] == -np.inf).all()


def followers(ring, places, text: list[int]) -> set[tuple[int, ...]]:
    """Return what follows all matches, and the empty chain."""
    matches = [place for place in places if match_length(ring, place, text)]
    following = [[int(ring[(place + ahead) % len(ring)]) for ahead in range(DEPTH)] for place in matches]
    return {(), *(tuple(tokens[: [*tokens, END].index(END)]) for tokens in following)}


def test_the_tail_of_a_text():
    """Reading in pieces, reading padding and rewinding give the tail of the text."""
    advance = jax.jit(lambda state, tokens, counts: search.advance({}, state, None, tokens, counts, None, None))
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 9, 40).tolist(), rng.integers(0, 9, 40).tolist()]
    state, done = search.init_state(2, 64), [0, 0]
    for counts in ([7, 40], [0, 0], [33, 0]):
        tokens = np.full((2, 40), 8, np.int32)
        for row, count in enumerate(counts):
            tokens[row, :count] = texts[row][done[row] : done[row] + count]
            done[row] += count
        state = advance(state, tokens, np.array(counts, np.int32))
    whole, _ = tail_of([[*text, 0] for text in texts])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole)
    cut = jax.device_get(search.rewind(state, np.array([38, 99], np.int32)))
    assert cut.lengths.tolist() == [38, 40]
    assert cut.tokens[0, 2:].tolist() == texts[0][38 - CONTEXT + 3 : 38]
    assert cut.tokens[0, :2].tolist() == [NOTHING] * 2
    np.testing.assert_array_equal(cut.tokens[1], whole.tokens[1])
