"""Settings of random small mixtures of experts, drawn by hypothesis (`helpers.dense_models`)."""

from __future__ import annotations

from hypothesis import strategies as st

from helpers.dense_models import BOTH, N_LAYERS, ROPES, TYPES, WINDOW, YARN, fields, merged

SMALL = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE = {"mlp_only_layers": [1], "decoder_sparse_step": 1}
QWEN_MOE = fields(
    rope_parameters=ROPES,
    num_experts_per_tok=st.integers(1, 5),
    num_experts=st.integers(5, 9),
    moe_intermediate_size=[8, 24, 40],
    norm_topk_prob=[False, True],
    decoder_sparse_step=[1, 1, 2],
    mlp_only_layers=st.lists(st.integers(0, N_LAYERS - 1), max_size=2, unique=True),
    tie_word_embeddings=[False, True],
)


def glm4_moe(part: float, groups: int) -> st.SearchStrategy[dict]:
    rotated = {"partial_rotary_factor": part}
    return fields(
        n_routed_experts=[8],
        n_group=[groups],
        topk_group=st.integers(1, groups),
        num_experts_per_tok=[1, 2],
        moe_intermediate_size=[8, 24],
        n_shared_experts=[1, 2],
        routed_scaling_factor=[1.0, 2.5],
        norm_topk_prob=[False, True],
        first_k_dense_replace=st.integers(0, N_LAYERS - 1),
        use_qk_norm=[False, True],
        attention_bias=[False, True],
        partial_rotary_factor=[part],
        head_dim=[8, 16],
        rope_parameters=ROPES.map(lambda rope: rope | rotated),
        num_mtp_layers=[0],
    )


EXPERT_FAMILIES = {
    "mixtral": fields(
        num_local_experts=[4, 5, 6],
        num_experts_per_tok=st.integers(1, 4),
        sliding_window=[None, WINDOW],
        rope_parameters=ROPES,
    ),
    "qwen2_moe": merged(
        QWEN_MOE,
        # transformers fails for windows in layer_types without use_sliding_window: its cache has them, its mask none.
        st.just({"use_sliding_window": False}) | TYPES.map(lambda types: types | {"use_sliding_window": True}),
        fields(
            max_window_layers=st.integers(0, N_LAYERS), shared_expert_intermediate_size=[8, 48], qkv_bias=[False, True]
        ),
    ),
    "qwen3_moe": merged(QWEN_MOE, fields(use_sliding_window=[False, True], sliding_window=[WINDOW], head_dim=[8, 16])),
    "olmoe": fields(
        rope_parameters=ROPES,
        num_experts_per_tok=st.integers(1, 5),
        num_experts=st.integers(5, 9),
        norm_topk_prob=[False, True],
        num_key_value_heads=[1, 2, 4],
        pad_token_id=[0],
    ),
    "glm4_moe": st.one_of([glm4_moe(part, groups) for part in (0.5, 1.0) for groups in (1, 2, 4)]),
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
