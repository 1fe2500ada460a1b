"""Predict step times and speed-ups of tree decoding on a device (medusa appendix G).

An operator takes the longer of its operations at the device's FLOP/s and its traffic at the device's bandwidth; a step
takes the sum of its operators. Kernel launches, the sort of a top-k and the commit are left out: predictions are lower
bounds with published peaks and estimates with measured rates.

On a mesh these are the operators of one device (`hydrajax.bench.roofline.traced`). A collective takes an assumed
latency and the bytes that a device sends in a ring, at the bandwidth of its links; nothing is computed meanwhile. Each
product is multiplied in 16 bits, also with int8 weights, which count as bytes only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from hydrajax.bench.roofline import passes
from hydrajax.bench.roofline.devices import Device
from hydrajax.bench.roofline.division import ONE_DEVICE, Division
from hydrajax.bench.roofline.operators import Operator, elementwise, joined_ranking, ranking
from hydrajax.drafters.drafter import Drafter
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees.dynamic import CandidateTree

Phases = dict[str, Sequence[Operator]]


@dataclass(frozen=True)
class Workload:
    """A base and a drafter that decode ``batch`` sequences of ``context`` tokens.

    As in the decode step, all slots of the cache are read (``context`` and the tree's nodes), and the tree's own keys
    in addition.

    Attributes:
        context: Tokens in each sequence's cache.
        itemsize: Bytes per number, 2 or 4.
        quantize: "int8" for a base with such weights; draft heads and caches are not quantised.
        division: The mesh; operators are those of one device.
    """

    config: LlamaConfig
    drafter: Drafter
    batch: int
    context: int
    itemsize: int
    quantize: str | None = None
    division: Division = ONE_DEVICE

    @cached_property
    def base(self) -> Llama:
        return Llama(self.config, base_dtype(self.itemsize), self.quantize)

    def step(self, tree: CandidateTree) -> Phases:
        """Return the operators of one step by phase."""
        batch, nodes = self.batch, self.drafter.spec.verified_nodes(tree)
        slots = self.context + nodes
        return {
            "propose": passes.propose(self.drafter, self.base, tree, batch, slots, self.division),
            "verify": passes.forward(self.base, batch, nodes, slots, division=self.division),
            "accept_commit": [*self._argmax(nodes), *self._states()],
            "observe": passes.observe(self.drafter, self.base, tree, batch, slots, self.division),
        }

    def autoregressive_step(self) -> list[Operator]:
        """Return the operators of a step without a draft."""
        one_token = passes.forward(self.base, self.batch, 1, self.context + 1, division=self.division)
        return [*one_token, *self._argmax(1), *self._states()]

    def prefill(self) -> list[Operator]:
        """Return the operators of a prefill of ``context`` tokens per sequence, in base and drafter."""
        base = passes.forward(self.base, self.batch, self.context, 0, 1, self.division)
        drafter = passes.begin(self.drafter, self.base, self.batch, self.context, self.context, self.division)
        return [*base, *drafter]

    def memory(self, tree: CandidateTree) -> dict[str, int]:
        """Return bytes of a device: ``base_memory`` and ``draft_memory`` of weights, ``cache_memory`` of all slots.

        Activations, temporaries and what the runtime reserves come in addition.
        """
        slots = self.context + self.drafter.spec.verified_nodes(tree)
        return {
            "base_memory": passes.weight_bytes(self.base, self.division),
            "draft_memory": passes.draft_bytes(self.drafter, self.base, self.division),
            "cache_memory": passes.cache_bytes(self.drafter, self.base, self.batch, slots, self.division),
        }

    def _states(self) -> list[Operator]:
        """Return the commit of recurrent layers, which reads and writes their states; verification has read them."""
        moved = 2 * passes.state_bytes(self.base, self.division.rows(self.batch)) / self.division.model
        return [elementwise("states", moved)] if moved else []

    def _argmax(self, tokens: int) -> list[Operator]:
        rows, vocab_size, devices = self.division.rows(self.batch) * tokens, self.config.vocab_size, self.division.model
        if devices == 1 or vocab_size % devices:
            return [ranking("argmax", rows, vocab_size)]
        return [ranking("argmax", rows, vocab_size / devices), joined_ranking("argmax", rows, self.division)]


def base_dtype(itemsize: int):
    """Return the dtype with this many bytes per number."""
    return jnp.dtype({2: jnp.bfloat16, 4: jnp.float32}[itemsize])


@dataclass(frozen=True)
class Prediction:
    """One (batch, context, tree) cell. Times are milliseconds per step of the whole batch, as in `BenchmarkRow`.

    Attributes:
        break_even: Step / autoregressive_step, the tokens_per_step above which the tree is faster.
        flops, bytes: Of a step, on one device.
        memory_bound: Share of the step's time in memory-bound operators.
        collectives, collective_bytes, collective_time: Exchanges between devices in a step, bytes that a device sends,
            and their milliseconds; the last also of a step without a draft, in autoregressive_collective_time.
        base_memory, draft_memory, cache_memory: Bytes on a device (`Workload.memory`).
        fits: Their sum is at most the device's memory; None if that is unknown.
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
    collectives: int
    collective_bytes: float
    collective_time: float
    autoregressive_collective_time: float
    base_memory: int
    draft_memory: int
    cache_memory: int
    fits: bool | None
    tokens_per_step: float | None = None
    speedup: float | None = None

    @property
    def memory(self) -> int:
        """Bytes of weights and caches on a device."""
        return self.base_memory + self.draft_memory + self.cache_memory


def predict(
    device: Device,
    config: LlamaConfig,
    drafter: Drafter,
    trees: dict[str, CandidateTree],
    batches: Sequence[int],
    contexts: Sequence[int],
    itemsize: int,
    tokens_per_step: Sequence[float | None] = (),
    quantize: str | None = None,
    division: Division = ONE_DEVICE,
) -> Iterator[Prediction]:
    """Yield a prediction for every cell, contexts outermost, trees innermost.

    ``itemsize``, ``quantize`` and ``division`` are as in `Workload`; ``tokens_per_step`` has a value per tree, or none.
    """
    draft_bytes = passes.draft_parameters(drafter, Llama(config, base_dtype(itemsize))) * itemsize
    for tree in trees.values():
        tree.check(drafter.spec.depth, config.vocab_size)
    for context in contexts:
        for batch in batches:
            work = Workload(config, drafter, batch, context, itemsize, quantize, division)
            one_token = work.autoregressive_step()
            autoregressive = milliseconds(device, one_token)
            prefill = milliseconds(device, work.prefill())
            for (name, tree), tau in zip(trees.items(), tokens_per_step or [None] * len(trees), strict=True):
                phases = work.step(tree)
                times = {phase: milliseconds(device, operators) for phase, operators in phases.items()}
                operators = [operator for phase in phases.values() for operator in phase]
                step = sum(times.values())
                waiting = milliseconds(device, filter(device.memory_bound, operators))
                exchanges, computed = _exchanges(operators), [op for op in operators if op.kind != "collective"]
                memory = work.memory(tree)
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
                    flops=sum(operator.count * operator.flops for operator in computed),
                    bytes=sum(operator.count * operator.bytes for operator in computed),
                    draft_bytes=draft_bytes,
                    memory_bound=waiting / step,
                    collectives=sum(operator.count for operator in exchanges),
                    collective_bytes=sum(operator.count * operator.bytes for operator in exchanges),
                    collective_time=milliseconds(device, exchanges),
                    autoregressive_collective_time=milliseconds(device, _exchanges(one_token)),
                    **memory,
                    fits=None if device.memory is None else sum(memory.values()) <= device.memory,
                    tokens_per_step=tau,
                    speedup=None if tau is None else tau * autoregressive / step,
                )


def _exchanges(operators: Iterable[Operator]) -> list[Operator]:
    return [operator for operator in operators if operator.kind == "collective"]


def milliseconds(device: Device, operators: Iterable[Operator]) -> float:
    """Return the time of operators that run one after the other."""
    return 1e3 * sum(device.seconds(operator) for operator in operators)
