"""Key maps of bases: transformers' tensor names to our parameters, in both directions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hydrajax.families.mlp_layout import dense_mlp
from hydrajax.families.tensor_names import NO_FILES, RELEASED, first_in, in_files
from hydrajax.models.layout import Entry, Layout, Parameter, Path, Shape, same, transposed
from hydrajax.models.llama_config import SEPARATE_GATES, LlamaConfig

# By `LlamaConfig.norms`: our names of a layer's norms and transformers'.
NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
}
HEAD_NORMS = {"query_norm": "q_norm", "key_norm": "k_norm"}
# Of a layer that has an MLP and experts: `hydrajax.models.expert_settings.Experts.with_mlp`.
WITH_MLP = {
    "mlp_alone_out_norm": "post_feedforward_layernorm_1.weight",
    "experts_out_norm": "post_feedforward_layernorm_2.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
}


def base_layout(c: LlamaConfig, files: Mapping[str, Shape] = NO_FILES) -> Layout:
    """Return the key map of a whole base.

    Args:
        files: names and shapes of its files' tensors, where a family has several forms of files: in one tensor for all
            experts of a layer, with OLMo hybrid's released names, or in a multimodal checkpoint. By default the form
            that is written.
    """
    multimodal = in_files("model.language_model.norm.weight", c) in files
    model = "model.language_model." if multimodal else "model."
    layout = [same(("embedding",), f"{model}embed_tokens.weight", c.vocab_size, c.width)]
    for i in range(c.n_layers):
        layout += decoder_layer((f"layers_{i}",), f"{model}layers.{i}.", c.of_layer(i), files=files)
    if c.per_layer_width:
        features = c.n_layers * c.per_layer_width
        layout += [
            same(("per_layer", "embedding"), f"{model}embed_tokens_per_layer.weight", c.per_layer_vocab, features),
            transposed(("per_layer", "projection"), f"{model}per_layer_model_projection.weight", features, c.width),
            same(("per_layer", "norm", "scale"), f"{model}per_layer_projection_norm.weight", c.per_layer_width),
        ]
    if c.norm_scales != "none":
        layout.append(same(("norm", "scale"), f"{model}norm.weight", c.width))
    if not c.tied_lm_head:
        layout.append(transposed(("lm_head",), "lm_head.weight", c.vocab_size, c.width))
    return [
        entry._replace(theirs={in_files(name, c): shape for name, shape in entry.theirs.items()}) for entry in layout
    ]


def decoder_layer(
    path: Path, prefix: str, c: LlamaConfig, attention_width: int | None = None, files: Mapping[str, Shape] = NO_FILES
) -> Layout:
    """Return the key map of one LLaMA decoder layer (`hydrajax.models.layers.DecoderLayer`).

    Args:
        path: the layer's path in our parameters.
        prefix: the start of its tensors' names.
        attention_width: input width of the attention if its input is not the normed residual stream. The layer then
            has no attention norm.
        files: as in `base_layout`.
    """
    norms = [
        same(
            (*path, ours, "scale"),
            first_in(files, f"{prefix}{theirs}.weight", f"{prefix}{RELEASED.get(theirs, theirs)}.weight"),
            c.width,
        )
        for ours, theirs in NORMS[c.norms].items()
        if c.norm_scales != "none"
        and (attention_width is None or ours != "attention_norm")
        and (c.mlp or ours != "mlp_norm")
    ]
    mlp = []
    if c.mlp and (c.experts is None or c.experts.with_mlp):
        mlp += dense_mlp(path, prefix, c)
    if c.mlp and c.experts is not None:
        from hydrajax.families.expert_layout import expert_mlp

        mlp += expert_mlp(path, prefix, c, files)
        if c.experts.with_mlp:
            norms += [same((*path, ours, "scale"), prefix + theirs, c.width) for ours, theirs in WITH_MLP.items()]
    if c.layer_scale:
        mlp.append(same((*path, "layer_scale"), f"{prefix}layer_scalar", 1))
    if p := c.per_layer_width:
        mlp += [
            transposed((*path, "per_layer_gate"), f"{prefix}per_layer_input_gate.weight", p, c.width),
            transposed((*path, "per_layer_out"), f"{prefix}per_layer_projection.weight", c.width, p),
            same((*path, "per_layer_norm", "scale"), f"{prefix}post_per_layer_input_norm.weight", c.width),
        ]
    if c.recurrent is not None:
        from hydrajax.families.recurrent_layout import recurrent

        return [*norms, *recurrent(path, prefix, c.recurrent, c.width, files), *mlp]
    if c.latent is not None:
        from hydrajax.families.latent_layout import latent_attention

        return [*norms, *latent_attention(path, prefix, c), *mlp]
    attention = f"{prefix}self_attn."
    biases = [_qkv((*path, "qkv_bias"), attention, "bias", c, ())] if c.qkv_bias else []
    sizes = (c.n_heads, c.n_kv_heads) if c.qk_norm_all_heads else (1, 1)
    head_norms = [
        same((*path, ours, "scale"), f"{attention}{theirs}.weight", size * c.head_dim)
        for (ours, theirs), size in zip(HEAD_NORMS.items(), sizes, strict=True)
        if c.norm_scales == "all" and (c.qk_norm or c.qk_norm_all_heads) and not (c.shared_kv and ours == "key_norm")
    ]
    if c.out_bias:
        biases.append(same((*path, "out_bias"), f"{attention}o_proj.bias", c.width))
    if c.attention_sinks:
        biases.append(same((*path, "sinks"), f"{attention}sinks", c.n_heads))
    if c.head_gate:
        head_norms.append(transposed((*path, "head_gate"), f"{attention}g_proj.weight", c.n_heads, c.width))
    return [
        *norms,
        _qkv((*path, "qkv"), attention, "weight", c, (attention_width or c.width,)),
        transposed((*path, "out"), f"{attention}o_proj.weight", c.width, c.n_heads * c.head_dim),
        *mlp,
        *biases,
        *head_norms,
    ]


def _qkv(path: Path, prefix: str, kind: str, c: LlamaConfig, inputs: Shape) -> Entry:
    """Fuse the query, key and value projections (``kind``: ``weight``, or ``bias`` with no inputs).

    Ours is ``[*inputs, kv head, (its queries, key, value), feature]``; theirs are three tensors
    ``[(kv head, query in group, feature), *inputs]``. Gates follow a head's queries in ours; in
    theirs they follow each query, or are a tensor of their own (`SEPARATE_GATES`).
    """
    apart = c.attention_gate and c.names in SEPARATE_GATES
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    own = () if c.shared_kv else ("k",) if c.values_are_keys else ("k", "v")
    rows = {"q": queries, "gate": queries} if apart else {"q": (1 + c.attention_gate) * queries}
    rows |= dict.fromkeys(own, keys)

    def join(*parts):
        if c.fused_projections:
            parts = np.split(parts[0], [rows["q"], rows["q"] + rows["k"]])
        if c.attention_gate and not apart:
            pairs = parts[0].reshape(c.n_heads, 2, c.head_dim, *inputs)
            parts = (pairs[:, 0], pairs[:, 1], *parts[1:])
        by_head = tuple(part.reshape(c.n_kv_heads, -1, c.head_dim, *inputs) for part in parts)
        return (Parameter(by_head, axis=1, order=(3, 0, 1, 2) if inputs else None),)

    def split(fused):
        fused = np.moveaxis(fused, 0, -1) if inputs else fused
        first, *others = np.split(fused, [fused.shape[1] - i for i in range(len(own), 0, -1)], axis=1)
        queries = [first]
        if c.attention_gate:
            queries = np.split(first, 2, axis=1)
            queries = queries if apart else [np.stack(queries, axis=2)]
        parts = tuple(part.reshape(-1, *inputs) for part in (*queries, *others))
        return (np.concatenate(parts),) if c.fused_projections else parts

    sizes = {"qkv": sum(rows.values())} if c.fused_projections else rows
    theirs = {f"{prefix}{part}_proj.{kind}": (size, *inputs) for part, size in sizes.items()}
    return Entry((path,), theirs, join, split)
