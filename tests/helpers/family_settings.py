"""Settings of random small models of every family: strategies of hypothesis, and examples."""

import functools
import math
import operator

from hypothesis import strategies as st

VOCAB, N_LAYERS, WINDOW = 61, 3, 9
SHARED = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


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
        head_dim=[8, 16], query_pre_attn_scalar=[8, 24], final_logit_softcapping=[None, 5.0],
        hidden_activation=["gelu_pytorch_tanh", "silu"], tie_word_embeddings=[False, True],
        num_key_value_heads=[1, 2, 4],
    ),
)  # fmt: skip


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
        head_dim=[8], sliding_window=[None, WINDOW], tie_word_embeddings=[False, True],
        original_max_position_embeddings=[64], rope_parameters=merged(st.just(plain), st.just({}) | longrope),
    )  # fmt: skip


LLAMA = fields(head_dim=[8, 16], rms_norm_eps=[1e-6, 1e-3], tie_word_embeddings=[False, True], rope_parameters=ROPES)
# The texts of tests are longer than the context before the extension.
BETAS = merged(YARNS, fields(rope_theta=[1e4], llama_4_scaling_beta=[0.1, 0.7])).map(
    lambda rope: rope | {"original_max_position_embeddings": 16}
)
ALPHAS = fields(rope_type=["dynamic"], rope_theta=[1e4], factor=[1.0], alpha=[2.0, 50.0])
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
        embedding_multiplier=[1.0, 12.0], attention_multiplier=[1.0, 0.015625, 0.35], residual_multiplier=[1.0, 0.22],
        logits_scaling=[1.0, 3.0, 8.0], tie_word_embeddings=[False, True], rope_parameters=ROPES,
    ),
    "smollm3": fields(
        no_rope_layers=st.lists(st.sampled_from([0, 1]), min_size=N_LAYERS, max_size=N_LAYERS) | st.none(),
        no_rope_layer_interval=[2, 3, 4], use_sliding_window=[False, True], sliding_window=[WINDOW],
        rope_parameters=ROPES, tie_word_embeddings=[False, True],
    ),
    "phi3": phi3(1.0) | phi3(0.75),
    "exaone4": merged(
        st.just({"layer_types": ["full_attention"] * N_LAYERS, "sliding_window": None}) | TYPES,
        fields(num_key_value_heads=[1, 2, 4], rope_parameters=ROPES, rms_norm_eps=[1e-3]),
    ),
    "seed_oss": merged(LLAMA, fields(attention_bias=[False, True], attention_out_bias=[False, True])),
    "ministral3": merged(
        LLAMA,
        fields(sliding_window=[None, WINDOW], rope_parameters=BETAS),
    ),
    "hunyuan_v1_dense": merged(
        LLAMA, fields(attention_bias=[False, True]), st.just({}) | fields(rope_parameters=ALPHAS)
    ),
    "nanochat": fields(
        num_key_value_heads=[1, 2, 4], final_logit_softcapping=[None, 5.0], tie_word_embeddings=[False, True],
        rms_norm_eps=[1e-6, 1e-2], rope_parameters=ROPES,
    ),
    "muse_glimmer_text": merged(
        TYPES,
        fields(
            head_dim=[8, 16], num_key_value_heads=[1, 2, 4], rms_norm_eps=[1e-5, 1e-3], post_norm_eps=[1e-8, 1e-2],
            hidden_activation=["silu", "gelu_pytorch_tanh"], tie_word_embeddings=[False, True], rope_parameters=ROPES,
            qk_scale_factor=st.floats(0.5, 4.0), output_multiplier=st.floats(0.5, 2.0),
            final_logit_softcapping=[5.0, 20.0],
            layer_rope_theta=st.none() | st.lists(st.sampled_from([0, 1e4]), min_size=N_LAYERS, max_size=N_LAYERS),
        ),
    ),
}  # fmt: skip

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
            "sliding_attention": LOCAL, "full_attention": LOCAL | {"rope_type": "linear", "factor": 4.0},
        }
    },
    "olmo2": {"rms_norm_eps": 1e-3},
    "olmo3": {
        "sliding_window": WINDOW, "layer_types": BOTH,
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN},
    },
    "granite": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.35, "residual_multiplier": 0.22,
        "logits_scaling": 3.0, "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    "phi3": {
        "sliding_window": WINDOW, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 3.0], "long_factor": [1.0, 4.0, 9.0],
        },
    },
    "exaone4": {"layer_types": BOTH, "sliding_window": WINDOW, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
    "seed_oss": {"attention_out_bias": True, "head_dim": 16},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 16}},
    "hunyuan_v1_dense": {
        "attention_bias": True, "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "nanochat": {"final_logit_softcapping": 5.0, "rms_norm_eps": 1e-2, "rope_parameters": YARN},
    "muse_glimmer_text": {
        "sliding_window": WINDOW, "layer_types": BOTH, "layer_rope_theta": [0, 1e4, 1e4], "head_dim": 16,
        "rms_norm_eps": 1e-3, "post_norm_eps": 1e-2, "qk_scale_factor": 1.7, "output_multiplier": 0.7,
        "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": YARN,
    },
}  # fmt: skip

# --- mixtures of experts ----------------------------------------------------------------------------------------------

SMALL = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE = {"mlp_only_layers": [1], "decoder_sparse_step": 1}
QWEN_MOE = fields(
    rope_parameters=ROPES, num_experts_per_tok=st.integers(1, 5), num_experts=st.integers(5, 9),
    moe_intermediate_size=[8, 24, 40], norm_topk_prob=[False, True], decoder_sparse_step=[1, 1, 2],
    mlp_only_layers=st.lists(st.integers(0, N_LAYERS - 1), max_size=2, unique=True),
    tie_word_embeddings=[False, True],
)  # fmt: skip


def glm4_moe(part: float, groups: int) -> st.SearchStrategy[dict]:
    rotated = {"partial_rotary_factor": part}
    return fields(
        n_routed_experts=[8], n_group=[groups], topk_group=st.integers(1, groups), num_experts_per_tok=[1, 2],
        moe_intermediate_size=[8, 24], n_shared_experts=[1, 2], routed_scaling_factor=[1.0, 2.5],
        norm_topk_prob=[False, True], first_k_dense_replace=st.integers(0, N_LAYERS - 1), use_qk_norm=[False, True],
        attention_bias=[False, True], partial_rotary_factor=[part], head_dim=[8, 16],
        rope_parameters=ROPES.map(lambda rope: rope | rotated), num_mtp_layers=[0],
    )  # fmt: skip


EXPERT_FAMILIES = {
    "mixtral": fields(
        num_local_experts=[4, 5, 6], num_experts_per_tok=st.integers(1, 4), sliding_window=[None, WINDOW],
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
        rope_parameters=ROPES, num_experts_per_tok=st.integers(1, 5), num_experts=st.integers(5, 9),
        norm_topk_prob=[False, True], num_key_value_heads=[1, 2, 4], pad_token_id=[0],
    ),
    "gpt_oss": merged(
        TYPES,
        fields(
            num_local_experts=st.integers(5, 9), num_experts_per_tok=st.integers(1, 5), swiglu_limit=[0.7, 7.0],
            swiglu_alpha=[1.0, 1.702], head_dim=[8, 16], attention_bias=[False, True], rope_parameters=ROPES,
            tie_word_embeddings=[False, True],
        ),
    ),
    "glm4_moe": st.one_of([glm4_moe(part, groups) for part in (0.5, 1.0) for groups in (1, 2, 4)]),
}  # fmt: skip
# Every setting differs from its default.
EXPERT_EXAMPLES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    "qwen2_moe": SMALL
    | SPARSE
    | {
        "norm_topk_prob": True, "shared_expert_intermediate_size": 48, "use_sliding_window": True,
        "sliding_window": WINDOW, "layer_types": BOTH,
    },
    "qwen3_moe": SMALL | SPARSE | {"num_experts": 8, "head_dim": 16, "rope_parameters": YARN},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": 0},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.7, "swiglu_alpha": 1.3, "head_dim": 16,
        "sliding_window": WINDOW, "layer_types": BOTH, "rope_parameters": YARN | {"truncate": False},
    },
    "glm4_moe": {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True, "head_dim": 16, "num_mtp_layers": 0,
    },
}  # fmt: skip

# --- hybrids: layers that keep a state --------------------------------------------------------------------------------

DELTA_MODULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")  # of transformers
LINEAR = "linear_attention"
MIXED = st.lists(st.sampled_from([LINEAR, "full_attention"]), min_size=N_LAYERS, max_size=N_LAYERS)
DELTA = fields(
    layer_types=MIXED.filter(lambda types: len(set(types)) == 2), linear_conv_kernel_dim=[2, 3, 4],
    linear_num_key_heads=[1, 2], linear_num_value_heads=[2, 4], linear_key_head_dim=[8, 16],
    linear_value_head_dim=[12, 16], tie_word_embeddings=[False, True],
    rms_norm_eps=[1e-2],  # with 1e-6, heads of so few features multiply rounding errors
)  # fmt: skip
PART = fields(partial_rotary_factor=[0.25, 0.5, 1.0])
QWEN_DELTA = merged(DELTA, fields(head_dim=[8, 16], rope_parameters=merged(ROPES, PART)))
SHARED_EXPERT = fields(
    num_experts_per_tok=st.integers(1, 5), num_experts=st.integers(5, 9), moe_intermediate_size=[8, 24],
    shared_expert_intermediate_size=[8, 48],
)  # fmt: skip
HYBRID_FAMILIES = {
    "qwen3_next": merged(QWEN_MOE, SHARED_EXPERT, st.just({}) | fields(num_experts=[0]), QWEN_DELTA),
    "qwen3_5_text": QWEN_DELTA,
    "qwen3_5_moe_text": merged(SHARED_EXPERT, QWEN_DELTA),
    "olmo_hybrid": merged(
        DELTA,
        fields(
            linear_allow_neg_eigval=[False, True], num_key_value_heads=[1, 4],
            rope_parameters=st.just({"rope_theta": None, "rope_type": "default"}) | ROPES,
        ),
    ),
}  # fmt: skip
DELTA_EXAMPLE = {
    "layer_types": [LINEAR, "full_attention", LINEAR], "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "rms_norm_eps": 1e-2,
}  # fmt: skip
HALF = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}}
SHARED_EXAMPLE = DELTA_EXAMPLE | HALF | SMALL | {"shared_expert_intermediate_size": 48}
# Every setting differs from its default.
HYBRID_EXAMPLES = {
    "qwen3_next": SHARED_EXAMPLE | {"mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_5_text": DELTA_EXAMPLE | HALF | {"linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    "qwen3_5_moe_text": SHARED_EXAMPLE,
    "olmo_hybrid": DELTA_EXAMPLE
    | {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
}

# --- short convolutions -----------------------------------------------------------------------------------------------

CONVS = ["conv", "full_attention", "conv"]


def lfm(*attention: str, **choices) -> st.SearchStrategy[dict]:
    types = st.lists(st.sampled_from(["conv", *attention]), min_size=N_LAYERS, max_size=N_LAYERS)
    types = types.filter(lambda types: set(types) != {"conv"})
    return fields(
        layer_types=types, conv_L_cache=[2, 3, 5], conv_bias=[False, True], norm_eps=[1e-5, 1e-3],
        num_key_value_heads=[1, 2, 4], tie_word_embeddings=[False, True], **choices,
    )  # fmt: skip


PROPORTIONAL = fields(
    rope_type=["proportional"], rope_theta=[1e4], factor=[1.0, 2.0], partial_rotary_factor=[0.3, 0.5, 1.0]
)
HYBRID_FAMILIES |= {
    "lfm2": merged(
        lfm("full_attention", rope_parameters=ROPES),
        fields(block_auto_adjust_ff_dim=[False, True], block_multiple_of=[8, 7]),
        fields(block_ffn_dim_multiplier=[0.7, 1.0, 1.3]),
        st.just({}) | fields(layer_types=[None], full_attn_idxs=[None, [0], [1, 2]]),
    ),
    "lfm2_moe": lfm(
        "full_attention", rope_parameters=ROPES, num_experts_per_tok=st.integers(1, 5), num_experts=st.integers(5, 9),
        moe_intermediate_size=[8, 24], num_dense_layers=[0, 1, 2], use_expert_bias=[False, True],
        norm_topk_prob=[False, True], routed_scaling_factor=[1.0, 2.5],
    ),
    "lfm3": lfm(
        "full_attention", "sliding_attention", head_dim=[8, 16], sliding_window=[WINDOW, 128],
        use_sandwich_norm=[False, True], use_attention_gate=[False, True],
        rope_parameters=fields(
            sliding_attention=fields(rope_type=["default"], rope_theta=[1e3, 1e4]),
            full_attention=PROPORTIONAL | ROPES_OF_TYPE,
        ),
    ),
}  # fmt: skip
HYBRID_EXAMPLES |= {
    "lfm2": {
        "layer_types": CONVS, "conv_L_cache": 4, "conv_bias": True, "norm_eps": 1e-3, "intermediate_size": 60,
        "block_multiple_of": 7, "block_ffn_dim_multiplier": 1.1, "tie_word_embeddings": False, "rope_parameters": YARN,
    },
    "lfm2_moe": SMALL | {
        "layer_types": CONVS, "conv_L_cache": 4, "conv_bias": True, "norm_eps": 1e-3, "num_experts": 8,
        "num_dense_layers": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
    },
    "lfm3": {
        "layer_types": ["conv", *BOTH[:2]], "conv_L_cache": 5, "conv_bias": True, "norm_eps": 1e-3, "head_dim": 16,
        "sliding_window": WINDOW, "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": LOCAL,
            "full_attention": LOCAL | {"rope_type": "proportional", "partial_rotary_factor": 0.75},
        },
    },
}  # fmt: skip

# --- Mamba-2 ----------------------------------------------------------------------------------------------------------

# Granite's MLP is shared by its experts, if it has some.
GRANITE4 = merged(
    FAMILIES["granite"],
    fields(
        layer_types=MIXED.filter(lambda types: "full_attention" in types),  # transformers cannot do without
        position_embedding_type=[None, "rope"], num_local_experts=[0, 5, 8],
        num_experts_per_tok=st.integers(1, 5), intermediate_size=[8, 24], shared_intermediate_size=[8, 40],
        mamba_n_heads=[4, 8], mamba_n_groups=[1, 2, 4], mamba_d_state=[4, 6], mamba_d_conv=[2, 3, 4],
        mamba_expand=[1, 2], mamba_conv_bias=[False, True], mamba_chunk_size=[16],
        time_step_limit=[(0.0, math.inf), (0.4, 1.5)], logits_scaling=[1.0, 1.5],
        rms_norm_eps=[1e-3],  # as for DELTA
    ),
)  # fmt: skip
PATTERNS = st.lists(st.sampled_from(["M", "*", "M-", "*-", "ME", "*E"]), min_size=1, max_size=3).map(
    lambda blocks: "".join(blocks) + "*"
)


def nemotron(groups: int) -> st.SearchStrategy[dict]:
    return fields(
        hybrid_override_pattern=PATTERNS, mamba_num_heads=[4, 8], mamba_head_dim=[6, 12], n_groups=[1, 2, 4],
        ssm_state_size=[4, 6], conv_kernel=[2, 3, 4], chunk_size=[16], time_step_min=[0.001, 0.3],
        use_conv_bias=[False, True], head_dim=[8, 16], layer_norm_epsilon=[1e-3, 1e-2], n_routed_experts=[8],
        n_group=[groups], topk_group=st.integers(1, groups), num_experts_per_tok=[1, 2],
        moe_intermediate_size=[8, 24], moe_shared_expert_intermediate_size=[8, 48],
        routed_scaling_factor=[1.0, 2.5], norm_topk_prob=[False, True],
    )  # fmt: skip


HYBRID_FAMILIES |= {"granitemoehybrid": GRANITE4, "nemotron_h": st.one_of(map(nemotron, (1, 2, 4)))}
HYBRID_EXAMPLES |= {
    "granitemoehybrid": EXAMPLES["granite"]
    | {
        "layer_types": [LINEAR, "full_attention", LINEAR], "position_embedding_type": "rope", "num_local_experts": 6,
        "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40, "mamba_n_heads": 8,
        "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_expand": 4, "mamba_chunk_size": 16,
        "mamba_conv_bias": False, "time_step_limit": (0.4, 1.5), "rms_norm_eps": 1e-3,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-MEM-", "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2,
        "ssm_state_size": 6, "conv_kernel": 3, "chunk_size": 16, "time_step_min": 0.3,
        "head_dim": 16, "layer_norm_epsilon": 1e-3, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5, "norm_topk_prob": False,
    },
}  # fmt: skip
