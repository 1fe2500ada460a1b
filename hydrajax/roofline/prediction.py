"""Predicted step times of tree decoding on a device, and what they say about speed-up (medusa appendix G).

An operator takes the longer of its operations at the device's FLOP/s and its traffic at the device's bandwidth, a step
the sum of its operators. What a roofline leaves out, it leaves out here too: launching kernels, the slow sort of a
top-k, the bookkeeping of a commit. So it is a lower bound on a published peak and an estimate on measured rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.roofline import passes
from hydrajax.roofline.devices import Device
from hydrajax.roofline.traced import Operator, ranking
from hydrajax.trees.dynamic import CandidateTree

Parts = dict[str, Sequence[Operator]]


@dataclass(frozen=True)
class Workload:
    """What is decoded: a base and a drafter with 16- or 32-bit numbers, ``context`` tokens in each of ``batch`` rows.

    As the decode step has it: the cache holds ``context`` slots and room for the tree, all of which are read, and the
    tree's own keys come on top.
    """

    config: LlamaConfig
    drafter: Any
    batch: int
    context: int
    itemsize: int

    @cached_property
    def base(self) -> Llama:
        return Llama(self.config, base_dtype(self.itemsize))

    def step(self, tree: CandidateTree) -> Parts:
        """Operators of one step, by the verb they belong to."""
        batch, nodes = self.batch, self.drafter.spec.verified_nodes(tree)
        slots = self.context + nodes
        return {
            "propose": passes.propose(self.drafter, self.base, tree, batch, slots),
            "verify": passes.forward(self.base, batch, nodes, slots),
            "accept_commit": [ranking("argmax", batch * nodes, self.config.vocab_size)],
            "observe": passes.observe(self.drafter, self.base, tree, batch, slots),
        }

    def autoregressive_step(self) -> list[Operator]:
        """One token per row, without a draft."""
        argmax = ranking("argmax", self.batch, self.config.vocab_size)
        return [*passes.forward(self.base, self.batch, 1, self.context + 1), argmax]

    def prefill(self) -> list[Operator]:
        """A prompt of ``context`` tokens per row through the base and the drafter."""
        base = passes.forward(self.base, self.batch, self.context, 0, 1)
        return [*base, *passes.begin(self.drafter, self.base, self.batch, self.context, self.context)]


def base_dtype(itemsize: int):
    """Return the dtype of a base whose numbers have so many bytes."""
    return jnp.dtype({2: jnp.bfloat16, 4: jnp.float32}[itemsize])


@dataclass(frozen=True)
class Prediction:
    """One (batch, context, tree) cell. Times are milliseconds per step of the whole batch, as in `BenchmarkRow`.

    break_even: the cost ratio step / autoregressive_step, which is the tokens_per_step where the tree starts to pay.
    flops, bytes: of a step. draft_bytes: of the draft's parameters, all of them. memory_bound: the share of the step's
    time in operators that wait for memory. speedup: tokens_per_step / break_even, None without tokens_per_step.
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
    drafter,
    trees: dict[str, CandidateTree],
    batches: Sequence[int],
    contexts: Sequence[int],
    itemsize: int,
    tokens_per_step: Sequence[float | None] = (),
) -> Iterator[Prediction]:
    """Every cell, contexts outermost, trees innermost. tokens_per_step: of each tree, or none at all."""
    draft_bytes = passes.draft_parameters(drafter, Llama(config, base_dtype(itemsize))) * itemsize
    for tree in trees.values():
        tree.check(drafter.spec.depth, config.vocab_size)
    for context in contexts:
        for batch in batches:
            work = Workload(config, drafter, batch, context, itemsize)
            autoregressive = milliseconds(device, work.autoregressive_step())
            prefill = milliseconds(device, work.prefill())
            for (name, tree), tau in zip(trees.items(), tokens_per_step or [None] * len(trees), strict=True):
                parts = work.step(tree)
                times = {verb: milliseconds(device, operators) for verb, operators in parts.items()}
                operators = [operator for part in parts.values() for operator in part]
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
    """One after the other."""
    return 1e3 * sum(device.seconds(operator) for operator in operators)
