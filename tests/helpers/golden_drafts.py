"""Recordings of official code of drafts, and decoding as they were made."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import numpy as np

from helpers.how import sampling
from helpers.lab import quick_jit
from helpers.recordings import need
from hydrajax import load
from hydrajax.api import make_decode_fn
from hydrajax.language_model import LanguageModel

DRAFT_OF = {"ddtree": "dflash", "ddtree_ds": "dsdflash"}
LONGEST = 140  # above the longest recorded output, 128 and one step's overshoot, so that no recorded step is cut


@cache
def loaded_draft(folder: Path, name: str) -> LanguageModel:
    """Return the base and the draft of a recording of a draft of one pass, such as ``ddtree_a``."""
    kind, _, base = name.rpartition("_")
    draft = folder / f"{DRAFT_OF.get(kind, kind)}_{base}" / "draft"
    need(draft / "config.json")
    return load(folder / f"base_{base}", draft)


def steps_of(loaded: LanguageModel, tree, record, n_steps: int):
    """Decode the recorded prompts in one ragged batch; the official code decoded them one by one.

    Returns the tokens and the tree of the proposal of each step, and the final state.
    """
    engine = make_decode_fn(loaded.model, loaded.drafter, tree, max_new_tokens=LONGEST).engine
    prompts = np.maximum(record["prompts"], 0).astype(np.int32)
    prompts = np.pad(prompts, ((0, 0), (0, 64 - prompts.shape[1])))
    drawn, lengths = sampling(None, len(prompts), loaded.config.vocab_size), record["prompt_lens"].astype(np.int32)
    state = quick_jit(lambda params: engine.prefill(params, prompts, lengths, drawn))(loaded.params)

    @quick_jit
    def step(params, state):
        proposal = engine.propose(params, state)
        return proposal.tokens, proposal.tree, engine.decode_step(params, state)

    proposals = []
    for _ in range(n_steps):
        tokens, made, state = jax.device_get(step(loaded.params, state))
        proposals.append((tokens, made))
    return proposals, state


def check_end_of_sequence(loaded: LanguageModel, tree, record) -> None:
    """Official codes keep accepted tokens after EOS or count them differently; our text ends with EOS."""
    eos, prompt = int(record["eos_id"]), record["prompt"].astype(np.int32)
    ids = record["output_ids"][len(prompt) :]
    decode = make_decode_fn(loaded.model, loaded.drafter, tree, max_new_tokens=LONGEST, eos_ids=(eos,))
    out = jax.device_get(decode(loaded.params, prompt[None]))
    length = int(np.argmax(ids == eos)) + 1
    assert ids[length - 1] == eos
    assert out.ids() == [ids[:length].tolist()]
    steps, recorded = out.accept_lengths[0, : out.steps[0]], record["accept_lengths"][: out.steps[0]]
    np.testing.assert_array_equal(steps[:-1], recorded[:-1])
    assert steps[-1] <= recorded[-1]
