"""Shapes by name, for predictions and compilations: the presets, and published mixtures of experts."""

from __future__ import annotations

from hydrajax.models.llama_config import PRESETS, Experts, LayerKind, LlamaConfig


def _glm() -> LlamaConfig:
    experts = Experts(128, 8, 1408, shared_width=1408, scores="sigmoid", normalized=True, choice_bias=True)
    kinds = (LayerKind(None, 1e6), *(LayerKind(None, 1e6, None, experts),) * 45)
    shape = LlamaConfig(151_552, 4096, 10_944, 46, 96, 8, 128, 131_072, 1e-5, 1e6, qkv_bias=True, rotary_dim=64)
    return shape.replace(layer_kinds=kinds)


# The settings of their published config.json.
MIXTURES = {
    "mixtral-8x7b": LlamaConfig(
        *(32_000, 4096, 14_336, 32, 32, 8, 128, 32_768, 1e-5, 1e6),
        experts=Experts(8, 2, 14_336, normalized=True, block="block_sparse_moe"),
    ),
    "qwen3-30b-a3b": LlamaConfig(
        *(151_936, 2048, 6144, 48, 32, 4, 128, 40_960, 1e-6, 1e6),
        qk_norm=True,
        experts=Experts(128, 8, 768, normalized=True),
    ),
    "olmoe-1b-7b": LlamaConfig(
        50_304, 2048, 1024, 16, 16, 16, 128, 4096, 1e-5, qk_norm_all_heads=True, experts=Experts(64, 8, 1024)
    ),
    "glm-4.5-air": _glm(),
}
SHAPES: dict[str, LlamaConfig] = PRESETS | MIXTURES
