"""EAGLE drafts as plain torch modules with the parameter names of the released files or of speculators.

They follow the official formulas, see "Model maths" in the README of the golden data."""

import torch
from torch import nn

from hydrajax.models.llama_config import LlamaConfig


class Attention(nn.Module):
    """Causal attention with rotary embeddings over an input that can be wider than the model."""

    def __init__(self, c: LlamaConfig, inputs: int):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(inputs, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.c.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.c.n_heads // self.c.n_kv_heads
        key, value = (part.repeat_interleave(groups, dim=1) for part in (rotated(key, self.c), value))
        out = nn.functional.scaled_dot_product_attention(rotated(query, self.c), key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotated(x, c: LlamaConfig):
    """RoPE at positions 0, 1, ...; pairs are in the two halves of a head."""
    half = c.head_dim // 2
    frequencies = c.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if c.rope_scaling is not None:
        assert c.rope_scaling.kind == "linear"
        frequencies = frequencies / c.rope_scaling.factor
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (torch.cat([part, part], dim=-1).float() for part in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.width, c.mlp_width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.mlp_width, c.width, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The layer of EAGLE-1, without a norm before attention."""

    def __init__(self, c: LlamaConfig, inputs: int | None = None):
        super().__init__()
        self.self_attn, self.mlp = Attention(c, inputs or c.width), MLP(c)
        self.post_attention_layernorm = nn.RMSNorm(c.width, eps=c.norm_eps)

    def forward(self, x, read=None):
        x = x + self.self_attn(x if read is None else read)
        return x + self.mlp(self.post_attention_layernorm(x))


class WideLayer(Layer):
    """The layer of EAGLE-3: attention over [norm(embedding), norm(hidden)].

    norm_before_residual: speculators' variant, src/speculators/models/eagle3/model_definitions.py.
    """

    def __init__(self, c: LlamaConfig, norm_before_residual: bool = False):
        super().__init__(c, 2 * c.width)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm, self.hidden_norm = (nn.RMSNorm(c.width, eps=c.norm_eps) for _ in range(2))

    def forward(self, x, embeddings):
        normed = self.hidden_norm(x)
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return super().forward(normed if self.norm_before_residual else x, read)


class Eagle1(nn.Module):
    """``names``: parameter names of the map and the layer."""

    def __init__(self, c: LlamaConfig, bias: bool, names=("fc", "layers")):
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(2 * c.width, c.width, bias=bias))
        self.add_module(names[1], nn.ModuleList([Layer(c)]) if names[1] == "layers" else Layer(c))

    def forward(self, embeddings, features):
        """Return predictions of the next hidden states."""
        fc, layer = (getattr(self, name) for name in self.names)
        layer = layer[0] if isinstance(layer, nn.ModuleList) else layer
        return layer(fc(torch.cat([embeddings, features], dim=-1)))


class Eagle3(nn.Module):
    """n_known: the size of its vocabulary, None for all. released: use its authors' names. variant: see `WideLayer`."""

    def __init__(self, c: LlamaConfig, n_reads: int, n_known: int | None, released: bool = True, **variant):
        super().__init__()
        self.fc = nn.Linear(n_reads * c.width, c.width, bias=False)
        if released:
            self.midlayer = WideLayer(c, **variant)
        else:
            self.layers = nn.ModuleList([WideLayer(c, **variant)])
        self.norm = nn.RMSNorm(c.width, eps=c.norm_eps)
        self.lm_head = nn.Linear(c.width, n_known or c.vocab_size, bias=False)
        if n_known is not None:
            self.register_buffer("d2t", torch.zeros(n_known, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def forward(self, embeddings, features):
        """Return logits over its vocabulary."""
        layer = self.midlayer if hasattr(self, "midlayer") else self.layers[0]
        return self.lm_head(self.norm(layer(self.fc(features), embeddings)))
