"""Predict step times and speed-ups of tree decoding on a device (medusa appendix G).

An operator takes the longer of its operations at the device's FLOP/s and its traffic at the device's bandwidth; a step
takes the sum of its operators. Kernel launches, the sort of a top-k and the commit are left out: predictions are lower
bounds with published peaks and estimates with measured rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.drafter import Drafter
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.roofline import passes
from hydrajax.roofline.devices import Device
from hydrajax.roofline.traced import Operator, ranking
from hydrajax.trees.dynamic import CandidateTree

Phases = dict[str, Sequence[Operator]]


@dataclass(frozen=True)
class Workload:
    """A base and a drafter that decode ``batch`` sequences of ``context`` tokens. itemsize: bytes per number, 2 or 4.

    As in the decode step, all slots of the cache are read (``context`` and the tree's nodes), and the tree's own keys
    in addition.
    """

    config: LlamaConfig
    drafter: Drafter
    batch: int
    context: int
    itemsize: int

    @cached_property
    def base(self) -> Llama:
        return Llama(self.config, base_dtype(self.itemsize))

    def step(self, tree: CandidateTree) -> Phases:
        """Return the operators of one step by phase."""
        batch, nodes = self.batch, self.drafter.spec.verified_nodes(tree)
        slots = self.context + nodes
        return {
            "propose": passes.propose(self.drafter, self.base, tree, batch, slots),
            "verify": passes.forward(self.base, batch, nodes, slots),
            "accept_commit": [ranking("argmax", batch * nodes, self.config.vocab_size)],
            "observe": passes.observe(self.drafter, self.base, tree, batch, slots),
        }

    def autoregressive_step(self) -> list[Operator]:
        """Return the operators of a step without a draft."""
        argmax = ranking("argmax", self.batch, self.config.vocab_size)
        return [*passes.forward(self.base, self.batch, 1, self.context + 1), argmax]

    def prefill(self) -> list[Operator]:
        """Return the operators of a prefill of ``context`` tokens per sequence, in base and drafter."""
        base = passes.forward(self.base, self.batch, self.context, 0, 1)
        return [*base, *passes.begin(self.drafter, self.base, self.batch, self.context, self.context)]


def base_dtype(itemsize: int):
    """Return the dtype with this many bytes per number."""
    return jnp.dtype({2: jnp.bfloat16, 4: jnp.float32}[itemsize])


@dataclass(frozen=True)
class Prediction:
    """One (batch, context, tree) cell. Times are milliseconds per step of the whole batch, as in `BenchmarkRow`.

    Attributes:
        break_even: Step / autoregressive_step, the tokens_per_step above which the tree is faster.
        flops, bytes: Of a step.
        draft_bytes: Of all draft parameters.
        memory_bound: Share of the step's time in memory-bound operators.
        speedup: tokens_per_step / break_even, None without tokens_per_step.
    """

    batch: int
    context: int
    tree: str
    nodes: int
    depth: int
    autoregressive_step: float
    step: float
    propose: float
    verify: float
    accept_commit: float
    observe: float
    prefill: float
    break_even: float
    flops: float
    bytes: float
    draft_bytes: int
    memory_bound: float
    tokens_per_step: float | None = None
    speedup: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    device: Device,
    config: LlamaConfig,
    drafter: Drafter,
    trees: dict[str, CandidateTree],
    batches: Sequence[int],
    contexts: Sequence[int],
    itemsize: int,
    tokens_per_step: Sequence[float | None] = (),
) -> Iterator[Prediction]:
    """Yield a prediction for every cell, contexts outermost, trees innermost.

    Args:
        device: rates.
        config: shape of the base.
        drafter: the drafter.
        trees: by name.
        batches: batch sizes.
        contexts: tokens per sequence.
        itemsize: bytes per number, 2 or 4.
        tokens_per_step: one value per tree, or empty.
    """
    draft_bytes = passes.draft_parameters(drafter, Llama(config, base_dtype(itemsize))) * itemsize
    for tree in trees.values():
        tree.check(drafter.spec.depth, config.vocab_size)
    for context in contexts:
        for batch in batches:
            work = Workload(config, drafter, batch, context, itemsize)
            autoregressive = milliseconds(device, work.autoregressive_step())
            prefill = milliseconds(device, work.prefill())
            for (name, tree), tau in zip(trees.items(), tokens_per_step or [None] * len(trees), strict=True):
                phases = work.step(tree)
                times = {phase: milliseconds(device, operators) for phase, operators in phases.items()}
                operators = [operator for phase in phases.values() for operator in phase]
                step = sum(times.values())
                waiting = milliseconds(device, filter(device.memory_bound, operators))
                yield Prediction(
                    batch=batch,
                    context=context,
                    tree=name,
                    nodes=drafter.spec.verified_nodes(tree),
                    depth=drafter.spec.longest_path(tree),
                    autoregressive_step=autoregressive,
                    step=step,
                    **times,
                    prefill=prefill,
                    break_even=step / autoregressive,
                    flops=sum(operator.count * operator.flops for operator in operators),
                    bytes=sum(operator.count * operator.bytes for operator in operators),
                    draft_bytes=draft_bytes,
                    memory_bound=waiting / step,
                    tokens_per_step=tau,
                    speedup=None if tau is None else tau * autoregressive / step,
                )


def milliseconds(device: Device, operators: Iterable[Operator]) -> float:
    """Return the time of operators that run one after the other."""
    return 1e3 * sum(device.seconds(operator) for operator in operators)
