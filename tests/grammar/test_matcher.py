"""Masks at every node of random trees, and forced tokens, against regular expressions by another engine.

The patterns are random, and `regex` (partial matches) judges every token of a small vocabulary at every node.
"""

import functools
import random

import numpy as np
import pytest
import regex

from helpers import small_tokenizer
from hydrajax.decoding.constraints import words
from hydrajax.errors import HydrajaxError
from hydrajax.grammar import matcher as matchers
from hydrajax.grammar.grammar import Grammar

VOCAB, EOS = 304, 2  # the tokenizer has 300 tokens
NOTHING = np.array([-1], np.int32)


@functools.cache
def tokenizer():
    return small_tokenizer.byte_level()


@functools.cache
def token_bytes() -> dict[int, bytes]:
    """Return the bytes of every token that is not special (tests/grammar/test_vocabulary.py checks them)."""
    assert tokenizer().backend_tokenizer.decoder.decode(["Ġt", "Ã", "Ł"]) == " tß"
    vocabulary = tokenizer().get_vocab().items()
    return {number: small_tokenizer.bytes_of(token) for token, number in vocabulary if number > EOS}


ALPHABET = ["a", "b", "t", "r", "e", "h", " ", "{", '"', ":", ",", "1", "2", "ß", "日", "🌳"]
SPECIAL = set("{")


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    """Return a pattern of the syntax that Rust and Python share; its texts are of letters of `ALPHABET`."""
    kind = rng.choice(["text", "class", "both", "either", "repeat", "option"] if depth else ["text", "class"])
    if kind == "text":
        return "".join(map(escaped, rng.choices(ALPHABET, k=rng.randint(1, 6))))
    if kind == "class":
        return f"[{''.join(map(escaped, rng.sample(ALPHABET, rng.randint(2, 5))))}]"
    first = random_pattern(rng, depth - 1)
    if kind == "both":
        return first + random_pattern(rng, depth - 1)
    if kind == "either":
        return f"(?:{first}|{random_pattern(rng, depth - 1)})"
    if kind == "option":
        return f"(?:{first})?"
    least = rng.randint(0, 2)
    return f"(?:{first}){{{least},{least + rng.randint(1, 3)}}}"


def escaped(letter: str) -> str:
    return "\\" + letter if letter in SPECIAL else letter


def can_continue(pattern: str, text: bytes) -> bool:
    """Return whether some text of the pattern begins with these bytes, which may end within a character."""
    try:
        return bool(regex.fullmatch(pattern, text.decode(), partial=True))
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        whole, rest = text[: error.start], text[error.start :]
        endings = [letter for letter in ALPHABET if letter.encode().startswith(rest)]
        return any(regex.fullmatch(pattern, whole.decode() + letter, partial=True) for letter in endings)


def is_complete(pattern: str, text: bytes) -> bool:
    try:
        return bool(regex.fullmatch(pattern, text.decode()))
    except UnicodeDecodeError:
        return False


def start(grammar: Grammar):
    return grammar.start(tokenizer(), VOCAB, (EOS,))


def masks(matcher, tokens=NOTHING, parents=NOTHING) -> list[set[int]]:
    """Return the tokens allowed after each node."""
    allowed = np.full((len(tokens), words(VOCAB)), 0xFFFFFFFF, np.uint32)
    matcher.allow(np.array(tokens, np.int32), np.array(parents, np.int32), allowed)
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def possible(pattern: str, text: bytes) -> set[int]:
    """Return the tokens that may follow a text, by brute force."""
    found = {number for number, token in token_bytes().items() if can_continue(pattern, text + token)}
    return found | {EOS} if is_complete(pattern, text) else found


def forced_byte(tokens: set[int]) -> bool:
    """Return whether all tokens begin with the same byte: llguidance then chooses among them."""
    return EOS not in tokens and len({token_bytes()[number][0] for number in tokens}) == 1


def text_of(tokens) -> bytes:
    return b"".join(token_bytes()[number] for number in tokens)


def random_tree(rng: random.Random, pattern: str, text: bytes, size: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents; most tokens may follow their parents' texts, others are random, EOS or missing."""
    tokens, parents, texts, live = [7], [-1], [text], [0]
    for node in range(1, size):
        parent = rng.choice(live[-3:]) if rng.random() < 0.8 else rng.randrange(-1, node)
        legal = sorted(possible(pattern, texts[parent]) - {EOS}) if parent in live and rng.random() < 0.8 else []
        token = rng.choice(legal or [rng.randrange(VOCAB), -1, EOS])
        live += [node] if legal else []
        tokens.append(token)
        parents.append(parent)
        texts.append(texts[parent] + token_bytes().get(token, b""))
    return tokens, parents


def check_tree(rng: random.Random) -> tuple[int, int]:
    """Check the masks of one random tree; return how many nodes were compared, and how many of them are forced."""
    pattern = random_pattern(rng)
    matcher, written = start(Grammar.regex(pattern)), []
    for _ in range(rng.randrange(5)):
        allowed = masks(matcher)[0] - {EOS}
        if not allowed:
            break
        written.append(rng.choice(sorted(allowed)))
        matcher.follow(written)
    tokens, parents = random_tree(rng, pattern, text_of(written), rng.randint(1, 14))
    found = masks(matcher, tokens, parents)
    assert matcher.error is None
    paths: dict[int, list[int]] = {0: written}
    forced = 0
    for node in range(len(tokens)):
        parent, token = parents[node], tokens[node]
        if node:
            if parent not in paths or token not in found[parent] or token == EOS:
                continue  # never accepted, or the end of the text
            paths[node] = [*paths[parent], token]
        expected = possible(pattern, text_of(paths[node]))
        if forced_byte(expected):
            forced += 1
            assert found[node], (pattern, paths[node])
            assert found[node] <= expected, (pattern, paths[node])
        else:
            assert found[node] == expected, (pattern, paths[node])
    assert masks(matcher)[0] == found[0]  # unchanged by the tree
    return len(paths), forced


@pytest.mark.parametrize("cases", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_masks_at_every_node_are_those_of_another_engine(cases):
    rng = random.Random(cases)
    nodes = np.array([check_tree(rng) for _ in range(cases)]).sum(axis=0)
    assert nodes[0] > 3 * cases
    assert 0 < nodes[1] < nodes[0] * 0.7


def test_masks_of_another_node_would_be_noticed():
    """The comparison above fails for masks that belong to the node before."""
    matcher = start(Grammar.regex("a(be|1a)"))
    ids = {token: number for number, token in token_bytes().items()}
    tokens, parents = [7, ids[b"a"], ids[b"b"], ids[b"1"]], [-1, 0, 1, 1]
    found = masks(matcher, tokens, parents)
    expected = [possible("a(be|1a)", text) for text in (b"", b"a", b"ab", b"a1")]
    assert all(one <= other for one, other in zip(found, expected, strict=True))
    assert all(one - other for one, other in zip(found[1:], expected[:-1], strict=True))


def completion(rng: random.Random, matcher, most: int = 60) -> list[int]:
    """Return random allowed tokens to the end of the text."""
    text: list[int] = []
    while len(text) < most and (not text or text[-1] != EOS):
        text.append(rng.choice(sorted(masks(matcher)[0])))
        matcher.follow(text)
        assert matcher.error is None
    return text


@pytest.mark.parametrize("cases", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_forced_tokens_begin_every_completion(cases):
    rng = random.Random(cases)
    longest = ended = 0
    for _ in range(cases):
        pattern = random_pattern(rng)
        matcher = start(Grammar.regex(pattern))
        text = completion(rng, matcher.copy())
        assert text[-1] != EOS or is_complete(pattern, text_of(text[:-1]))
        for place in range(len(text)):
            most = rng.randint(1, 12)
            found = matcher.forced(most)
            assert len(found) <= most
            assert text[place : place + len(found)] == found
            ended += found[-1:] == [EOS]
            longest = max(longest, len(found))
            matcher.follow(text[: place + 1])
    assert longest > 3
    assert ended


def test_forced_tokens_and_the_end_of_the_text():
    for grammar, text, ends in [
        (Grammar.regex("the tree of (the|a) draft"), b"the tree of", False),  # a space begins the next token,
        (Grammar.choices(["naïve café"]), "naïve café".encode(), True),
        (Grammar.json_schema({"const": {"a": [1, None, "日本"]}}), '{"a": [1, null, "日本"]}'.encode(), True),
        (Grammar.regex("(the tree )*"), b"", False),  # EOS may follow as well
        (Grammar.regex("x(y|z)?"), b"x", False),
    ]:
        matcher = start(grammar)
        found = matcher.forced(100)
        assert (found[-1:] == [EOS]) is ends
        assert text_of(found[: len(found) - ends]) == text
        assert found[: len(found) - ends] == tokenizer().encode(text.decode(), add_special_tokens=False)
        assert matcher.forced(2) == found[:2]
        assert masks(matcher)[0] >= set(found[:1])  # nothing was consumed


def test_copies_change_on_their_own():
    matcher = start(Grammar.regex("ab|ba"))
    ids = {token: number for number, token in token_bytes().items()}
    other = matcher.copy()
    other.follow([ids[b"a"]])
    again = other.copy()
    assert masks(other)[0] == masks(again)[0] == {ids[b"b"]}
    assert masks(matcher)[0] == possible("ab|ba", b"")


def test_nothing_follows_the_end():
    matcher = start(Grammar.choices(["a"]))
    text = matcher.forced(5)
    matcher.follow(text)
    masks(matcher)
    assert text[-1] == EOS
    assert matcher.error is None


ONE_BRANCH_FAILS = 'start: "a" X | "b" Y\nX: /[xy]+/\nY: /([a-z]{1,30}[0-9]{1,30}){1,%d}!/'


@pytest.fixture
def little_fuel(monkeypatch):
    monkeypatch.setattr(matchers, "LIMITS", {"step_lexer_fuel": 100, "step_max_items": 50_000})


def test_an_error_on_one_branch_leaves_the_others(little_fuel):
    """The branch of b exceeds the limit; the masks of the other nodes are those without it."""
    matcher, ids = start(Grammar.lark(ONE_BRANCH_FAILS % 41)), {t: n for n, t in token_bytes().items()}
    letters = [ids[letter] for letter in (b"a", b"b", b"x", b"y")]
    a, b, x, y = letters
    found = masks(matcher, [7, b, x, a, y], [-1, 0, 1, 0, 3])
    assert not found[2]  # the error
    assert {a, b} <= found[0]
    assert found[3] == possible("a[xy]+", b"a")
    assert found[4] == possible("a[xy]+", b"ay")
    assert matcher.error is None
    matcher.follow([a, y])
    assert matcher.error is None
    assert masks(matcher)[0] == possible("a[xy]+", b"ay")


def test_an_error_of_one_sequence_leaves_other_sequences_of_the_grammar(little_fuel):
    grammar, ids = Grammar.lark(ONE_BRANCH_FAILS % 42), {t: n for n, t in token_bytes().items()}
    failing, other = start(grammar), start(grammar)
    failing.follow([ids[b"b"]])
    masks(failing)
    failing.follow([ids[b"b"], ids[b"x"]])
    masks(failing)
    assert "lexer error" in failing.error
    for matcher in (other, start(grammar)):
        matcher.follow([ids[b"a"], ids[b"y"]])
        assert masks(matcher)[0] == possible("a[xy]+", b"ay")
        assert matcher.error is None


def test_a_text_that_the_grammar_does_not_allow_is_an_error():
    matcher = start(Grammar.choices(["tree"]))
    matcher.follow([5])
    assert matcher.error
    assert "\n" not in matcher.error
    with pytest.raises(HydrajaxError):
        start(Grammar.lark("start: start"))


BATCH, NEW = 25, 24
