"""Compare chunked prefill and reused prefixes with a prefill of the whole prompt."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.how import how, sampling
from hydrajax.api import make_decode_fn
from hydrajax.decoding.processing import TokenCounts
from hydrajax.decoding.processors import Penalties
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import Params
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.several import with_lookup
from hydrajax.lookahead.drafter import Lookahead
from hydrajax.trees import presets

WIDTH, NEW, SLOTS = 8, 10, 48
DRAFTERS = [
    "none",
    "medusa",
    "hydra++",
    "amphista",
    "eagle",
    "eagle3",
    "mtp of mimo",
    "model",
    "windowed model",
    "lookup",
    "lookahead",
    "lookup with heads",
    "lookup with a model",
]
COMBINED = {"lookup with heads": "hydra++", "lookup with a model": "model"}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]
OTHER = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 11, 12, 0], [2, 7, 1, 16, 15, 14]]


@pytest.mark.slow  # the server's tests cover one drafter by default
@pytest.mark.parametrize("name", DRAFTERS)
def test_chunks_and_reused_prefixes_give_the_tokens_of_a_full_prefill(lab, name):
    made = {"lookup": PromptLookup(depth=4), "lookahead": Lookahead(4, 3, 4)}
    inner = COMBINED.get(name, name)
    drafter = made[name] if name in made else lab.drafters[inner]
    drafter = with_lookup(drafter, 3) if name in COMBINED else drafter
    draft = {} if name in made else lab.draft(inner, 0)
    tree = presets.root() if name == "none" else presets.chain(2)
    params = Params(lab.base(0), draft)
    drawn = sampling(how(processors=[Penalties(presence_penalty=0.5)]), 2, lab.vocab)
    engine = make_decode_fn(lab.model, drafter, tree, max_new_tokens=NEW).engine
    prefill, step = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.decode_step)
    feed, extend = lab.quick_jit(engine.feed), lab.quick_jit(engine.extend)

    def finished(state):
        while not state.output.done.all():
            state = step(params, state)
        return state

    def whole(texts):
        return finished(prefill(params, *right_padded(texts, 32), drawn, slots=SLOTS)).output

    def in_chunks(state, texts, at):
        """Feed each sequence from its own position in chunks; finished sequences wait for the last chunk."""
        at, ends = np.array(at), np.array([len(text) - 2 for text in texts])
        while (at < ends).any():
            until = np.minimum(at + WIDTH, ends)
            more, counts = right_padded([t[a:b] for t, a, b in zip(texts, at, until, strict=True)], WIDTH)
            following = np.array([text[b] for text, b in zip(texts, until, strict=True)], np.int32)
            state, at = feed(params, state, more, counts, following), until
        last = right_padded([text[-2:] for text in texts], WIDTH)
        return finished(extend(params, state, *last, drawn))

    state = in_chunks(engine.empty(2, SLOTS, drawn), TEXTS, [0, 0])
    expected = whole(TEXTS)
    assert expected.lengths.tolist() == [NEW, NEW]
    np.testing.assert_array_equal(state.output.tokens[:, :NEW], expected.tokens[:, :NEW])
    if name != "lookahead":  # its guesses depend on the chunks
        np.testing.assert_array_equal(state.output.accept_lengths, expected.accept_lengths)
    common = np.array([10, 3], np.int32)
    kept = right_padded([text[:n] for text, n in zip(OTHER, common, strict=True)], 16)
    state = lab.quick_jit(engine.rewind)(state, common, TokenCounts.of_prompt(*kept, lab.vocab))
    state = in_chunks(state, OTHER, common)
    np.testing.assert_array_equal(state.output.tokens[:, :NEW], whole(OTHER).tokens[:, :NEW])
