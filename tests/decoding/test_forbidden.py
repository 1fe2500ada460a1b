"""Forbidden and allowed tokens, ``stop_token_ids`` and least lengths: equal outputs with a tree and without one."""

from dataclasses import dataclass

import numpy as np
import pytest

from helpers import letters
from helpers.host_grammars import HostGrammar
from hydrajax.bench.uncached_forward import all_logits
from hydrajax.decoding.forbidden import Forbidden, token_sequences
from hydrajax.errors import HydrajaxError

PROMPTS = ["a bad cafe", "no", "deaf dog"]
SAMPLED = {"rule": "exact", "temperature": 1.4, "seed": 5}


@pytest.fixture(scope="module")
def m():
    return letters.model()


def generated(m, **settings):
    """Return the outputs with a tree, after they equal those without a draft."""
    settings = {"max_new_tokens": 24, "batch_size": 3} | settings
    found, plain = (m.generate(PROMPTS, tree=tree, **settings) for tree in (letters.TREE, "root"))
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    assert [(one.text, one.finish_reason, one.stop_reason) for one in found] == [
        (one.text, one.finish_reason, one.stop_reason) for one in plain
    ]
    assert sum(one.steps for one in found) < sum(one.steps for one in plain)
    return found


def reference(m, words, prompt: str, limit: int) -> list[int]:
    """Decode token by token: the likeliest token that does not complete a word."""
    ids, output = m.tokenizer.encode(prompt), []
    while len(output) < limit and output[-1:] != [letters.END]:
        padded = np.array([*ids, *output] + [0] * (limit - len(output)), np.int32)
        logits = np.array(all_logits(m.model, m.params.base, padded)[len(ids) + len(output) - 1])
        for *before, last in words:
            if not before or output[-len(before) :] == before:
                logits[last] = -np.inf
        output.append(int(logits.argmax()))
    return output


@pytest.mark.slow
def test_bad_words_of_one_and_of_several_tokens(m):
    free = generated(m)
    pieces = [free[0].text[2:4], free[1].text[1:4], free[2].text[5]]
    found = generated(m, bad_words=pieces)
    words = token_sequences(m.tokenizer, pieces)
    assert {len(word) for word in words} == {1, 2, 3}
    for one, before in zip(found, free, strict=True):
        assert not any(piece in one.text for piece in pieces)
        assert one.output_ids != before.output_ids
    assert found[1].output_ids == reference(m, words, PROMPTS[1], 24)
    for one in generated(m, bad_words=pieces, **SAMPLED):
        assert not any(piece in one.text for piece in pieces)


@dataclass(frozen=True)
class SixOfThree(HostGrammar):
    """Six of the first three letters."""

    def after(self, text):
        return frozenset({0, 1, 2} if len(text) < 6 else {letters.END})


@pytest.mark.slow
def test_bad_words_under_a_grammar(m):
    settings = {"grammar": SixOfThree(), "max_new_tokens": 24}
    piece = m.generate(PROMPTS[0], tree="root", **settings).text[2:4]
    found = [m.generate(PROMPTS[0], tree=tree, bad_words=[piece], **settings) for tree in (letters.TREE, "root")]
    assert found[0].output_ids == found[1].output_ids
    assert (len(found[0].text), found[0].finish_reason) == (6, "eos")
    assert piece not in found[0].text
    every = [one + other for one in "abc" for other in "abc"]
    assert m.generate(PROMPTS[0], tree="root", bad_words=every, **settings).finish_reason == "grammar"


def test_masks_are_those_of_the_texts_at_the_nodes():
    """Random trees under random texts: a token is forbidden if, and only if, it completes a sequence."""
    random = np.random.default_rng(0)
    for _ in range(200):
        words = tuple(tuple(random.integers(0, 3, random.integers(2, 5)).tolist()) for _ in range(3))
        place = Forbidden(words).start(None, 40, ()).copy()
        text = random.integers(0, 3, random.integers(1, 7)).tolist()
        place.follow(text[:1])
        place.follow(text)
        nodes = int(random.integers(1, 9))
        parents = np.array([-1, *(random.integers(0, node) for node in range(1, nodes))], np.int32)
        tokens, masks = random.integers(0, 3, nodes).astype(np.int32), np.zeros((nodes, 2), np.uint32)
        place.allow(tokens, parents, masks)
        texts = [text]
        for node in range(1, nodes):
            texts.append([*texts[parents[node]], int(tokens[node])])
        for mask, before in zip(masks, texts, strict=True):
            allowed = {token for token in range(40) if mask[token // 32] >> np.uint32(token % 32) & 1}
            completes = {word[-1] for word in words if before[1 - len(word) :] == list(word[:-1])}
            assert allowed == set(range(40)) - completes


@pytest.mark.slow
def test_allowed_tokens(m):
    allowed = [0, 3, 7, letters.END]
    for sampled in ({}, SAMPLED):
        for one in generated(m, allowed_token_ids=allowed, logit_bias={3: 0.5, 4: 100}, **sampled):
            assert set(one.output_ids) <= set(allowed)


@pytest.mark.slow
def test_stop_tokens_end_a_text_as_eos_does(m):
    free = generated(m)
    token = free[0].output_ids[5]
    for included in (False, True):
        found = generated(m, stop_token_ids=[token], include_stop_str_in_output=included)
        for one, before in zip(found, free, strict=True):
            ids = before.output_ids
            end = ids.index(token) + 1 if token in ids else len(ids)
            assert one.output_ids == ids[:end]
            if token in ids:
                assert (one.finish_reason, one.stop_reason) == ("stop", token)
                assert one.text == before.text[: end - 1 + included]
    stream = m.stream(PROMPTS[0], stop_token_ids=[token], tree="root", max_new_tokens=24)
    assert "".join(stream) == free[0].text[: free[0].output_ids.index(token)]
    stop = free[1].text[4:6]
    found = m.generate(PROMPTS[1], stop=[stop], include_stop_str_in_output=True, tree="root", max_new_tokens=24)
    assert (found.text, found.stop_reason) == (free[1].text[: free[1].text.index(stop) + 2], stop)
    # EOS stays EOS.
    ended = m.generate("abc", stop_token_ids=[letters.END], logit_bias={letters.END: 50}, tree="root", max_new_tokens=9)
    assert (ended.finish_reason, ended.stop_reason) == ("eos", None)


@pytest.mark.slow
def test_a_least_length_and_ignored_eos(m):
    bias = {letters.END: 50}
    for one in generated(m, min_tokens=7, logit_bias=bias):
        assert (one.new_tokens, one.finish_reason) == (8, "eos")
    found = m.generate("abc", ignore_eos=True, logit_bias=bias, tree="root", max_new_tokens=9)
    assert (found.output_ids, found.finish_reason) == ([letters.END] * 9, "length")


def test_refusals(m):
    grammar = SixOfThree()
    for settings, message in [
        ({"bad_words": "ab"}, 'bad_words: got "ab", expected a list of texts'),
        ({"bad_words": [""]}, 'bad_words: got [""], expected a list of texts'),
        ({"allowed_token_ids": []}, "allowed_token_ids: got [], expected token ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: got [-1], expected token ids"),
        ({"allowed_token_ids": [17]}, "allowed_token_ids: got token id 17, expected 0 to 16"),
        ({"stop_token_ids": [17]}, "stop_token_ids: got 17, expected token ids from 0 to 16"),
        ({"min_tokens": -1}, "min_tokens: got -1, expected an integer from 0 up"),
        ({"min_tokens": 2, "stop_token_ids": [1]}, "min_tokens: got 2 with stop_token_ids, expected one of them"),
        ({"min_tokens": 2, "grammar": grammar}, "min_tokens: got 2 with a grammar, which decides where"),
        ({"ignore_eos": True, "grammar": grammar}, "ignore_eos: got true with a grammar, which decides where"),
    ]:
        with pytest.raises(HydrajaxError) as error:
            m.generate("abc", tree="root", **settings)
        assert str(error.value).startswith(message)
