"""Settings of random small models of Gemma 4, as in `helpers.family_settings`."""

from hypothesis import strategies as st

from helpers.family_settings import LOCAL, ROPES_OF_TYPE, VOCAB, WINDOW, by_type, fields, merged

SLIDING, FULL = "sliding_attention", "full_attention"
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
ROPE = by_type(1e3, 1e4, full=st.just(PROPORTIONAL) | ROPES_OF_TYPE)
TYPES = st.just([SLIDING, FULL] * 2) | st.lists(st.sampled_from([SLIDING, FULL]), min_size=4, max_size=4).map(
    lambda types: [*types[:3], FULL]
)


def _shared(types: list[str]) -> st.SearchStrategy[dict]:
    """Draw a number of last layers without keys and values, of types that the others have. transformers fails for them
    without embeddings per layer.
    """
    possible = [n for n in (2, 0, 1, 3) if set(types) <= set(types[: 4 - n])]
    per_layer = {"hidden_size_per_layer_input": [8, 4], "vocab_size_per_layer_input": [VOCAB + 3, VOCAB]}
    return fields(layer_types=[types], num_kv_shared_layers=possible, **per_layer)


COMMON = {
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": WINDOW, "head_dim": 8,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB,
    "rope_parameters": {SLIDING: LOCAL, FULL: PROPORTIONAL},
}  # fmt: skip
UNIFIED = merged(
    st.just(COMMON),
    TYPES.map(lambda types: {"layer_types": types}),
    fields(
        num_key_value_heads=[1, 2, 4], global_head_dim=[16, 8], use_double_wide_mlp=[True, False],
        final_logit_softcapping=[5.0, None], tie_word_embeddings=[False, True], rope_parameters=ROPE,
        hidden_activation=["gelu_pytorch_tanh", "silu"],
        rms_norm_eps=[1e-3],  # as in the hybrids: 1e-6 multiplies rounding errors of heads of so few features
    ),
    st.just({}) | fields(attention_k_eq_v=[True], num_global_key_value_heads=[None, 1, 2]),
)  # fmt: skip
FAMILIES = {
    "gemma4_text": merged(
        UNIFIED,
        TYPES.flatmap(_shared) | st.just({}),
        st.just({})
        | fields(
            enable_moe_block=[True], num_experts=st.integers(5, 9), top_k_experts=st.integers(1, 5),
            moe_intermediate_size=[8, 24],
        ),
    ),
    "gemma4_unified_text": UNIFIED,
}  # fmt: skip
GLOBAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}
OTHERS = {
    "gemma4_text, experts": COMMON
    | GLOBAL
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    "gemma4_unified_text": COMMON | GLOBAL | {"tie_word_embeddings": False},  # written as gemma4_text
}
