"""Settings of random small models with latent attention, as in `helpers.family_settings`."""

from hypothesis import strategies as st

from helpers.family_settings import ROPES, YARN, by_layer, fields, merged, some_of

SCALED = st.just(YARN | {"mscale": 0.7, "mscale_all_dim": 1.2})


def drawn(groups: int, **more) -> st.SearchStrategy[dict]:
    return fields(  # with 8 rotated features, on both sides of the transition of `ROPES`
        num_key_value_heads=[4], kv_lora_rank=[12, 8, 24], q_lora_rank=[20, None, 16], qk_rope_head_dim=[8],
        qk_nope_head_dim=[6, 4, 16], v_head_dim=[10, 6, 40], n_routed_experts=[8], n_group=[groups],
        topk_group=some_of(groups), num_experts_per_tok=[2, 1], moe_intermediate_size=[24, 8],
        n_shared_experts=[2, 1], routed_scaling_factor=[2.5, 1.0], attention_bias=[True, False],
        rms_norm_eps=[1e-2, 1e-6], rope_parameters=SCALED | ROPES, **more,
    )  # fmt: skip


NORMALIZED = {"norm_topk_prob": [False, True]}
FIRST_DENSE = {"first_k_dense_replace": [1, 0, 2]}
V3 = NORMALIZED | FIRST_DENSE | {"rope_interleave": [True, False], "num_mtp_layers": [0]}
MLPS = by_layer(["sparse", "dense", "sparse"], "dense", "sparse").filter({"sparse"}.issubset)
LITE = NORMALIZED | {"rope_interleave": [False, True], "mlp_layer_types": MLPS | st.none()}
FAMILIES = {
    "deepseek_v3": st.one_of([drawn(groups, **V3) for groups in (4, 2, 1)]),
    "glm4_moe_lite": st.one_of([drawn(groups, **LITE) for groups in (1, 2)]),
    "deepseek_v2": merged(
        drawn(4, **FIRST_DENSE), fields(topk_method=["group_limited_greedy"], q_lora_rank=[None, 16, 20])
    )
    | drawn(1, **FIRST_DENSE),
}
