"""Recordings of official code, decoding as they were made, and comparison with them."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import quick_jit
from helpers.recordings import as_recorded, need
from hydrajax import load
from hydrajax.api import make_decode_fn
from hydrajax.language_model import LanguageModel

DRAFT_OF = {"ddtree": "dflash", "ddtree_ds": "dsdflash"}
TOLERANCE = 1e-4  # on logits, hidden states and scores, as the README of the recordings advises
CLOSE = 1e-4  # below this margin two nodes of a tree may be swapped
LONGEST = 140  # above the longest recorded output, 128 and one step's overshoot, so that no recorded step is cut


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def near(ours, recorded) -> None:
    np.testing.assert_allclose(as_recorded(np.asarray(ours), recorded), recorded, atol=TOLERANCE, rtol=0)


@cache
def loaded_draft(folder: Path, name: str) -> LanguageModel:
    """Return the base and the draft of a recording of a draft of one pass, such as ``ddtree_a``."""
    kind, _, base = name.rpartition("_")
    draft = folder / f"{DRAFT_OF.get(kind, kind)}_{base}" / "draft"
    need(draft / "config.json")
    return load(folder / f"base_{base}", draft)


def steps_of(loaded: LanguageModel, tree, record):
    """Decode the recorded prompts in one ragged batch; the official code decoded them one by one.

    Returns the tokens and the tree of the proposal of each step, and the final state.
    """
    n_steps = int((record["accept_lengths"] >= 0).sum(axis=1).max())
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


def check_outputs(record, out, roots=None) -> None:
    """Compare token ids and the accept lengths of all recorded steps. JetSpec's last token may be the next root."""
    for row, accepts in enumerate(record["accept_lengths"]):
        ids, accepts = record["output_ids"][row, record["prompt_lens"][row] :], accepts[accepts >= 0]
        ids = ids[ids >= 0]
        assert roots is not None or len(ids) == (accepts + 1).sum() < LONGEST  # consistency of the recording
        ours = out.tokens[row] if roots is None else [*out.tokens[row, : out.lengths[row]], roots[row]]
        np.testing.assert_array_equal(ours[: len(ids)], ids, err_msg=f"prompt {row}")
        np.testing.assert_array_equal(out.accept_lengths[row, : len(accepts)], accepts, err_msg=f"prompt {row}")


def check_trees(record, proposals, swaps: int = 0, first: int = 0, exchanged: bool = False) -> int:
    """Compare the recorded parts of every proposed tree, rejected tokens included: they depend on the whole state.

    Nodes of ``swaps`` trees may be swapped where the recorded margin is small, and with ``exchanged`` be others. first:
    the first recorded node. Returns the number of trees.
    """
    swapped = compared = 0
    for row, accepts in enumerate(record["accept_lengths"]):
        for i in range((accepts >= 0).sum()):
            tokens, made = proposals[i]
            parents, depths = (np.broadcast_to(x, tokens.shape)[row] for x in (made.parents, made.depths))
            ours = {"tokens": tokens[row, first:], "parents": parents, "depths": depths[first:]}
            recorded = {name: record[f"tree_{name}_{row}"][i] for name in ours if f"tree_{name}_{row}" in record}
            different = [name for name in recorded if not np.array_equal(ours[name], recorded[name])]
            if different:
                margin = next(record[name] for name in (f"tree_margin_{row}", f"margin_{row}") if name in record)
                assert margin[i] < CLOSE, f"prompt {row}, step {i}: {different}"
                assert exchanged or sorted(ours["tokens"]) == sorted(recorded["tokens"])
                swapped += 1
            compared += 1
    assert swapped <= swaps
    return compared


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
