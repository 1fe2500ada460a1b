"""The speculation cache against uncached passes of the draft model over whole sequences, one for each outcome.

All on one device: the functions compute the same on several.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import per_row
from helpers.lab import CONFIG, CONTEXT, VOCAB, quick_jit
from helpers.noise import noise
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.random_keys import row_keys
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.models.attention import causal_mask
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.speculator import MISS, NO_ROUND, Speculator, VerificationOutcome

MODEL = Llama(CONFIG.replace(n_layers=1, sliding_window=6))  # so that positions matter twice
FAN_OUT = FanOut((2, 0, 3))
PROMPTS, ROOTS = [[3, 1, 4, 1, 5], [2, 7]], [9, 4]


class Plain:
    """The draft model's next tokens, keys and values from a pass over the whole sequence."""

    def __init__(self, params):
        self.params, self.drafter = params, DraftModel(MODEL, VOCAB)
        self._pass = quick_jit(self._over)

    def _over(self, params, tokens):
        positions = jnp.arange(CONTEXT)[None]
        forward = MODEL.apply({"params": params}, tokens, positions, causal_mask(CONTEXT))
        return forward.block, MODEL.apply({"params": params}, forward.hidden, method="logits")

    def over(self, text):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(text)] = text
        return jax.device_get(self._pass(self.params, padded))

    def ranked(self, text) -> list[int]:
        """Next tokens, the likeliest first."""
        return np.argsort(-self.over(text)[1][0, len(text) - 1], kind="stable").tolist()

    def chain(self, text, depth: int) -> list[int]:
        text = list(text)
        for _ in range(depth):
            text.append(self.ranked(text)[0])
        return text[-depth:]


@pytest.fixture(scope="module")
def speculator():
    """A compiled speculator with its parameters, and the uncached draft."""
    params = noise(jax.eval_shape(lambda: init_base(MODEL, jax.random.key(0))), 5)
    speculator = Speculator(DraftModel(MODEL, VOCAB), FAN_OUT, 24)

    class Compiled:
        plain = Plain(params)
        prepare = functools.partial(quick_jit(speculator.prepare), params)
        resolve = functools.partial(quick_jit(speculator.resolve), params)

        @staticmethod
        def start():
            prompt, lengths = np.zeros((2, 5), np.int32), np.array([5, 2], np.int32)
            for row, text in enumerate(PROMPTS):
                prompt[row, : len(text)] = text

            @quick_jit
            def run(params):
                state = speculator.feed(params, speculator.drafter.init_state(2, CONTEXT), prompt, lengths)
                start = jnp.array(ROOTS), row_keys(jax.random.key(0), 2), per_row(Greedy(), 2), jnp.zeros(2, bool)
                return speculator.begin(params, state, *start)

            return run(params)

    return Compiled


def check_round(speculator, state, texts, roots):
    """Check the chain and the speculation cache; return both."""
    chains = [speculator.plain.chain([*text, root], 2) for text, root in zip(texts, roots, strict=True)]
    np.testing.assert_array_equal(
        state.speculation.tokens, [[root, *chain] for root, chain in zip(roots, chains, strict=True)]
    )
    cache = speculator.prepare(state)
    for row, (text, root, chain) in enumerate(zip(texts, roots, chains, strict=True)):
        for i, (accepted, rank) in enumerate(zip(FAN_OUT.accept_lengths, FAN_OUT.ranks, strict=True)):
            after = [*text, root, *chain[:accepted]]
            # At accept lengths below K the base has rejected the draft's own next token.
            guess = speculator.plain.ranked(after)[rank + (accepted < 2)]
            assert cache.bonus_tokens[row, i] == guess
            assert cache.tokens[row, i].tolist() == [guess, *speculator.plain.chain([*after, guess], 2)]
    return chains, cache


def check_cache(speculator, state, texts):
    """Check keys and values of the whole sequence against the uncached pass."""
    assert state.draft.cache.lengths.tolist() == [len(text) for text in texts]
    assert not state.draft.waits.any()
    for row, text in enumerate(texts):
        for mine, full in zip(
            jax.tree.leaves(state.draft.cache.layers), jax.tree.leaves(speculator.plain.over(text)[0]), strict=True
        ):
            np.testing.assert_allclose(mine[row, :, : len(text)], full[0, :, : len(text)], atol=2e-4, rtol=1e-4)


@pytest.mark.slow  # test_split.py decodes with hits and misses
def test_rounds_of_hits_and_misses(speculator):
    """Three rounds: two hits, a hit and a miss, a finished sequence and a miss."""
    state, texts, roots = speculator.start(), PROMPTS, ROOTS
    # The outcome of each sequence: an index into the speculation cache, or (accept length, root) of a miss.
    rounds = [(0, 4), (3, (1, 11)), (None, (2, None))]
    for found_in_row in rounds:
        chains, cache = check_round(speculator, state, texts, roots)
        counts, next_roots, done = [], [], []
        for row, found in enumerate(found_in_row):
            accepted, root = 0, 0
            if isinstance(found, int):
                accepted, root = int(FAN_OUT.accept_lengths[found]), int(cache.bonus_tokens[row, found])
            elif found:
                accepted, root = found
                if root is None:
                    root = next(token for token in range(VOCAB) if token not in cache.bonus_tokens[row, 2:])
            counts.append(0 if found is None else accepted + 1)
            next_roots.append(root)
            done.append(found is None)
        outcome = VerificationOutcome(np.array(counts, np.int32), np.array(next_roots, np.int32), np.array(done))
        state = speculator.resolve(state, cache, outcome)
        texts = [
            [*text, *([root, *chain][:count])]
            for text, root, chain, count in zip(texts, roots, chains, counts, strict=True)
        ]
        roots = next_roots
        check_cache(speculator, state, texts)
    assert state.speculation.tokens[1].tolist() == [roots[1], *speculator.plain.chain([*texts[1], roots[1]], 2)]
    assert state.record[0, :3].tolist() == [0, 3, NO_ROUND]
    assert state.record[1, :4].tolist() == [4, MISS, MISS, NO_ROUND]
    assert state.lengths.tolist() == [len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
