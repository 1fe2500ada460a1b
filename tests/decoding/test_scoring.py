"""Scores of given texts against transformers and against full passes of the base."""

from functools import partial

import jax
import numpy as np
import pytest

import hydrajax
from helpers.lab import hybrid_lab
from helpers.log_probabilities import check_top, of_whole_text
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.scoring import token_scores

K, SIZES = 4, (20, 7)


def texts(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab_size, size).tolist() for size in SIZES]


def check(model, base, rows: list[list[int]], wanted) -> None:
    """Compare padded rows, in chunks of three positions, with ``wanted(ids)``, log-probabilities ``[T-1, V]``."""
    score = jax.jit(partial(token_scores, model, k=K, tokens_at_once=len(rows) * 3))
    (chosen, top), ranks = jax.device_get(score(base, right_padded(rows, 24)[0]))
    for row, ids in enumerate(rows):
        log_p, size = wanted(ids), len(ids)
        own = log_p[np.arange(size - 1), ids[1:]]
        assert (chosen[row, 0], ranks[row, 0]) == (0, 0)
        np.testing.assert_allclose(chosen[row, 1:size], own, atol=1e-4)
        check_top(log_p, top.ids[row, 1:size], top.logprobs[row, 1:size])
        assert ranks[row, 1:size].tolist() == (1 + (log_p > own[:, None] + 1e-5).sum(axis=1)).tolist()


def test_scores_are_those_of_transformers(tiny_checkpoint):
    import torch
    from transformers import AutoModelForCausalLM

    m, theirs = hydrajax.load(tiny_checkpoint), AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()

    def wanted(ids):
        with torch.no_grad():
            return torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :-1].double(), dim=-1).numpy()

    check(m.model, m.params.base, texts(m.config.vocab_size), wanted)


@pytest.mark.slow
def test_scores_of_a_base_with_recurrent_layers():
    lab = hybrid_lab()
    check(lab.model, lab.base(0), texts(17), lambda ids: of_whole_text(lab.model, lab.base(0), ids[:1], ids[1:]))
