"""Settings of random small models of every family, as strategies of hypothesis.

The first choice of a field is that of `example`, and differs from the family's default where it can.
"""

import functools
import math
import operator

from hypothesis import Phase, find, settings
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


def by_layer(first: list, *choices) -> st.SearchStrategy[list]:
    """Return a strategy for a choice of each layer."""
    return st.just(first) | st.lists(st.sampled_from(choices), min_size=N_LAYERS, max_size=N_LAYERS)


def example(strategy: st.SearchStrategy[dict]) -> dict:
    """Return the first choices."""
    return find(strategy, lambda _: True, settings=settings(max_examples=1, phases=[Phase.generate], database=None))


LOCAL = {"rope_type": "default", "rope_theta": 1e3}
BOTH = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = "linear_attention"
LINEARLY = {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
# 8 features and a context of 64 have frequencies on both sides of YaRN's transition.
YARNS = merged(
    fields(rope_type=["yarn"], factor=[4.0, 2.0, 8.0], original_max_position_embeddings=[32, 16, 64]),
    st.sampled_from([{"truncate": False}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"attention_factor": 0.8}, {}]),
    st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 1.2}]),
)
# The rotary embedding of layers that are all alike, and of one type: transformers looks for `truncate` outside of it.
ROPES = merged(
    fields(rope_theta=[1e4, 5e5]),
    YARNS | st.sampled_from([{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]),
)
ROPES_OF_TYPE = ROPES.map(lambda rope: {name: value for name, value in rope.items() if name != "truncate"})
# The type of each layer, also by the family's default.
EVERY_LAYER = by_layer(BOTH, "full_attention", "sliding_attention")
TYPES = EVERY_LAYER.map(lambda types: {"layer_types": types}) | st.just({})
TYPES = TYPES.map(lambda types: {"sliding_window": WINDOW} | types)
QWEN = merged(
    TYPES, fields(use_sliding_window=[True], max_window_layers=st.integers(0, N_LAYERS), rope_parameters=ROPES)
)
GEMMA = merged(
    TYPES,
    fields(
        head_dim=[16, 8], query_pre_attn_scalar=[24, 8], final_logit_softcapping=[5.0, None],
        hidden_activation=["gelu_pytorch_tanh", "silu"], tie_word_embeddings=[False, True],
        num_key_value_heads=[2, 1, 4],
    ),
)  # fmt: skip


def by_type(*thetas: float, full=ROPES_OF_TYPE) -> st.SearchStrategy[dict]:
    """Return rotary embeddings of layers with and without a window."""
    return fields(sliding_attention=fields(rope_type=["default"], rope_theta=[*thetas]), full_attention=full)


def phi3(part: float) -> st.SearchStrategy[dict]:
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    count = int(4 * part)
    short, long = (
        st.just(few[:count]) | st.lists(st.floats(1.0, 8.0), min_size=count, max_size=count)
        for few in ([1.0, 1.5, 3.0, 2.0], [1.0, 4.0, 9.0, 8.0])
    )
    longrope = merged(
        fields(rope_type=["longrope"], short_factor=short, long_factor=long),
        st.sampled_from([{}, {"attention_factor": 0.9}]),
    )
    return fields(
        head_dim=[8], sliding_window=[WINDOW, None], tie_word_embeddings=[False, True],
        original_max_position_embeddings=[64], rope_parameters=merged(st.just(plain), longrope | st.just({})),
    )  # fmt: skip


LLAMA = fields(head_dim=[16, 8], rms_norm_eps=[1e-3, 1e-6], tie_word_embeddings=[False, True], rope_parameters=ROPES)
# The texts of tests are longer than the context before the extension.
BETAS = merged(YARNS, fields(rope_theta=[1e4], llama_4_scaling_beta=[0.7, 0.1])).map(
    lambda rope: rope | {"original_max_position_embeddings": 16}
)
ALPHAS = fields(rope_type=["dynamic"], rope_theta=[1e4], factor=[1.0], alpha=[50.0, 2.0])
FAMILIES = {
    "llama": LLAMA,
    "mistral": merged(LLAMA, fields(sliding_window=[WINDOW])),
    "qwen2": QWEN,
    "qwen3": merged(QWEN, fields(head_dim=[8, 16])),
    "gemma2": merged(GEMMA, fields(attn_logit_softcapping=[2.0, None], rope_parameters=ROPES)),
    "gemma3_text": merged(
        GEMMA,
        fields(
            rope_parameters=by_type(1e3, 1e4, full=st.just(LINEARLY) | ROPES_OF_TYPE),
            sliding_window_pattern=[2, 3, 6],
        ),
    ),
    "olmo2": fields(num_key_value_heads=[2, 1, 4], rope_parameters=ROPES, rms_norm_eps=[1e-3]),
    "olmo3": merged(TYPES, fields(num_key_value_heads=[4, 1], rope_parameters=by_type(1e4))),
    "granite": fields(
        embedding_multiplier=[12.0, 1.0], attention_multiplier=[0.35, 0.015625, 1.0], residual_multiplier=[0.22, 1.0],
        logits_scaling=[3.0, 1.0], tie_word_embeddings=[True, False], rope_parameters=ROPES,
    ),
    "smollm3": fields(
        no_rope_layers=by_layer([1, 0, 1], 0, 1) | st.none(),
        no_rope_layer_interval=[2, 3, 4], use_sliding_window=[True, False], sliding_window=[WINDOW],
        rope_parameters=ROPES, tie_word_embeddings=[False, True],
    ),
    "phi3": phi3(0.75) | phi3(1.0),
    "exaone4": merged(
        TYPES | st.just({"layer_types": ["full_attention"] * N_LAYERS, "sliding_window": None}),
        fields(num_key_value_heads=[2, 1, 4], rope_parameters=ROPES, rms_norm_eps=[1e-3]),
    ),
    "seed_oss": merged(LLAMA, fields(attention_bias=[True, False], attention_out_bias=[True, False])),
    "ministral3": merged(
        LLAMA,
        fields(sliding_window=[WINDOW, None], rope_parameters=BETAS),
    ),
    "hunyuan_v1_dense": merged(
        LLAMA, fields(attention_bias=[True, False]), fields(rope_parameters=ALPHAS) | st.just({})
    ),
    "nanochat": fields(
        num_key_value_heads=[2, 1, 4], final_logit_softcapping=[5.0, None], tie_word_embeddings=[False, True],
        rms_norm_eps=[1e-2, 1e-6], rope_parameters=ROPES,
    ),
    "muse_glimmer_text": merged(
        TYPES,
        fields(
            head_dim=[16, 8], num_key_value_heads=[2, 1, 4], rms_norm_eps=[1e-3, 1e-5], post_norm_eps=[1e-2, 1e-8],
            hidden_activation=["gelu_pytorch_tanh", "silu"], tie_word_embeddings=[False, True], rope_parameters=ROPES,
            qk_scale_factor=st.just(1.7) | st.floats(0.5, 4.0), output_multiplier=st.just(0.7) | st.floats(0.5, 2.0),
            final_logit_softcapping=[5.0, 20.0],
            layer_rope_theta=by_layer([0, 1e4, 1e4], 0, 1e4) | st.none(),
        ),
    ),
}  # fmt: skip

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

# --- mixtures of experts ----------------------------------------------------------------------------------------------

QWEN_MOE = fields(
    rope_parameters=ROPES, num_experts_per_tok=[3, 1, 2, 4, 5], num_experts=[8, 5, 6, 7, 9],
    moe_intermediate_size=[24, 8, 40], norm_topk_prob=[True, False], decoder_sparse_step=[1, 1, 2],
    mlp_only_layers=st.just([1]) | st.lists(st.integers(0, N_LAYERS - 1), max_size=2, unique=True),
    tie_word_embeddings=[False, True],
)  # fmt: skip


def some_of(groups: int) -> list[int]:
    return [min(2, groups), *range(1, groups + 1)]


def glm4_moe(part: float, groups: int) -> st.SearchStrategy[dict]:
    rotated = {"partial_rotary_factor": part}
    return fields(
        n_routed_experts=[8], n_group=[groups], topk_group=some_of(groups), num_experts_per_tok=[2, 1],
        moe_intermediate_size=[24, 8], n_shared_experts=[2, 1], routed_scaling_factor=[2.5, 1.0],
        norm_topk_prob=[True, False], first_k_dense_replace=[1, 0, 2], use_qk_norm=[True, False],
        attention_bias=[True, False], partial_rotary_factor=[part], head_dim=[16, 8],
        rope_parameters=ROPES.map(lambda rope: rope | rotated), num_mtp_layers=[0],
    )  # fmt: skip


EXPERT_FAMILIES = {
    "mixtral": fields(
        num_local_experts=[8, 4, 5, 6], num_experts_per_tok=[3, 1, 2, 4], sliding_window=[WINDOW, None],
        rope_parameters=ROPES, head_dim=[8],  # without it, transformers fails for YaRN
    ),
    "qwen2_moe": merged(
        QWEN_MOE,
        # transformers fails for windows in layer_types without use_sliding_window: its cache has them, its mask none.
        TYPES.map(lambda types: types | {"use_sliding_window": True}) | st.just({"use_sliding_window": False}),
        fields(
            max_window_layers=st.integers(0, N_LAYERS), shared_expert_intermediate_size=[48, 8], qkv_bias=[True, False]
        ),
    ),
    "qwen3_moe": merged(QWEN_MOE, fields(use_sliding_window=[False, True], sliding_window=[WINDOW], head_dim=[16, 8])),
    "olmoe": fields(
        rope_parameters=ROPES, num_experts_per_tok=[3, 1, 2, 4, 5], num_experts=[8, 5, 6, 7, 9],
        norm_topk_prob=[True, False], num_key_value_heads=[2, 1, 4], pad_token_id=[0],
    ),
    "gpt_oss": merged(
        TYPES,
        fields(
            num_local_experts=[8, 5, 6, 7, 9], num_experts_per_tok=[3, 1, 2, 4, 5], swiglu_limit=[0.7, 7.0],
            swiglu_alpha=[1.3, 1.0, 1.702], head_dim=[16, 8], attention_bias=[True, False], rope_parameters=ROPES,
            tie_word_embeddings=[False, True],
        ),
    ),
    "glm4_moe": st.one_of([glm4_moe(part, groups) for part in (0.5, 1.0) for groups in (4, 2, 1)]),
}  # fmt: skip
# --- hybrids: layers that keep a state --------------------------------------------------------------------------------

DELTA_MODULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")  # of transformers
MIXED = by_layer([LINEAR, "full_attention", LINEAR], LINEAR, "full_attention")
DELTA = fields(
    layer_types=MIXED.filter(lambda types: len(set(types)) == 2), linear_conv_kernel_dim=[3, 2, 4],
    linear_num_key_heads=[2, 1], linear_num_value_heads=[4, 2], linear_key_head_dim=[8, 16],
    linear_value_head_dim=[12, 16], tie_word_embeddings=[False, True],
    rms_norm_eps=[1e-2],  # with 1e-6, heads of so few features multiply rounding errors
)  # fmt: skip
PART = fields(partial_rotary_factor=[0.5, 0.25, 1.0])
QWEN_DELTA = merged(DELTA, fields(head_dim=[16, 8], rope_parameters=merged(ROPES, PART)))
SHARED_EXPERT = fields(
    num_experts_per_tok=[2, 1, 3, 4, 5], num_experts=[6, 5, 7, 8, 9], moe_intermediate_size=[24, 8],
    shared_expert_intermediate_size=[48, 8],
)  # fmt: skip
HYBRID_FAMILIES = {
    "qwen3_next": merged(QWEN_MOE, SHARED_EXPERT, st.just({}) | fields(num_experts=[0]), QWEN_DELTA),
    "qwen3_5_text": QWEN_DELTA,
    "qwen3_5_moe_text": merged(SHARED_EXPERT, QWEN_DELTA),
    "olmo_hybrid": merged(
        DELTA,
        fields(
            linear_allow_neg_eigval=[False, True], num_key_value_heads=[4, 1],
            rope_parameters=st.just({"rope_theta": None, "rope_type": "default"}) | ROPES,
        ),
    ),
}  # fmt: skip
# --- short convolutions -----------------------------------------------------------------------------------------------


def lfm(*attention: str, **choices) -> st.SearchStrategy[dict]:
    types = by_layer(["conv", *attention, "conv"][:N_LAYERS], "conv", *attention)
    return fields(
        layer_types=types.filter(lambda types: set(types) != {"conv"}),
        conv_L_cache=[4, 2, 3, 5], conv_bias=[True, False], norm_eps=[1e-3, 1e-5],
        num_key_value_heads=[2, 1, 4], tie_word_embeddings=[False, True], **choices,
    )  # fmt: skip


PROPORTIONAL = fields(
    rope_type=["proportional"], rope_theta=[1e4], factor=[1.0, 2.0], partial_rotary_factor=[0.5, 0.3, 1.0]
)
HYBRID_FAMILIES |= {
    "lfm2": merged(
        lfm("full_attention", rope_parameters=ROPES),
        fields(block_auto_adjust_ff_dim=[True, False], block_multiple_of=[7, 8]),
        fields(block_ffn_dim_multiplier=[1.3, 0.7, 1.0]),
        st.just({}) | fields(layer_types=[None], full_attn_idxs=[None, [0], [1, 2]]),
    ),
    "lfm2_moe": lfm(
        "full_attention", rope_parameters=ROPES, num_experts_per_tok=[3, 1, 2, 4, 5], num_experts=[8, 5, 6, 7, 9],
        moe_intermediate_size=[24, 8], num_dense_layers=[1, 0, 2], use_expert_bias=[True, False],
        norm_topk_prob=[True, False], routed_scaling_factor=[2.5, 1.0],
    ),
    "lfm3": lfm(
        "full_attention", "sliding_attention", head_dim=[16, 8], sliding_window=[WINDOW, 128],
        use_sandwich_norm=[True, False], use_attention_gate=[True, False],
        rope_parameters=by_type(1e3, 1e4, full=PROPORTIONAL | ROPES_OF_TYPE),
    ),
}  # fmt: skip
# --- Mamba-2 ----------------------------------------------------------------------------------------------------------

# Granite's MLP is shared by its experts, if it has some.
GRANITE4 = merged(
    FAMILIES["granite"],
    fields(
        layer_types=MIXED.filter(lambda types: "full_attention" in types),  # transformers cannot do without
        position_embedding_type=["rope", None], num_local_experts=[6, 0, 5, 8],
        num_experts_per_tok=[3, 1, 2, 4, 5], intermediate_size=[24, 8], shared_intermediate_size=[40, 8],
        mamba_n_heads=[8, 4], mamba_n_groups=[2, 1, 4], mamba_d_state=[6, 4], mamba_d_conv=[3, 2, 4],
        mamba_expand=[2, 1], mamba_conv_bias=[False, True], mamba_chunk_size=[16],
        time_step_limit=[(0.4, 1.5), (0.0, math.inf)], logits_scaling=[1.5, 1.0],
        rms_norm_eps=[1e-3],  # as for DELTA
    ),
)  # fmt: skip
BLOCKS = st.lists(st.sampled_from(["M", "*", "M-", "*-", "ME", "*E"]), min_size=1, max_size=3)
PATTERNS = st.just("M*-MEM-") | BLOCKS.map(lambda blocks: "".join(blocks) + "*")


def nemotron(groups: int) -> st.SearchStrategy[dict]:
    return fields(
        hybrid_override_pattern=PATTERNS, mamba_num_heads=[4, 8], mamba_head_dim=[12, 6], n_groups=[2, 1, 4],
        ssm_state_size=[6, 4], conv_kernel=[3, 2, 4], chunk_size=[16], time_step_min=[0.3, 0.001],
        use_conv_bias=[True, False], head_dim=[16, 8], layer_norm_epsilon=[1e-3, 1e-2], n_routed_experts=[8],
        n_group=[groups], topk_group=some_of(groups), num_experts_per_tok=[2, 1],
        moe_intermediate_size=[24, 8], moe_shared_expert_intermediate_size=[48, 8],
        routed_scaling_factor=[2.5, 1.0], norm_topk_prob=[False, True],
    )  # fmt: skip


HYBRID_FAMILIES |= {"granitemoehybrid": GRANITE4, "nemotron_h": st.one_of(map(nemotron, (4, 2, 1)))}
