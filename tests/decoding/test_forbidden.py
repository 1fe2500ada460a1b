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
END_NOW = {"logit_bias": {letters.END: 50}}


@pytest.fixture(scope="module")
def m():
    return letters.model()


@dataclass(frozen=True)
class SixOfThree(HostGrammar):
    """Six of the first three letters."""

    def after(self, text):
        return frozenset({0, 1, 2} if len(text) < 6 else {letters.END})


def generated(m, **settings):
    """Return the outputs with a tree, which are those without a draft in more steps."""
    settings = {"max_new_tokens": 24, "batch_size": 3} | settings
    found, plain = (m.generate(PROMPTS, tree=tree, **settings) for tree in (letters.TREE, "root"))
    for one, other in zip(found, plain, strict=True):
        assert (one.output_ids, one.text, one.stop_reason) == (other.output_ids, other.text, other.stop_reason)
        assert one.finish_reason == other.finish_reason
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
def test_bad_words_of_one_and_of_several_tokens(m):
    free = generated(m)
    pieces = [free[0].text[2:4], free[1].text[1:4], free[2].text[5]]
    words = token_sequences(m.tokenizer, pieces)
    assert {len(word) for word in words} == {1, 2, 3}
    found = generated(m, bad_words=pieces)
    assert found[1].output_ids == reference(m, words, PROMPTS[1], 24)
    for one in (*found, *generated(m, bad_words=pieces, **SAMPLED)):
        assert not any(piece in one.text for piece in pieces)
    settings = {"grammar": SixOfThree(), "max_new_tokens": 24}
    piece = m.generate(PROMPTS[0], tree="root", **settings).text[2:4]
    one, other = (m.generate(PROMPTS[0], tree=tree, bad_words=[piece], **settings) for tree in (letters.TREE, "root"))
    assert (len(one.text), one.finish_reason, one.output_ids) == (6, "eos", other.output_ids)
    assert piece not in one.text
    every = [first + second for first in "abc" for second in "abc"]
    assert m.generate(PROMPTS[0], tree="root", bad_words=every, **settings).finish_reason == "grammar"


@pytest.mark.slow
def test_allowed_tokens_and_least_lengths(m):
    allowed = [0, 3, 7, letters.END]
    for sampled in ({}, SAMPLED):
        for one in generated(m, allowed_token_ids=allowed, logit_bias={3: 0.5, 4: 100}, **sampled):
            assert set(one.output_ids) <= set(allowed)
    for one in generated(m, min_tokens=7, **END_NOW):
        assert (one.new_tokens, one.finish_reason) == (8, "eos")
    found = m.generate("abc", ignore_eos=True, tree="root", max_new_tokens=9, **END_NOW)
    assert (found.output_ids, found.finish_reason) == ([letters.END] * 9, "length")


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
    ended = m.generate("abc", stop_token_ids=[letters.END], tree="root", max_new_tokens=9, **END_NOW)
    assert (ended.finish_reason, ended.stop_reason) == ("eos", None)


def test_refusals(m):
    for settings, message in [
        ({"bad_words": "ab"}, 'bad_words: got "ab", expected a list of texts'),
        ({"bad_words": [""]}, 'bad_words: got [""], expected a list of texts'),
        ({"allowed_token_ids": []}, "allowed_token_ids: got [], expected token ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: got [-1], expected token ids"),
        ({"allowed_token_ids": [17]}, "allowed_token_ids: got token id 17, expected 0 to 16"),
        ({"stop_token_ids": [17]}, "stop_token_ids: got 17, expected token ids from 0 to 16"),
        ({"min_tokens": -1}, "min_tokens: got -1, expected an integer from 0 up"),
        ({"min_tokens": 2, "stop_token_ids": [1]}, "min_tokens: got 2 with stop_token_ids, expected one of them"),
        ({"min_tokens": 2, "grammar": SixOfThree()}, "min_tokens: got 2 with a grammar, which decides where"),
        ({"min_tokens": 9, "max_new_tokens": 4}, "min_tokens: got 9, expected at most the limit of new tokens, 4"),
        ({"ignore_eos": True, "grammar": SixOfThree()}, "ignore_eos: got true with a grammar, which decides where"),
    ]:
        with pytest.raises(HydrajaxError) as error:
            m.generate("abc", tree="root", **settings)
        assert str(error.value).startswith(message)
