"""Compare the base model with transformers (eager attention, CPU, float32): prefill, cached steps and greedy ids.

The cases cover LLaMA, Mistral and Qwen; test_families.py has the other families.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.how import sampling
from helpers.lab import QUICK, quick_jit
from helpers.with_transformers import greedy_continuation
from hydrajax.api import make_autoregressive_fn
from hydrajax.decoding.state import Params
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.attention import causal_mask, rope_frequencies
from hydrajax.models.cache import append, init_cache
from hydrajax.models.llama import Llama

TOLERANCE = 1e-4
N_TOKENS = 100  # long enough for rope scaling with an original context of 32 to matter
N_STEPS = 33  # cached single-token steps

# 16 features per head and theta 1e4 put one wavelength in each of llama3's three zones for an original context of 32:
# 6.3 (unchanged), 19.9 (interpolated) and 62.8 and up (scaled).
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "mha": {"num_key_value_heads": 4},
    "mqa": {
        "num_key_value_heads": 1,
        "max_shard_size": "20KB",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "llama3": {"head_dim": 16, "rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    # The window is shorter than the prompt, so it matters in prefill and cached steps.
    "mistral_window": {"model_type": "mistral", "sliding_window": 21, "max_shard_size": "20KB"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "max_shard_size": "20KB"},
    "qwen2_window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 0},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "max_shard_size": "20KB"},
    "trained": None,  # the golden base
}


class Pair(NamedTuple):
    """One checkpoint in both packages, with two sequences of tokens and their logits by transformers."""

    theirs: torch.nn.Module
    model: Llama
    params: dict
    tokens: np.ndarray
    logits: np.ndarray


def theirs_on(model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, llama_checkpoint) -> Pair:
    settings = CASES[request.param]
    if settings is None:
        golden = request.getfixturevalue("golden")
        directory = golden / "base" / "mha"
        text = np.load(golden / "hydra_mlp" / "greedy_small.npz")["output_ids"]
        tokens = text[:2, :N_TOKENS]
    else:
        directory = llama_checkpoint(**settings)
        tokens = np.random.default_rng(0).integers(0, 96, (2, N_TOKENS))
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    model, params = load_llama(directory)
    return Pair(theirs, model, params, tokens.astype(np.int32), theirs_on(theirs, tokens))


def run(model, params, tokens, positions, mask, cache=None):
    """Return the logits of our forward pass."""
    forward = model.apply({"params": params}, tokens, positions, mask, cache)
    return forward, model.apply({"params": params}, forward.hidden, method="logits")


# These have grouped key-value heads, a tied lm head and files in parts.
@pytest.mark.quick("trained", "qwen3", "mistral_window", "qwen2", "llama3")
def test_logits_in_prefill_and_in_cached_steps(pair):
    model, params, tokens = pair.model, pair.params, pair.tokens
    positions = np.broadcast_to(np.arange(N_TOKENS), tokens.shape)
    prefill = quick_jit(partial(run, model, mask=causal_mask(N_TOKENS)))
    forward, logits = prefill(params, tokens, positions)
    assert np.abs(pair.logits).max() > 1  # logits of realistic size
    np.testing.assert_allclose(logits, pair.logits, atol=TOLERANCE, rtol=0)

    # Keep a different number of tokens per sequence, as after prompts of two lengths. The cache also holds the rest of
    # the block, which later steps must not attend to.
    starts = np.array([N_TOKENS - N_STEPS, 41], np.int32)
    cache = append(init_cache(model.config, 2, N_TOKENS, jnp.float32), forward.block, jnp.asarray(starts))

    @quick_jit
    def step(params, cache, token):
        forward, logits = run(model, params, token, cache.lengths[:, None], causal_mask(1), cache)
        return append(cache, forward.block, jnp.ones(2, jnp.int32)), logits[:, 0]

    for i in range(N_STEPS):
        at = starts + i
        cache, logits = step(params, cache, tokens[[0, 1], at][:, None])
        np.testing.assert_allclose(logits, pair.logits[[0, 1], at], atol=TOLERANCE, rtol=0, err_msg=f"step {i}")


# Those that affect the decode loop.
@pytest.mark.parametrize("pair", ["mistral_window", "trained"], indirect=True, scope="module")
def test_greedy_ids_of_a_ragged_batch(pair):
    lengths, n_new = np.array([3, 16, 9], np.int32), 24
    prompt = np.zeros((3, 16), np.int32)
    expected = []
    for row, length in enumerate(lengths):
        ids = pair.tokens[row % 2, row * 7 : row * 7 + length]
        prompt[row, :length] = ids
        expected.append(greedy_continuation(pair.theirs, ids.tolist(), n_new))
    decode = make_autoregressive_fn(pair.model, max_new_tokens=n_new)
    args = Params(pair.params, {}), prompt, lengths, sampling(None, 3, pair.model.config.vocab_size)
    out = decode.jitted.lower(*args).compile(QUICK)(*args)
    np.testing.assert_array_equal(out.tokens, np.stack(expected))
    np.testing.assert_array_equal(out.lengths, [n_new] * 3)
    np.testing.assert_array_equal(out.steps, [n_new] * 3)


@pytest.mark.parametrize("case", ["llama3", pytest.param("linear", marks=pytest.mark.slow)])
def test_rope_settings_matter_here(llama_checkpoint, tmp_path, case):
    """Without the setting the logits differ clearly, so the sequences above are long enough to test it."""
    scaled = llama_checkpoint(**CASES[case])
    plain = tmp_path / "plain"
    shutil.copytree(scaled, plain)
    config = json.loads((plain / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (plain / "config.json").write_text(json.dumps(config))
    tokens = np.random.default_rng(0).integers(0, 96, (1, N_TOKENS))
    positions = np.arange(N_TOKENS)[None]
    logits = []
    for directory in (scaled, plain):
        model, params = load_llama(directory)
        logits.append(quick_jit(partial(run, model, mask=causal_mask(N_TOKENS)))(params, tokens, positions)[1])
    assert np.abs(logits[0] - logits[1]).max() > 100 * TOLERANCE


def test_rope_frequencies(llama_checkpoint):
    """Angular frequencies match to float32 rounding, because errors grow with the position."""
    for case in ("mha", "mqa", "llama3", "linear"):
        directory = llama_checkpoint(**CASES[case])
        theirs = AutoModelForCausalLM.from_pretrained(directory).model.rotary_emb.inv_freq.numpy()
        model, _ = load_llama(directory)
        np.testing.assert_allclose(rope_frequencies(model.config), theirs, rtol=1e-6, err_msg=case)
