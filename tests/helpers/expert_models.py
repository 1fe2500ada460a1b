"""Settings of random small mixtures of experts, drawn by hypothesis (`helpers.dense_models`)."""

from __future__ import annotations

from hypothesis import strategies as st

from helpers.dense_models import BOTH, N_LAYERS, WINDOW, YARN, rope, types

SMALL = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE = {"mlp_only_layers": [1], "decoder_sparse_step": 1}


def few(draw, most: int) -> dict:
    return {"num_experts_per_tok": draw(st.integers(1, most)), "rope_parameters": rope(draw)}


@st.composite
def mixtral(draw) -> dict:
    window = draw(st.none() | st.just(WINDOW))
    return {"num_local_experts": draw(st.integers(4, 6)), "sliding_window": window} | few(draw, 4)


def qwen_moe(draw) -> dict:
    return few(draw, 5) | {
        "num_experts": draw(st.integers(5, 9)),
        "moe_intermediate_size": draw(st.sampled_from([8, 24, 40])),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.sampled_from([1, 1, 2])),
        "mlp_only_layers": draw(st.lists(st.integers(0, N_LAYERS - 1), max_size=2, unique=True)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def qwen2_moe(draw) -> dict:
    # transformers fails for windows in layer_types without use_sliding_window: its cache has them, its mask has none.
    windows = types(draw) if draw(st.booleans()) else {}
    return (
        qwen_moe(draw)
        | windows
        | {
            "use_sliding_window": bool(windows),
            "max_window_layers": draw(st.integers(0, N_LAYERS)),
            "shared_expert_intermediate_size": draw(st.sampled_from([8, 48])),
            "qkv_bias": draw(st.booleans()),
        }
    )


@st.composite
def qwen3_moe(draw) -> dict:
    window = {"use_sliding_window": draw(st.booleans()), "sliding_window": WINDOW}
    return qwen_moe(draw) | window | {"head_dim": draw(st.sampled_from([8, 16]))}


@st.composite
def olmoe(draw) -> dict:
    return few(draw, 5) | {
        "num_experts": draw(st.integers(5, 9)),
        "norm_topk_prob": draw(st.booleans()),
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "pad_token_id": 0,
    }


@st.composite
def glm4_moe(draw) -> dict:
    groups = draw(st.sampled_from([1, 2, 4]))
    part = draw(st.sampled_from([0.5, 1.0]))
    return {
        "n_routed_experts": 8,
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.sampled_from([8, 24])),
        "n_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "norm_topk_prob": draw(st.booleans()),
        "first_k_dense_replace": draw(st.integers(0, N_LAYERS - 1)),
        "use_qk_norm": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "partial_rotary_factor": part,
        "head_dim": draw(st.sampled_from([8, 16])),
        "rope_parameters": rope(draw) | {"partial_rotary_factor": part},
        "num_mtp_layers": 0,
    }


EXPERT_FAMILIES = {
    "mixtral": mixtral(),
    "qwen2_moe": qwen2_moe(),
    "qwen3_moe": qwen3_moe(),
    "olmoe": olmoe(),
    "glm4_moe": glm4_moe(),
}
# Every setting differs from its default.
EXPERT_EXAMPLES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    "qwen2_moe": SMALL
    | SPARSE
    | {
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": BOTH,
    },
    "qwen3_moe": SMALL | SPARSE | {"num_experts": 8, "head_dim": 16, "rope_parameters": YARN},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": 0},
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
        "num_mtp_layers": 0,
    },
}
