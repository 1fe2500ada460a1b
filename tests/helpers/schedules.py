"""Choices of steps that change at random, and the answers that must not depend on them."""

from __future__ import annotations

import numpy as np

from helpers.letters import answers
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.language_model import LanguageModel
from hydrajax.scheduling.chooser import Chosen
from hydrajax.serve.batcher import Batcher

SECONDS = 300


def choose_at_random(batcher: Batcher, seed: int = 0) -> list[int]:
    """Let every burst take any available choice and at most some steps, and the draft read any prompt or not.

    The batcher's programs must be compiled. Returns the choices so far.
    """
    random, taken = np.random.default_rng(seed), []

    def choose(shape, sequences, available, draft_waits):
        taken.append(int(random.choice(available)))
        return Chosen(taken[-1], int(random.integers(1, 6)), 1.0, 1.0)

    batcher._chooser.choose = choose
    batcher._chooser.last_drafts = lambda batch: bool(random.integers(2))
    batcher._pool._unread.update(batcher._pool.cache_lens)
    return taken


def check_answers(served: LanguageModel, batcher: Batcher, count: int = 9) -> None:
    """Send greedy and sampled requests at once; the answers must be those of `generate`."""
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 16, random.integers(1, 40), dtype=np.int32) for _ in range(count)]
    limits, seeds = random.integers(10, 50, count).tolist(), random.integers(0, 1000, count).tolist()
    rules = [ExactSampling(1.2, top_p=0.9) if at % 2 else Greedy() for at in range(count)]
    requests = []
    for prompt, limit, rule, seed in zip(prompts, limits, rules, seeds, strict=True):
        numbers = {"temperature": rule.temperature, "top_p": rule.top_p} if isinstance(rule, ExactSampling) else {}
        requests.append(batcher.request(prompt, max_new_tokens=limit, seed=seed, **numbers))
    found = [handle.wait(SECONDS) for handle in batcher.submit(requests)]
    for result, wanted in zip(found, answers(served, prompts, rules, limits, seeds), strict=True):
        assert (result.output_ids, result.finish_reason) == (wanted.output_ids, wanted.finish_reason)
