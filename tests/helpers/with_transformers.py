"""Compare a small model with transformers: logits, and greedy ids with and without drafts."""

from __future__ import annotations

import numpy as np
import torch

import hydrajax
from helpers.dense_models import VOCAB, compared
from hydrajax.bench.random_models import random_draft
from hydrajax.formats.draft_registry import KINDS

TOLERANCE = 1e-4
NEW = 12


def assert_equal_logits(pair, single: bool) -> None:
    for what, (ours, theirs) in compared(pair, single).items():
        assert np.abs(theirs).max() > 1, what  # logits of realistic size
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0, err_msg=what)


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(1, VOCAB, random.integers(3, 18)).tolist() for _ in range(count)]


def greedy_ids(pair, prompts: list[list[int]], n_new: int = NEW) -> list[list[int]]:
    """Return transformers' continuations."""
    return [greedy_continuation(pair.theirs, prompt, n_new) for prompt in prompts]


def greedy_continuation(theirs, prompt: list[int], n_new: int) -> list[int]:
    ids, settings = torch.tensor([prompt]), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        # transformers needs the mask because no padding id is set.
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, **settings)
    return out[0, len(prompt) :].tolist()


def generated(pair, prompts: list[list[int]], kind: str) -> list[list[int]]:
    """Return the tokens of tree decoding in batches of 3 with a new draft of this kind."""
    if kind in KINDS:
        drafter, params = random_draft(pair.model, pair.params, kind)
    else:
        m = hydrajax.load(pair.folder).with_draft(kind)
        drafter, params = m.drafter, m.params
    dynamic = drafter.spec.supports_dynamic_tree
    tree = "dynamic-6-2-3" if dynamic else f"chain-{min(drafter.spec.depth, 3)}" if drafter.spec.depth else "root"
    decode = hydrajax.make_decode_fn(pair.model, drafter, tree, max_new_tokens=NEW, eos_ids=())
    longest, found = max(map(len, prompts)), []
    for first in range(0, len(prompts), 3):
        rows = (prompts[first : first + 3] * 3)[:3]
        prompt = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
        found += decode(params, prompt, np.array([len(row) for row in rows], np.int32)).tokens[:, :NEW].tolist()
    return found[: len(prompts)]
