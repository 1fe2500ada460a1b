"""What the draft prepares, against plain passes of the draft over whole texts, one for every outcome.

All on one device: where these functions run says nothing about what they compute.
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
from hydrajax.decoding.sampling import row_keys
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import init_base
from hydrajax.models.llama import Llama
from hydrajax.ssd.draft_side import MISS, NO_ROUND, DraftSide, Verdict
from hydrajax.ssd.fan_out import FanOut

MODEL = Llama(CONFIG.replace(n_layers=1, sliding_window=6))  # so that positions matter twice
FAN_OUT = FanOut((2, 0, 3))
PROMPTS, ROOTS = [[3, 1, 4, 1, 5], [2, 7]], [9, 4]


class Plain:
    """The draft's next tokens, and its keys and values, by a pass over the whole text."""

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
        """Tokens that follow, the likeliest first."""
        return np.argsort(-self.over(text)[1][0, len(text) - 1], kind="stable").tolist()

    def chain(self, text, depth: int) -> list[int]:
        text = list(text)
        for _ in range(depth):
            text.append(self.ranked(text)[0])
        return text[-depth:]


@pytest.fixture(scope="module")
def side():
    """The functions of a draft side, compiled, with their parameters, and the plain draft."""
    params = noise(jax.eval_shape(lambda: init_base(MODEL, jax.random.key(0))), 5)
    drafting = DraftSide(DraftModel(MODEL, VOCAB), FAN_OUT, 24)

    class Compiled:
        plain = Plain(params)
        prepare = functools.partial(quick_jit(drafting.prepare), params)
        answer = functools.partial(quick_jit(drafting.answer), params)

        @staticmethod
        def start():
            prompt, lengths = np.zeros((2, 5), np.int32), np.array([5, 2], np.int32)
            for row, text in enumerate(PROMPTS):
                prompt[row, : len(text)] = text

            @quick_jit
            def run(params):
                state = drafting.read(params, drafting.drafter.init_state(2, CONTEXT), prompt, lengths)
                told = jnp.array(ROOTS), row_keys(jax.random.key(0), 2), per_row(Greedy(), 2), jnp.zeros(2, bool)
                return drafting.first(params, state, *told)

            return run(params)

    return Compiled


def check_round(side, carry, texts, roots):
    """The chain is the draft's, and so is all that is prepared; returns that."""
    chains = [side.plain.chain([*text, root], 2) for text, root in zip(texts, roots, strict=True)]
    np.testing.assert_array_equal(
        carry.drafted.tokens, [[root, *chain] for root, chain in zip(roots, chains, strict=True)]
    )
    prepared = side.prepare(carry)
    for row, (text, root, chain) in enumerate(zip(texts, roots, chains, strict=True)):
        for i, (accepted, rank) in enumerate(zip(FAN_OUT.accept_lengths, FAN_OUT.ranks, strict=True)):
            after = [*text, root, *chain[:accepted]]
            # Of what the draft would say there, its own next token is what the base has just rejected.
            guess = side.plain.ranked(after)[rank + (accepted < 2)]
            assert prepared.roots[row, i] == guess
            assert prepared.tokens[row, i].tolist() == [guess, *side.plain.chain([*after, guess], 2)]
    return chains, prepared


def check_cache(side, carry, texts):
    """Keys and values of the whole text, each once, as a plain pass has them."""
    assert carry.state.cache.lengths.tolist() == [len(text) for text in texts]
    assert not carry.state.waits.any()
    for row, text in enumerate(texts):
        for mine, full in zip(
            jax.tree.leaves(carry.state.cache.layers), jax.tree.leaves(side.plain.over(text)[0]), strict=True
        ):
            np.testing.assert_allclose(mine[row, :, : len(text)], full[0, :, : len(text)], atol=2e-4, rtol=1e-4)


def test_rounds_of_hits_and_misses(side):
    """Three rounds: both rows hit, one hits and one misses, one has finished and one misses."""
    carry, texts, roots = side.start(), PROMPTS, ROOTS
    # Which outcome comes about in each row: its number among the prepared ones, or (accept length, root) of none.
    outcomes = [(0, 4), (3, (1, 11)), (None, (2, None))]
    for outcome in outcomes:
        chains, prepared = check_round(side, carry, texts, roots)
        counts, next_roots, done = [], [], []
        for row, found in enumerate(outcome):
            accepted, root = 0, 0
            if isinstance(found, int):
                accepted, root = int(FAN_OUT.accept_lengths[found]), int(prepared.roots[row, found])
            elif found:
                accepted, root = found
                if root is None:
                    root = next(token for token in range(VOCAB) if token not in prepared.roots[row, 2:])
            counts.append(0 if found is None else accepted + 1)
            next_roots.append(root)
            done.append(found is None)
        verdict = Verdict(np.array(counts, np.int32), np.array(next_roots, np.int32), np.array(done))
        carry = side.answer(carry, prepared, verdict)
        texts = [
            [*text, *([root, *chain][:count])]
            for text, root, chain, count in zip(texts, roots, chains, counts, strict=True)
        ]
        roots = next_roots
        check_cache(side, carry, texts)
    assert carry.drafted.tokens[1].tolist() == [roots[1], *side.plain.chain([*texts[1], roots[1]], 2)]
    assert carry.record[0, :3].tolist() == [0, 3, NO_ROUND]
    assert carry.record[1, :4].tolist() == [4, MISS, MISS, NO_ROUND]
    assert carry.lengths.tolist() == [len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
