"""The story of docs/adding_a_drafter.md: a drafter in thirty lines, on the small LLaMA of tests/golden.

The text is compared with the base's greedy text as transformers computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import pytest

import hydrajax
from hydrajax.drafters.drafter import DrafterSpec, Proposal, SeesAcceptedOnly

PROMPTS = ["def close(self):\n    return self.", "class Names(list):\n    def __init__(self"]
NEW = 48


@pytest.fixture(scope="module")
def base(golden) -> Path:
    """A Hugging Face directory: configuration, weights and tokenizer."""
    return golden / "base" / "mha"


@pytest.fixture(scope="module")
def greedy(base) -> Callable[[str], list[int]]:
    """``greedy(prompt)``: the next ``NEW`` tokens by transformers, each the argmax of the base's logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)

    def run(prompt: str) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        return found[0, ids.shape[1] :].tolist()

    return run


@dataclass(frozen=True)
class UsualFollower(SeesAcceptedOnly):
    """A drafter that proposes after each token the one that usually follows it, in a chain.

    A drafter is a frozen dataclass of its settings. This one has neither parameters nor state.
    """

    followers: tuple[int, ...]  # one token id per token id

    @property
    def spec(self):
        return DrafterSpec(depth=3, default_tree="chain-3")

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return {}

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return state

    def propose(self, params, state, root, tree, base, draw=None):
        chain = [root]
        for _ in range(tree.depth):
            chain.append(jnp.asarray(self.followers, jnp.int32)[chain[-1]])
        return Proposal(jnp.stack(chain, axis=1), tree.topology)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        raise NotImplementedError("only `hydrajax tree search` asks for ranks")


def test_add_a_drafter(base, greedy):
    """Write a drafter in thirty lines, and pass it to `generate`. It saves forward passes and cannot change the text.

    Its steps can be counted by hand: a step emits the base's next token and the guesses after it that the base shares.
    """
    model = hydrajax.load(base)
    earlier = model.generate(PROMPTS[1], max_new_tokens=200).output_ids
    pairs = Counter(pairwise(earlier))
    usual = dict(sorted(pairs, key=pairs.get))  # the most frequent pair of each first token comes last, and stays
    drafter = UsualFollower(tuple(usual.get(token, 0) for token in range(model.config.vocab_size)))

    answer = model.generate(PROMPTS[0], draft=drafter, tree="chain-3", max_new_tokens=NEW)
    expected, lengths = greedy(PROMPTS[0]), []
    assert answer.output_ids == expected
    while (start := sum(lengths)) < NEW:
        shared = [drafter.followers[token] == after for token, after in pairwise(expected[start : start + 4])]
        lengths.append(1 + [*shared, False].index(False))
    assert answer.emitted_per_step == lengths
    assert max(lengths) > 1
