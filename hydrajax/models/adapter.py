"""Adapters: low-rank weights beside the frozen ones of a base (LoRA, Hu et al. 2021), as PEFT names and stores them.

An adapter is a few settings (`Adapter`, a field of `hydrajax.models.llama.Llama`) and parameters, which lie in the
base's own nested dict beside the kernels that they change: ``qkv`` has ``qkv_lora_a`` and, for each adapted projection,
``qkv_lora_b_q_proj``. `split_adapter` and `with_adapter` take the two apart and put them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig

# Our kernels and the linear layers of transformers that each holds, along its last axis but one. All but the first
# take one place there: a key-value head has its queries, then its key and its value.
KERNELS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "lm_head": ("lm_head",),
}
TARGETS = tuple(target for targets in KERNELS.values() for target in targets)
MARK = "_lora_"  # in the names of an adapter's parameters, and in no others


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter; by default those that Medusa-2 is trained with (medusa B.2).

    rank:    r of the product of ``A [D, r]`` and ``B [r, F]`` that is added to a weight ``[D, F]``.
    alpha:   the product is multiplied by ``alpha / rank``.
    dropout: of what A reads, in training. One mask for all projections that read the same input.
    targets: the linear layers that have one, by transformers' names; all of them by default, the lm head too.
    """

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise HydrajaxError(f"adapter.rank: must be at least 1, found {self.rank}")
        if not 0 < self.alpha < float("inf"):
            raise HydrajaxError(f"adapter.alpha: must be positive, found {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise HydrajaxError(f"adapter.dropout: must be from 0 up to, not including, 1, found {self.dropout}")
        for target in self.targets:
            if target not in TARGETS:
                raise HydrajaxError(f"adapter.targets: found '{target}', allowed are {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise HydrajaxError(f"adapter.targets: must be different linear layers, found {list(self.targets)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def of(self, kernel: str) -> tuple[str, ...]:
        """Which of the linear layers in one of our kernels it changes, in their order there."""
        return tuple(target for target in KERNELS.get(kernel, ()) if target in self.targets)


def check_adapter(adapter: Adapter, base: LlamaConfig) -> None:
    """Refuse an adapter that a base of this shape cannot have."""
    if base.tied_lm_head and "lm_head" in adapter.targets:
        raise HydrajaxError(
            "adapter.targets: lm_head is the embedding of this base (tied), which has no adapter; leave lm_head out"
        )


def split_adapter(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(the base's part, the adapter's part)`` of a nested dict of parameters or of anything shaped like it."""
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
    """The inverse of `split_adapter`. No array is copied."""
    inner = {name: with_adapter(base[name], part) for name, part in adapter.items() if isinstance(part, dict)}
    return base | adapter | inner
