"""Random small models of every family, with settings drawn by hypothesis, and their logits in transformers."""

from __future__ import annotations

import functools
import operator
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


def fields(**choices) -> st.SearchStrategy[dict]:
    """Return a strategy for fields: a strategy each, or a list of values."""
    return st.fixed_dictionaries({k: st.sampled_from(v) if isinstance(v, list) else v for k, v in choices.items()})


def merged(*parts: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.tuples(*parts).map(lambda drawn: functools.reduce(operator.or_, drawn))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
# 8 features and a context of 64 have frequencies on both sides of YaRN's transition.
YARNS = merged(
    fields(rope_type=["yarn"], factor=[2.0, 4.0, 8.0], original_max_position_embeddings=[16, 32, 64]),
    st.sampled_from([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"attention_factor": 0.8}, {"truncate": False}]),
    st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.2}]),
)
# The rotary embedding of layers that are all alike, and of one type: transformers looks for `truncate` outside of it.
ROPES = merged(
    fields(rope_theta=[1e4, 5e5]),
    st.sampled_from([{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]) | YARNS,
)
ROPES_OF_TYPE = ROPES.map(lambda rope: {name: value for name, value in rope.items() if name != "truncate"})
LONGROPE = {part: st.lists(st.floats(1.0, 8.0), min_size=int(4 * part), max_size=int(4 * part)) for part in (1.0, 0.75)}
# The type of each layer, also by the family's default.
EVERY_LAYER = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=N_LAYERS, max_size=N_LAYERS)
TYPES = st.just({}) | EVERY_LAYER.map(lambda types: {"layer_types": types})
TYPES = TYPES.map(lambda types: {"sliding_window": WINDOW} | types)
QWEN = merged(
    TYPES, fields(use_sliding_window=[True], max_window_layers=st.integers(0, N_LAYERS), rope_parameters=ROPES)
)
GEMMA = merged(
    TYPES,
    fields(
        head_dim=[8, 16],
        query_pre_attn_scalar=[8, 24],
        final_logit_softcapping=[None, 5.0],
        hidden_activation=["gelu_pytorch_tanh", "silu"],
        tie_word_embeddings=[False, True],
        num_key_value_heads=[1, 2, 4],
    ),
)


def by_type(*thetas: float) -> st.SearchStrategy[dict]:
    """Return rotary embeddings of layers with and without a window."""
    return fields(sliding_attention=fields(rope_type=["default"], rope_theta=[*thetas]), full_attention=ROPES_OF_TYPE)


def phi3(part: float) -> st.SearchStrategy[dict]:
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    longrope = merged(
        fields(rope_type=["longrope"], short_factor=LONGROPE[part], long_factor=LONGROPE[part]),
        st.sampled_from([{}, {"attention_factor": 0.9}]),
    )
    return fields(
        head_dim=[8],
        sliding_window=[None, WINDOW],
        tie_word_embeddings=[False, True],
        original_max_position_embeddings=[64],
        rope_parameters=merged(st.just(plain), st.just({}) | longrope),
    )


LLAMA = fields(head_dim=[8, 16], rms_norm_eps=[1e-6, 1e-3], tie_word_embeddings=[False, True], rope_parameters=ROPES)
FAMILIES = {
    "llama": LLAMA,
    "mistral": merged(LLAMA, fields(sliding_window=[WINDOW])),
    "qwen2": QWEN,
    "qwen3": merged(QWEN, fields(head_dim=[8, 16])),
    "gemma2": merged(GEMMA, fields(attn_logit_softcapping=[None, 2.0], rope_parameters=ROPES)),
    "gemma3_text": merged(GEMMA, fields(rope_parameters=by_type(1e3, 1e4), sliding_window_pattern=[2, 3, 6])),
    "olmo2": fields(num_key_value_heads=[1, 2, 4], rope_parameters=ROPES, rms_norm_eps=[1e-3]),
    "olmo3": merged(TYPES, fields(num_key_value_heads=[1, 4], rope_parameters=by_type(1e4))),
    "granite": fields(
        embedding_multiplier=[1.0, 12.0],
        attention_multiplier=[1.0, 0.015625, 0.35],
        residual_multiplier=[1.0, 0.22],
        logits_scaling=[1.0, 3.0, 8.0],
        tie_word_embeddings=[False, True],
        rope_parameters=ROPES,
    ),
    "smollm3": fields(
        no_rope_layers=st.lists(st.sampled_from([0, 1]), min_size=N_LAYERS, max_size=N_LAYERS) | st.none(),
        no_rope_layer_interval=[2, 3, 4],
        use_sliding_window=[False, True],
        sliding_window=[WINDOW],
        rope_parameters=ROPES,
        tie_word_embeddings=[False, True],
    ),
    "phi3": phi3(1.0) | phi3(0.75),
}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LOCAL = {"rope_type": "default", "rope_theta": 1e3}
BOTH = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_EXAMPLE = {"sliding_window": WINDOW, "layer_types": BOTH, "head_dim": 16, "query_pre_attn_scalar": 24}
# Every setting differs from its default.
EXAMPLES = {
    "llama": {"rope_parameters": YARN | {"truncate": False}},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH, "rope_parameters": YARN},
    "gemma2": GEMMA_EXAMPLE
    | {"tie_word_embeddings": False, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": GEMMA_EXAMPLE
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
