"""Grammars that begin after a mark, at every node of random trees against plain Python, token by token."""

import random

import numpy as np
import pytest

from helpers import small_tokenizer
from helpers.host_grammars import Brackets, Place, Reasoned, Table, mask_after
from hydrajax.decoding.constraints import allowed_next, words
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.after_reasoning import AfterMark, AfterToken
from hydrajax.grammar.grammar import Grammar

EOS = 2


class Late(AfterToken):
    """Wrong: the grammar begins one token late."""

    def follow(self, text):
        super().follow(text)
        self._first = None if self._first is None or len(text) <= self._first else self._first


class Unseen(AfterToken):
    """Wrong: as vllm#36138, a mark among the drafts is ignored."""

    def allow(self, tokens, parents, allowed):
        super().allow(np.where(tokens == self._end, -1, tokens), parents, allowed)


class Entered(AfterToken):
    """Wrong: a mark among the drafts stays, although it may be rejected."""

    def allow(self, tokens, parents, allowed):
        super().allow(tokens, parents, allowed)
        if self._first is None and self._end in tokens[1:]:
            self._first = 1000


class Unparted(AfterToken):
    """Wrong: all branches continue the text after the first mark."""

    def _allow_below(self, nodes, tokens, parents, allowed):
        super()._allow_below(sorted({*nodes, *range(nodes[0], len(tokens))}), tokens, parents, allowed)


def masks(constraint, tokens, parents, vocab_size: int) -> np.ndarray:
    allowed = np.zeros((len(tokens), words(vocab_size)), np.uint32)
    constraint.allow(np.array(tokens, np.int32), np.array(parents, np.int32), allowed)
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :vocab_size].astype(bool)


def random_tree(rng: random.Random, likely, root: int, vocab_size: int):
    """Return tokens and parents of up to 14 nodes; some have no guess or are never accepted."""
    tokens, parents = [root], [-1]
    for node in range(1, rng.randint(1, 14)):
        parents.append(rng.randrange(node) if rng.random() < 0.9 else -1)
        tokens.append(rng.choice(likely) if rng.random() < 0.6 else rng.randrange(-1, vocab_size))
    return tokens, parents


def check(rng: random.Random, kind=AfterToken) -> tuple[int, int]:
    """Follow one random text, and compare the masks of a random tree at each of its steps.

    Returns the number of nodes compared, and of those below a mark within a tree.
    """
    vocab_size = rng.randint(6, 70)
    inner = rng.choice([Table(rng.randrange(9), vocab_size), Brackets(least=rng.randrange(3))])
    end, begin = rng.sample(range(vocab_size), 2)
    expected = Reasoned(inner, vocab_size, end, rng.choice([None, begin]))
    found = kind(inner.start(None, vocab_size, ()), end, expected.begin)
    text: list[int] = []
    nodes = below = 0
    while len(text) < 12:
        if rng.random() < 0.3:
            found = found.copy()
        assert found.forced(4) == (expected.forced(tuple(text), 4) if text else found.forced(4))
        likely = [end, begin, *expected.after(tuple(text)), *inner.after(())]
        tokens, parents = random_tree(rng, likely, text[-1] if text else -1, vocab_size)
        allowed = masks(found, tokens, parents, vocab_size)
        paths = {0: text}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node:
                if parent not in paths or token < 0 or not allowed[parent, token]:
                    continue  # never accepted
                paths[node] = [*paths[parent], token]
            wanted = mask_after(expected, tuple(paths[node]), vocab_size)
            wanted = np.unpackbits(wanted.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
            np.testing.assert_array_equal(allowed[node], wanted, str((text, paths[node])))
            nodes, below = nodes + 1, below + (end not in text and end in paths[node])
        last = rng.choice(list(paths))
        if not allowed[last].any():
            break
        text = [*paths[last], rng.choice(np.flatnonzero(allowed[last]).tolist())]
        found.follow(text)
        assert found.error is None
    return nodes, below


@pytest.mark.parametrize("cases", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_masks_at_every_node_are_those_of_each_path_token_by_token(cases):
    rng = random.Random(cases)
    nodes, below = np.array([check(rng) for _ in range(cases)]).sum(axis=0)
    assert nodes > 10 * cases
    assert below > cases / 2


@pytest.mark.parametrize("wrong", [Late, Unseen, Entered, Unparted])
def test_the_comparison_finds_errors(wrong):
    with pytest.raises(AssertionError):
        [check(random.Random(seed), wrong) for seed in range(100)]


@pytest.fixture(scope="module")
def tokenizer():
    found = small_tokenizer.byte_level()
    found.add_tokens(["<think>", "</think>"])
    return found


@pytest.mark.parametrize("cases", [25, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_parser_starts_at_each_mark_of_a_tree(tokenizer, cases):
    """The parser's state returns over the mark: a new one is started for every node."""
    vocab_size, end = len(tokenizer), tokenizer.convert_tokens_to_ids("</think>")
    grammars = [Grammar.regex("[ab]{2,4}(c|1)"), Grammar.choices(["ab", "abc", "b"]), Grammar.json_object()]
    rng, below = random.Random(cases), 0
    for _ in range(cases):
        grammar = rng.choice(grammars)
        found, inner = (one.start(tokenizer, vocab_size, (EOS,)) for one in (grammar.after("</think>"), grammar))
        text = [rng.randrange(EOS + 1, end) for _ in range(rng.randint(1, 3))]
        found.follow(text)
        assert (found.forced(3), allowed_next(found, vocab_size)[0, 0]) == ([], 0xFFFFFFFF)
        likely = [end, *np.flatnonzero(masks(inner, [-1], [-1], vocab_size)[0]).tolist()]
        for _ in range(3):
            tokens, parents = random_tree(rng, likely, text[-1], vocab_size)
            allowed, paths = masks(found, tokens, parents, vocab_size), {0: []}
            for node in range(1, len(tokens)):
                if parents[node] in paths and allowed[parents[node], tokens[node]] and tokens[node] not in (-1, EOS):
                    paths[node] = [*paths[parents[node]], tokens[node]]
            for node, path in paths.items():
                if end not in path:
                    assert allowed[node].all()
                    continue
                fresh, below = inner.copy(), below + 1
                fresh.follow(path[path.index(end) + 1 :])
                np.testing.assert_array_equal(allowed[node], masks(fresh, [-1], [-1], vocab_size)[0])
        found.follow([*text, end])
        assert found.forced(9) == inner.forced(9)
        np.testing.assert_array_equal(allowed_next(found, vocab_size), allowed_next(inner, vocab_size))
    assert below > cases


class Failing(Place):
    def allow(self, tokens, parents, allowed):
        self.error = "too much work"


def test_an_error_on_a_branch_that_is_not_taken_has_no_effect():
    found = AfterToken(Failing(Brackets(), 9), end=5)
    found.follow([3])
    masks(found, [3, 5, 1], [-1, 0, 1], 9)
    assert found.error is None
    found.follow([3, 5])
    assert found.error == "too much work"


def test_copies_change_on_their_own():
    found = AfterToken(Place(Brackets(), 9), end=5)
    other = found.copy()
    other.follow([5, 0])
    found.follow([5])
    assert [np.flatnonzero(masks(one, [5], [-1], 9)).tolist() for one in (found, other)] == [[0], [0, 1]]


def test_marks(tokenizer):
    grammar = Grammar.choices(["ab"])
    assert grammar.after("</think>") == AfterMark(grammar, "</think>")
    assert hash(grammar.after("</think>")) == hash(AfterMark(grammar, "</think>"))
    for mark, message in (("</thought>", "begins after '</thought>', which is several tokens"), ("", "several tokens")):
        with pytest.raises(HydrajaxError, match=f"^grammar: .*{message}"):
            grammar.after(mark).start(tokenizer, len(tokenizer), (EOS,))
    with pytest.raises(HydrajaxError, match=r"^grammar: requires a tokenizer"):
        AfterMark(Brackets(), "a").start(None, 9, (EOS,))
