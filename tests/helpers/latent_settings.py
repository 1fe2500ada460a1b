"""Settings of random small models with latent attention, as in `helpers.family_settings`."""

from hypothesis import strategies as st

from helpers.family_settings import N_LAYERS, ROPES, YARN, fields, merged

SIZES = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
MTP = {"num_mtp_layers": 0}  # of transformers' own


def drawn(groups: int, **more) -> st.SearchStrategy[dict]:
    return fields(  # with 8 rotated features, on both sides of the transition of `ROPES`
        num_key_value_heads=[4], kv_lora_rank=[8, 12, 24], q_lora_rank=[None, 16, 20], qk_rope_head_dim=[8],
        qk_nope_head_dim=[4, 6, 16], v_head_dim=[6, 10, 40], n_routed_experts=[8], n_group=[groups],
        topk_group=st.integers(1, groups), num_experts_per_tok=[1, 2], moe_intermediate_size=[8, 24],
        n_shared_experts=[1, 2], routed_scaling_factor=[1.0, 2.5], attention_bias=[False, True],
        rms_norm_eps=[1e-6, 1e-2], rope_parameters=ROPES, **more,
    )  # fmt: skip


NORMALIZED = {"norm_topk_prob": [False, True], "rope_interleave": [False, True]}
FIRST_DENSE = {"first_k_dense_replace": st.integers(0, N_LAYERS - 1)}
MLPS = st.lists(st.sampled_from(["dense", "sparse"]), min_size=N_LAYERS, max_size=N_LAYERS).filter({"sparse"}.issubset)
FAMILIES = {
    "deepseek_v3": st.one_of([drawn(groups, **NORMALIZED, **FIRST_DENSE, num_mtp_layers=[0]) for groups in (1, 2, 4)]),
    "glm4_moe_lite": st.one_of([drawn(groups, **NORMALIZED, mlp_layer_types=MLPS | st.none()) for groups in (1, 2)]),
    "deepseek_v2": drawn(1, **FIRST_DENSE)
    | merged(drawn(4, **FIRST_DENSE), fields(topk_method=["group_limited_greedy"])),
}
# Every setting differs from its default.
EXAMPLES = {
    "deepseek_v3": SIZES
    | EXPERTS
    | MTP
    | {
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": False, "attention_bias": True,
        "rms_norm_eps": 1e-2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "glm4_moe_lite": SIZES
    | EXPERTS
    | {"rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "deepseek_v2": SIZES
    | EXPERTS
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "v_head_dim": 18},
}  # fmt: skip
