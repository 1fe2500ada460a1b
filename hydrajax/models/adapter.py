"""Adapters: low-rank weights added to the frozen ones of a base (LoRA, Hu et al. 2021), in PEFT's names and layout.

An adapter consists of settings (`Adapter`, a field of `hydrajax.models.llama.Llama`) and parameters, which lie in the
base's own nested dict next to the kernels that they change: ``qkv`` has ``qkv_lora_a`` and, for each adapted
projection, ``qkv_lora_b_q_proj``. `split_adapter` and `with_adapter` separate and join the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.llama_config import SEPARATE_GATES, LlamaConfig
from hydrajax.models.weights import Axes, Quantized, declare, project, project_parts
from hydrajax.ops import drop, parts_first

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

    def declare(self, module: nn.Module, name: str, kernel: Array | Quantized, axes: Axes) -> LowRank:
        """Return a kernel with declared weights: A as in PEFT, uniform up to 1 / sqrt(D) (kaiming with a = sqrt(5)), B
        zero.
        """
        shape, targets = kernel.shape, self.of(name)
        limit = 1 / math.sqrt(shape[0])

        def uniform(rng, shape, dtype):
            return jax.random.uniform(rng, shape, dtype, -limit, limit)

        a = declare(module, f"{name}_lora_a", (shape[0], len(targets), self.rank), (axes[0], None, None), uniform)
        parameters = {f"{name}_lora_a": a}
        for part, features in part_shapes(name, shape).items():
            if part in targets:
                b = f"{name}_lora_b_{part}"
                parameters[b] = declare(module, b, (self.rank, *features), (None, *axes[1:]), nn.initializers.zeros)
        rng = module.make_rng("dropout") if self.dropout and module.has_rng("dropout") else None
        return low_rank(name, kernel, parameters, self)._replace(dropout=self.dropout, rng=rng)


def adapts_queries(base: LlamaConfig) -> bool:
    """Return whether an adapter can change queries, keys and values: every layer has all three."""
    return base.latent is None and not any(kind.shared_kv or kind.values_are_keys for kind in base.kinds)


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
    found = [target for target in adapter.targets if target in (*KERNELS["qkv"], *KERNELS["out"])]
    if found and base.latent is not None:
        raise HydrajaxError(
            f"adapter.targets: got {', '.join(found)}, expected none of attention for this base, whose attention is "
            "latent: remove them"
        )
    found = [target for target in found if target in KERNELS["qkv"]]
    if found and not adapts_queries(base):
        raise HydrajaxError(
            f"adapter.targets: got {', '.join(found)}, expected no queries, keys or values for this base: some "
            "of its layers lack keys or values; remove them"
        )
    if base.names in SEPARATE_GATES and "q_proj" in adapter.targets:
        raise HydrajaxError(
            "adapter.targets: got q_proj, expected none for this base, whose queries are one matrix with their gates: "
            "remove it"
        )
    if base.activation == "relu2" and "gate_proj" in adapter.targets:
        raise HydrajaxError(
            "adapter.targets: got gate_proj, expected none for this base, whose MLPs have no gate: remove it"
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


class LowRank(NamedTuple):
    """A frozen kernel ``W [D, *features]`` and an adapter's addition, ``scale * A B`` for each adapted part.

    Attributes:
        kernel: W.
        a: ``[D, P, r]`` for the P adapted parts, so that one product serves them all.
        b: For each part of the kernel (`hydrajax.models.adapter.KERNELS`) ``[r, *its features]``; None without adapter.
        rng, dropout: Drop inputs of A in training; None for no dropout.
    """

    kernel: Array | Quantized
    a: Float[Array, "D P r"]
    b: tuple[Array | None, ...]
    scale: float
    dropout: float = 0.0
    rng: Array | None = None

    def delta(self) -> Float[Array, " D *features"]:
        """Return the addition to the kernel as one array (NumPy if ``a`` is)."""
        xp, rank = self.a.__array_namespace__(), self.a.shape[-1]
        inputs = iter(xp.moveaxis(self.a, 1, 0))
        products = [None if b is None else (next(inputs) @ b.reshape(rank, -1)) * self.scale for b in self.b]
        return self._joined(products, xp)

    def project(self, x: Float[Array, "*rows D"], dtype: DType) -> Float[Array, "*rows F"]:
        """Return ``x @ (kernel + delta)`` in this dtype, as `hydrajax.models.weights.project` does."""
        return project(x, self.kernel, dtype) + self._added(x, dtype)

    def project_parts(self, x: Float[Array, "*rows D"]) -> Float[Array, "*parts *rows F"]:
        """Return `project` with the parts of a fused kernel as leading axes."""
        added = parts_first(self._added(x, x.dtype), self.kernel.shape[1:])
        return project_parts(x, self.kernel) + added

    def _added(self, x: Float[Array, "*rows D"], dtype) -> Float[Array, "*rows F"]:
        """Return the adapter's addition to ``x @ W``."""
        x = drop(x, self.dropout, self.rng)
        n_parts, rank = self.a.shape[1:]
        inner = project(x, self.a).reshape(*x.shape[:-1], n_parts, rank)
        inputs = iter([inner[..., i, :] for i in range(n_parts)])
        products = [None if b is None else project(next(inputs), b, dtype) * self.scale for b in self.b]
        return self._joined(products, jnp).reshape(*x.shape[:-1], -1)

    def _joined(self, products: list, xp):
        """Return products ``[*rows, F]`` of the parts (None for parts without adapter) joined as ``[*rows,
        *features]``.
        """
        features = self.kernel.shape[1:]
        rows, dtype = next((x.shape[:-1], x.dtype) for x in products if x is not None)
        if len(products) == 1:
            return products[0].reshape(*rows, *features)
        sizes = part_sizes(features[-2], len(products))
        shapes = [(*rows, *features[:-2], size, features[-1]) for size in sizes]
        parts = [
            xp.zeros(shape, dtype=dtype) if x is None else x.reshape(shape)
            for x, shape in zip(products, shapes, strict=True)
        ]
        return xp.concat(parts, axis=-2)


def low_rank(name: str, kernel: Array | Quantized, parameters: dict, adapter: Adapter) -> LowRank:
    """Return the kernel ``name`` with the adapter's parameters next to it in a nested dict."""
    b = tuple(parameters.get(f"{name}_lora_b_{part}") for part in KERNELS[name])
    return LowRank(kernel, parameters[f"{name}_lora_a"], b, adapter.scale)


def part_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the features of each linear layer in our kernel of this name and shape, as in its B."""
    features, parts = shape[1:], KERNELS[name]
    if len(parts) == 1:
        return {parts[0]: features}
    sizes = part_sizes(features[-2], len(parts))
    return {part: (*features[:-2], size, features[-1]) for part, size in zip(parts, sizes, strict=True)}


def part_sizes(places: int, n_parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts along a fused kernel's second-last axis."""
    return (places - n_parts + 1, *[1] * (n_parts - 1))
