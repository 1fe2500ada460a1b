"""Random small models of every family, with settings drawn by hypothesis, and their logits in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hydrajax.formats.huggingface import load_llama
from hydrajax.models.attention import causal_mask
from hydrajax.models.cache import append, init_cache
from hydrajax.models.llama import Llama

VOCAB, N_LAYERS, HEAD_DIM = 61, 3, 8
N_TOKENS, N_CACHED = 44, 37  # of a text, and of its part in the cache
TREE = [-1, 0, 1, 2, 0, 4]  # parents of the nodes: the text goes on along the first four
WINDOW = 9

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
QUICK = {"xla_backend_optimization_level": 0}


class Pair(NamedTuple):
    """One checkpoint in both packages."""

    theirs: torch.nn.Module
    model: Llama
    params: dict
    folder: Path

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return transformers' logits of whole texts."""
        with torch.no_grad():
            return self.theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def random_pair(
    folder: Path, model_type: str, settings: dict, seed: int = 7, dtype=torch.float32, fused: bool = False
) -> Pair:
    """Return a model with random weights, large enough for clear attention, saved by transformers and read by us.

    fused: the experts of a layer are one tensor of the file.
    """
    config = AutoConfig.for_model(model_type, **(SHARED | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise)
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in every file
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)
    model.save_pretrained(folder, save_original_format=not fused)
    return Pair(model.float(), *load_llama(folder), folder)


def random_pairs(tmp_path_factory, examples: Mapping[str, dict]) -> Callable[[str], Pair]:
    """Return ``pair(family)``: `random_pair` with the family's settings, made once."""
    return functools.cache(lambda family: random_pair(tmp_path_factory.mktemp(family), family, examples[family]))


def yarn(draw) -> dict:
    """Draw YaRN's settings. 8 features and a context of 64 have frequencies on both sides of the transition."""
    found = {"rope_type": "yarn", "factor": draw(st.sampled_from([2.0, 4.0, 8.0]))}
    found["original_max_position_embeddings"] = draw(st.sampled_from([16, 32, 64]))
    found |= draw(
        st.sampled_from([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"attention_factor": 0.8}, {"truncate": False}])
    )
    return found | draw(st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.2}]))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32


def rope(draw) -> dict:
    """Draw the rotary embedding of layers that are all alike."""
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    found = {"default": {"rope_type": "default"}, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3}
    return {"rope_theta": draw(st.sampled_from([1e4, 5e5]))} | (yarn(draw) if kind == "yarn" else found[kind])


def types(draw) -> dict:
    """Draw the type of each layer, also by the family's default."""
    every = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=N_LAYERS, max_size=N_LAYERS)
    found = draw(st.none() | every)
    return {"sliding_window": WINDOW} | ({} if found is None else {"layer_types": found})


@st.composite
def qwen(draw, kind: str) -> dict:
    fields = types(draw) | {"use_sliding_window": True, "max_window_layers": draw(st.integers(0, N_LAYERS))}
    return (
        fields | {"rope_parameters": rope(draw), "head_dim": draw(st.sampled_from([8, 16]))}
        if kind == "qwen3"
        else (fields | {"rope_parameters": rope(draw)})
    )


def gemma(draw) -> dict:
    return types(draw) | {
        "head_dim": draw(st.sampled_from([8, 16])),
        "query_pre_attn_scalar": draw(st.sampled_from([8, 24])),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
        "hidden_activation": draw(st.sampled_from(["gelu_pytorch_tanh", "silu"])),
        "tie_word_embeddings": draw(st.booleans()),
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
    }


@st.composite
def gemma2(draw) -> dict:
    return gemma(draw) | {
        "attn_logit_softcapping": draw(st.sampled_from([None, 2.0])),
        "rope_parameters": rope(draw),
    }


@st.composite
def gemma3(draw) -> dict:
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e3, 1e4]))}
    # transformers looks for `truncate` outside the settings of each type.
    ropes = {"sliding_attention": local, "full_attention": rope(draw)}
    ropes["full_attention"].pop("truncate", None)
    return gemma(draw) | {"rope_parameters": ropes, "sliding_window_pattern": draw(st.sampled_from([2, 3, 6]))}


@st.composite
def olmo2(draw) -> dict:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return {"num_key_value_heads": kv_heads, "rope_parameters": rope(draw), "rms_norm_eps": 1e-3}


@st.composite
def olmo3(draw) -> dict:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope(draw)}
    ropes["full_attention"].pop("truncate", None)
    return types(draw) | {"num_key_value_heads": draw(st.sampled_from([1, 4])), "rope_parameters": ropes}


@st.composite
def granite(draw) -> dict:
    return {
        "embedding_multiplier": draw(st.sampled_from([1.0, 12.0])),
        "attention_multiplier": draw(st.sampled_from([1.0, 0.015625, 0.35])),
        "residual_multiplier": draw(st.sampled_from([1.0, 0.22])),
        "logits_scaling": draw(st.sampled_from([1.0, 3.0, 8.0])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": rope(draw),
    }


@st.composite
def smollm3(draw) -> dict:
    return {
        "no_rope_layers": draw(st.lists(st.sampled_from([0, 1]), min_size=N_LAYERS, max_size=N_LAYERS) | st.none()),
        "no_rope_layer_interval": draw(st.sampled_from([2, 3, 4])),
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": WINDOW,
        "rope_parameters": rope(draw),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def phi3(draw) -> dict:
    part = draw(st.sampled_from([1.0, 0.75]))
    fields = {"head_dim": 8, "sliding_window": draw(st.none() | st.just(WINDOW))}
    fields["tie_word_embeddings"] = draw(st.booleans())
    ropes = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    if draw(st.booleans()):
        factors = st.lists(st.floats(1.0, 8.0), min_size=int(4 * part), max_size=int(4 * part))
        ropes |= {"rope_type": "longrope", "short_factor": draw(factors), "long_factor": draw(factors)}
        ropes |= draw(st.sampled_from([{}, {"attention_factor": 0.9}]))
    return fields | {"rope_parameters": ropes, "original_max_position_embeddings": 64}


FAMILIES = {
    "qwen2": qwen("qwen2"),
    "qwen3": qwen("qwen3"),
    "gemma2": gemma2(),
    "gemma3_text": gemma3(),
    "olmo2": olmo2(),
    "olmo3": olmo3(),
    "granite": granite(),
    "smollm3": smollm3(),
    "phi3": phi3(),
}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LOCAL = {"rope_type": "default", "rope_theta": 1e3}
BOTH = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"sliding_window": WINDOW, "layer_types": BOTH, "head_dim": 16, "query_pre_attn_scalar": 24}
# Every setting differs from its default.
EXAMPLES = {
    "llama": {"rope_parameters": YARN | {"truncate": False}},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH, "rope_parameters": YARN},
    "gemma2": GEMMA | {"tie_word_embeddings": False, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": GEMMA
    | {
        "rope_parameters": {
            "sliding_attention": LOCAL,
            "full_attention": LOCAL | {"rope_type": "linear", "factor": 4.0},
        }
    },
    "olmo2": {"rms_norm_eps": 1e-3},
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": BOTH,
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN},
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.35,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    "phi3": {
        "sliding_window": WINDOW,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 3.0],
            "long_factor": [1.0, 4.0, 9.0],
        },
    },
}


def compared(pair: Pair, single: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return our and transformers' logits of a text, and of a tree over its first tokens, which are in the cache.

    single: also of one token instead of the tree.
    """
    model, params = pair.model, pair.params
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, N_TOKENS)).astype(np.int32)
    positions = np.broadcast_to(np.arange(N_TOKENS), tokens.shape)

    def run(params, tokens, positions, cache=None, *, mask):
        forward = model.apply({"params": params}, tokens, positions, mask, cache)
        return forward.block, model.apply({"params": params}, forward.hidden, method="logits")

    jitted = partial(jax.jit, compiler_options=QUICK)
    block, prefill = jitted(partial(run, mask=causal_mask(N_TOKENS)))(params, tokens, positions)
    expected = pair.logits(tokens)

    counts = np.array([N_CACHED, N_CACHED - 5], np.int32)
    cache = append(init_cache(model.config, 2, N_TOKENS + 8, jnp.float32), block, jnp.asarray(counts))
    paths = [[0]]
    for node, parent in enumerate(TREE[1:], start=1):
        paths.append([*paths[parent], node])
    mask = np.zeros((len(TREE), len(TREE)), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    text = max(paths, key=len)
    nodes = np.stack([(tokens[row, :6] + 1) % VOCAB for row in range(2)])  # another text along the second branch
    for row, count in enumerate(counts):
        nodes[row, text] = tokens[row, count : count + len(text)]
    depths = np.array([len(path) - 1 for path in paths])
    tree = jitted(partial(run, mask=mask))(params, nodes, counts[:, None] + depths, cache)[1]
    by_node = np.zeros_like(tree)
    for row, count in enumerate(counts):
        for path in (text, paths[-1]):
            whole = np.concatenate([tokens[row, :count], nodes[row, path]])
            by_node[row, path] = pair.logits(whole[None])[0, count:]
    found = {"prefill": (np.asarray(prefill), expected), "tree": (np.asarray(tree), by_node)}
    if single:
        step = jitted(partial(run, mask=causal_mask(1)))
        logits = step(params, tokens[[0, 1], counts][:, None], counts[:, None], cache)[1]
        found["one token"] = np.asarray(logits[:, 0]), expected[[0, 1], counts]
    return found
