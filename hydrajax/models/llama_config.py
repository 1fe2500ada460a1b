"""Model configurations as frozen, hashable dataclasses, so that they can be static arguments of jitted functions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hydrajax.errors import HydrajaxError


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for longer contexts.

    ``kind`` is ``"linear"`` (every frequency divided by ``factor``) or ``"llama3"`` (only low frequencies, with a
    smooth transition between ``low_freq_factor`` and ``high_freq_factor``, as in LLaMA 3.1).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise HydrajaxError(f"rope scaling: got type '{self.kind}', expected 'linear' or 'llama3'")
        if self.factor <= 0:
            raise HydrajaxError(f"rope scaling: factor: got {self.factor}, expected a positive number")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise HydrajaxError(
                f"rope scaling: low_freq_factor: got {self.low_freq_factor}, expected less than high_freq_factor, "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a LLaMA-family model, named as in docs/design.md 2."""

    vocab_size: int
    width: int
    mlp_width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_lm_head: bool = False
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over each head's query and key features, before rotation
    sliding_window: int | None = None  # Mistral: tokens attended to, itself included; None for all

    def __post_init__(self):
        for name in ("vocab_size", "width", "mlp_width", "n_layers", "n_heads", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise HydrajaxError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.n_heads % self.n_kv_heads:
            raise HydrajaxError(f"n_kv_heads: got {self.n_kv_heads} for {self.n_heads} heads, expected a divisor")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise HydrajaxError(f"sliding_window: got {self.sliding_window}, expected at least 1")
        if self.head_dim % 2:
            raise HydrajaxError(f"head_dim: got {self.head_dim}, expected an even number for rotary embeddings")

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per key-value head (1 for multi-head attention)."""
        return self.n_heads // self.n_kv_heads

    @property
    def plain_layer(self) -> LlamaConfig:
        """One LLaMA layer of this shape without a family's extras, such as a prefix layer (hydra 3.1)."""
        return self.replace(n_layers=1, qkv_bias=False, qk_norm=False, sliding_window=None)

    def replace(self, **changes) -> LlamaConfig:
        return dataclasses.replace(self, **changes)


# Published shapes, for benchmarks on random weights (`hydrajax bench --random NAME`). "25m" is the size used
# to compare with transformers on a CPU; "tiny" is for trying a command out.
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(512, 64, 172, 3, 4, 4, 16, max_positions=1024),
    "25m": LlamaConfig(4096, 512, 1536, 6, 8, 8, 64, max_positions=2048),
    "1b": LlamaConfig(32_000, 2048, 5632, 22, 32, 4, 64, max_positions=2048, norm_eps=1e-5),  # TinyLlama 1.1B
    "7b": LlamaConfig(32_000, 4096, 11_008, 32, 32, 32, 128, max_positions=8192),  # LLaMA 7B, Vicuna 7B
    "13b": LlamaConfig(32_000, 5120, 13_824, 40, 40, 40, 128, max_positions=8192),
    "33b": LlamaConfig(32_000, 6656, 17_920, 60, 52, 52, 128, max_positions=8192),
    "8b": LlamaConfig(128_256, 4096, 14_336, 32, 32, 8, 128, 8192, 1e-5, 500_000.0),  # LLaMA 3 8B
    "70b": LlamaConfig(32_000, 8192, 28_672, 80, 64, 8, 128, max_positions=8192, norm_eps=1e-5),  # LLaMA 2 70B
    "llama3-70b": LlamaConfig(128_256, 8192, 28_672, 80, 64, 8, 128, 8192, 1e-5, 500_000.0),  # LLaMA 3 70B
}
