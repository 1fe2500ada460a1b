"""Adapters: low-rank weights added to the frozen ones of a base (LoRA, Hu et al. 2021), in PEFT's names and layout.

An adapter consists of settings (`Adapter`, a field of `hydrajax.models.llama.Llama`) and parameters, which lie in the
base's own nested dict next to the kernels that they change: ``qkv`` has ``qkv_lora_a`` and, for each adapted
projection, ``qkv_lora_b_q_proj``. `split_adapter` and `with_adapter` separate and join the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig

# Our kernels and the linear layers of transformers that each holds along its second-last axis. All but the first take
# one index there: a key-value head has its queries, then its key and its value.
KERNELS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "lm_head": ("lm_head",),
}
TARGETS = tuple(target for targets in KERNELS.values() for target in targets)
MLP = (*KERNELS["gate_up"], *KERNELS["down"])  # the targets in an MLP
MARK = "_lora_"  # in the names of an adapter's parameters, and in no others


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter; the defaults are those of Medusa-2's training (medusa B.2).

    Attributes:
        rank: r of the product of ``A [D, r]`` and ``B [r, F]`` that is added to a weight ``[D, F]``.
        alpha: The product is multiplied by ``alpha / rank``.
        dropout: Dropout of A's input in training. One mask for all projections that read the same input.
        targets: The adapted linear layers, by transformers' names; by default all of them, lm head included.
    """

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise HydrajaxError(f"adapter.rank: got {self.rank}, expected at least 1")
        if not 0 < self.alpha < float("inf"):
            raise HydrajaxError(f"adapter.alpha: got {self.alpha}, expected a positive number")
        if not 0 <= self.dropout < 1:
            raise HydrajaxError(f"adapter.dropout: got {self.dropout}, expected at least 0 and less than 1")
        for target in self.targets:
            if target not in TARGETS:
                raise HydrajaxError(f"adapter.targets: got '{target}', expected one of {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise HydrajaxError(f"adapter.targets: got {list(self.targets)}, expected different linear layers")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def of(self, kernel: str) -> tuple[str, ...]:
        """Return the linear layers of one of our kernels that the adapter changes, in their order there."""
        return tuple(target for target in KERNELS.get(kernel, ()) if target in self.targets)


def check_adapter(adapter: Adapter, base: LlamaConfig) -> None:
    """Raise `HydrajaxError` for an adapter that a base of this shape cannot have."""
    if base.tied_lm_head and "lm_head" in adapter.targets:
        raise HydrajaxError(
            "adapter.targets: got lm_head, expected none for this base, whose lm head is its embedding: remove lm_head"
        )
    found = [target for target in adapter.targets if target in MLP]
    if base.any_experts and found:
        raise HydrajaxError(
            f"adapter.targets: got {', '.join(found)}, expected none of an MLP for this base, whose MLPs are experts: "
            "remove them"
        )


def split_adapter(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``(base, adapter)`` parts of a nested dict of parameters, or of anything shaped like it."""
    base, adapter = {}, {}
    for name, value in tree.items():
        if MARK in name:
            adapter[name] = value
        elif isinstance(value, dict):
            base[name], inner = split_adapter(value)
            if inner:
                adapter[name] = inner
        else:
            base[name] = value
    return base, adapter


def with_adapter(base: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    """Join the parts again (the inverse of `split_adapter`), without copying arrays."""
    inner = {name: with_adapter(base[name], part) for name, part in adapter.items() if isinstance(part, dict)}
    return base | adapter | inner
