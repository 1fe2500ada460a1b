"""Record tiny models of tunix, gemma or MaxText: ``python tests/golden/make_jax_programs.py tunix|gemma|maxtext``.

Writes ``jax_programs/*.npz.xz``: the arrays of a model by path, all of them our own random numbers, ``config`` (JSON:
the configuration's fields and its class's module), ``tokens`` [2, 10] and the program's own ``logits`` [2, 10, 32] in
float32. Made with google-tunix 0.1.7 (and qwix 0.1.8), gemma 4.0.1 and maxtext 0.2.5 on JAX 0.10.2.
"""

import dataclasses
import enum
import io
import json
import lzma
import sys
from pathlib import Path

import jax
import jax.experimental.xla_metadata
import jax.numpy as jnp
import numpy as np
from flax import nnx

HERE = Path(__file__).parent / "jax_programs"
VOCABULARY, ALPHA = 32, 6.0
TOKENS = np.random.default_rng(9).integers(1, VOCABULARY, (2, 10))
POSITIONS = np.broadcast_to(np.arange(10), (2, 10))
SHAPE = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "embed_dim": 16, "hidden_dim": 24}


def drawn(tree, around=0.0):
    """The tree with other floats: multiples of 1/32, which compress; vectors are near ``around``."""
    draws = np.random.default_rng(0)

    def draw(path, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        is_scale = any(word in jax.tree_util.keystr(path) for word in ("norm", "scale"))
        numbers = draws.integers(-16, 17, x.shape) / 32
        return jnp.asarray(around + numbers / 2 if is_scale else numbers, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def plain(value):
    """A field's value for JSON; an enum by its name."""
    if isinstance(value, enum.Enum):
        return {"name": value.name}
    return [plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def fields_of(config):
    """The fields of a dataclass that JSON has."""
    found = {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {name: x for name, x in found.items() if x is None or isinstance(x, (bool, int, float, str, list, dict))}


def save(name, tree, module, fields, logits, **more):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    arrays = {name: np.asarray(x) for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    config = json.dumps({"module": module, "fields": fields} | more)
    file, content = HERE / f"{name}.npz.xz", io.BytesIO()
    np.savez(content, **arrays, config=config, tokens=TOKENS, logits=np.asarray(logits, np.float32))
    file.write_bytes(lzma.compress(content.getvalue(), preset=9))
    print(file.name, file.stat().st_size, float(np.abs(logits).max()))


def tunix():
    import qwix
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3

    mask = np.broadcast_to(np.tril(np.ones((10, 10), bool)), (2, 10, 10))
    local, full = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL
    gemma2 = {"final_logit_softcap": 30.0, "use_post_attn_norm": True, "use_post_ffw_norm": True}
    gemma2 |= {"attention_types": (local, full, local), "attn_logits_soft_cap": 5.0, "num_layers": 3}
    usual = {"vocab_size": VOCABULARY, "rope_theta": 1_000_000, "norm_eps": 1e-5, "num_layers": 2}
    windows = {"num_embed": VOCABULARY, "sliding_window_size": 4}
    by_width = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    for name, model_class, module, fields in (
        ("llama3", llama3.Llama3, llama3, usual),
        ("qwen2", qwen2.Qwen2, qwen2, usual | {"num_kv_heads": 4, "use_tied_embedding": True}),
        ("qwen3", qwen3.Qwen3, qwen3, usual),
        ("qwen3_moe", qwen3.Qwen3, qwen3, usual | {"num_experts": 4, "num_experts_per_tok": 2, "hidden_dim": 8}),
        ("gemma2", gemma.Gemma, gemma, windows | gemma2),
        ("gemma3", gemma3.Gemma3, gemma3, windows | {"num_layers": 7, "global_scale_factor": 8.0, "hidden_dim": 8}),
        ("gemma3_mha", gemma3.Gemma3, gemma3, windows | {
            "num_layers": 2, "num_kv_heads": 4, "query_pre_attn_norm": by_width, "param_dtype": jnp.float32}),
        ("gemma4", gemma4.Gemma4, gemma4, windows | {
            "num_layers": 4, "num_kv_heads": 1, "per_layer_input_dim": 8,
            "attention_pattern": (gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL),
            "frac_shared_layers": 0.5, "override_kv_shared_ffw_hidden": 48, "global_key_size": 16}),
        ("lora", qwen3.Qwen3, qwen3, usual),
    ):  # fmt: skip
        config = module.ModelConfig(**SHAPE | fields)
        model = model_class(config, rngs=nnx.Rngs(0))
        around = 0.0 if name[:6] in ("gemma2", "gemma3") else 1.0
        inputs = jnp.asarray(TOKENS), jnp.asarray(POSITIONS), None, jnp.asarray(mask)
        if name == "lora":
            provider = qwix.LoraProvider(module_path=".*(q_proj|o_proj|gate_proj).*", rank=3, alpha=ALPHA)
            model = qwix.apply_lora_to_model(model, provider, *inputs, rngs=nnx.Rngs(1))
        nnx.update(model, drawn(nnx.state(model), around=around))
        state, more = nnx.to_pure_dict(nnx.state(model)), {"lora_alpha": ALPHA} if name == "lora" else {}
        save(f"tunix_{name}", state, type(config).__module__, fields_of(config), model(*inputs)[0], **more)


def gemma():
    from gemma.gm.nn import _config, _modules, _transformer
    from gemma.gm.nn.gemma4 import _config as _config4
    from gemma.gm.nn.gemma4 import _modules as _modules4
    from gemma.gm.nn.gemma4 import _transformer as _transformer4

    local, full = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
    shared = {"num_embed": VOCABULARY, "use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4}
    by_width = _config.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    third = {"final_logit_softcap": None, "use_qk_norm": True, "global_base_frequency": 1_000_000}
    for name, fields in (
        ("gemma2", {"attention_types": (local, full), "attn_logits_soft_cap": 5.0, "final_logit_softcap": 30.0}),
        # Only the configuration tells in which order the axes of this gate are.
        ("gemma2_square", {"attention_types": (local, full), "final_logit_softcap": 30.0, "hidden_dim": 16,
                           "transpose_gating_einsum": True, "query_pre_attn_norm": by_width}),
        ("gemma3", third | {"attention_types": (local, full), "global_scale_factor": 8.0,
                            "transpose_gating_einsum": True}),
        ("gemma3_mha", third | {"attention_types": (local, full), "num_kv_heads": 4, "query_pre_attn_norm": by_width}),
        ("gemma4", {"attention_types": (local, full), "k_eq_v_global": True, "num_global_kv_heads": 1,
                    "global_key_size": 16, "global_rope_proportion": 0.25, "local_rope_proportion": 1.0,
                    "final_logit_softcap": 30.0, "global_base_frequency": 1_000_000}),
    ):  # fmt: skip
        config_module, model_module = (_config4, _transformer4) if name == "gemma4" else (_config, _transformer)
        if name == "gemma4":
            fields["attention_types"] = tuple(_modules4.AttentionType[kind.name] for kind in fields["attention_types"])
        config = config_module.TransformerConfig(**SHAPE | shared | fields)
        model = model_module.Transformer(config=config, dtype=jnp.float32, tokens="tokens")
        params = drawn(model.init(jax.random.key(0), jnp.asarray(TOKENS)), around=float(name == "gemma4"))
        logits = model.apply(params, jnp.asarray(TOKENS)).logits
        fields = fields_of(config) | {"num_layers": config.num_layers}
        save(f"gemma_{name}", params["params"], type(config).__module__, fields, logits)


def maxtext():
    if not hasattr(jax.experimental.xla_metadata, "must_fuse_call"):  # MaxText needs it for TPUs
        jax.experimental.xla_metadata.must_fuse_call = lambda function, *args, **options: function
    import maxtext as package
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    exact = {
        "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "float32_logits": True,
        "float32_qk_product": True, "logits_dot_in_fp32": True, "attention": "dot_product", "enable_dropout": False,
        "run_name": "golden", "base_output_directory": "unused", "override_model_config": True, "log_config": False,
        "enable_checkpointing": False, "per_device_batch_size": 1, "max_target_length": 16,
        "skip_jax_distributed_system": True, "sparse_matmul": False, "megablox": False,
    }  # fmt: skip
    shape = {"model_name": "default", "decoder_block": "llama2", "vocab_size": VOCABULARY, "head_dim": 8}
    shape |= {"base_emb_dim": 16, "base_mlp_dim": 24, "base_num_query_heads": 4, "base_num_kv_heads": 2}
    shape |= {"base_num_decoder_layers": 2}
    gemmas = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "logits_via_embedding": True}
    gemmas |= {"normalization_layer_epsilon": 1e-6, "sliding_window_size": 4, "mlp_activations": ["gelu", "linear"]}
    second = gemmas | {"decoder_block": "gemma2", "final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 5.0}
    third = gemmas | {"decoder_block": "gemma3", "model_name": "gemma3-4b", "local_rope_max_timescale": 10_000}
    third |= {"rope_max_timescale": 1_000_000, "rope_linear_scaling_factor": 8.0, "base_mlp_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8, "norm_topk_prob": True}
    for name, fields in {
        "llama": {},
        "llama_unscanned": {"scan_layers": False, "base_num_kv_heads": 4},
        "llama_interleaved": {"rope_type": "llama3.1", "rope_max_timescale": 500_000},
        "mistral_tied": {"decoder_block": "mistral", "logits_via_embedding": True, "param_scan_axis": 0},
        "qwen2": {"decoder_block": "qwen2", "attention_bias": True},
        "qwen3": {"decoder_block": "qwen3", "use_qk_norm": True, "scan_layers": False},
        "qwen3_moe": {"decoder_block": "qwen3_moe", "use_qk_norm": True} | experts,
        "gemma2": second,
        "gemma2_unscanned": second | {"scan_layers": False, "base_num_decoder_layers": 1},
        "gemma3": third | {"base_num_decoder_layers": 7},
        "gemma3_unscanned": third | {"scan_layers": False, "model_name": "gemma3-27b"},
    }.items():
        fields = shape | fields
        base = str(Path(package.__file__).parent / "configs" / "base.yml")
        config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in (exact | fields).items())])
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        with mesh:
            model = models.Transformer(config, mesh, None, rngs=nnx.Rngs(0))
            nnx.update(model, drawn(nnx.state(model), around=1.0))
            segments = jnp.ones(TOKENS.shape, jnp.int32)
            logits = model(jnp.asarray(TOKENS), POSITIONS, decoder_segment_ids=segments, enable_dropout=False)
        state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        save(f"maxtext_{name}", state, "maxtext.configs.pyconfig", fields, logits)


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    {"tunix": tunix, "gemma": gemma, "maxtext": maxtext}[sys.argv[1]]()
