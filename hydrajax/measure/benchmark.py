"""What a decode step costs on this device: its phases, its memory, and tokens per second with and without a draft.

Every figure is measured against the autoregressive decoder of this package, side by side in one run after warm-up
(docs/design.md section 7, "Honest speed").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.autotune.contest import AUTOREGRESSIVE, contest
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.measure.device_memory import copy_bandwidth, peak_memory
from hydrajax.measure.timing import StepTimer, interleaved_ms
from hydrajax.models.base_model import BaseModel
from hydrajax.trees.dynamic import CandidateTree, static
from hydrajax.trees.static_tree import TreeTopology

PHASES = ("step", "propose", "verify", "accept_commit", "observe")
TIMED_STEPS = 8  # steps per timed call; short, so that the context hardly grows while being timed


@dataclass(frozen=True)
class BenchmarkRow:
    """One (batch, tree) cell. Times are median milliseconds per step of the whole batch; rates count all rows.

    All are timed in interleaved rounds. autoregressive_step and step are whole steps; propose, verify, accept_commit
    and observe are the parts of ``step``.
    break_even: the tokens_per_step at which the tree is as fast as autoregressive decoding, step / autoregressive_step.
    tokens_per_step, *_tokens_per_second and speedup come from generating for the prompts, if there are any: on random
    weights they would say nothing. bytes_per_step and bandwidth_fraction (of the measured copy bandwidth) belong to the
    autoregressive step; the fraction is None on a CPU, where caches blur it.
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
    draft_overhead: float
    break_even: float
    prefill: float
    compile_seconds: float
    autoregressive_bytes_per_step: int
    autoregressive_bandwidth_fraction: float | None
    peak_memory_bytes: int
    tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    autoregressive_tokens_per_second: float | None = None
    speedup: float | None = None
    outputs_equal: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_nodes(tree: CandidateTree, sizes: Sequence[int]) -> dict[str, TreeTopology]:
    """Subtrees of ``tree`` with the given node counts, the lowest total ranks first: a sweep over tree sizes."""
    tree = static(tree, "a sweep over tree sizes")
    order = sorted(tree.choices, key=lambda path: (sum(path) + len(path), len(path), path))
    trees = {}
    for size in sizes:
        if not 1 <= size <= tree.size:
            raise HydrajaxError(f"tree sizes: must be from 1 to {tree.size}, found {size}")
        trees[f"first-{size}"] = TreeTopology.from_choices(order[: size - 1])
    return trees


def autoregressive_bytes(model: BaseModel, params: Any, batch: int, slots: int) -> int:
    """Bytes one autoregressive step must read: every weight but the embedding table (a row each), and the cache."""
    config = model.config
    weights = nbytes(params)
    if not config.tied_lm_head:
        weights -= nbytes(params["embedding"])
    cache = 2 * config.n_layers * batch * config.n_kv_heads * slots * config.head_dim * jnp.dtype(model.dtype).itemsize
    return weights + cache


def nbytes(tree: Any) -> int:
    """Bytes of all arrays in a pytree, or of arrays of these shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def room_for(depths: Iterable[int]) -> int:
    """The most tokens per row that a timed call can emit with trees of these depths."""
    return TIMED_STEPS * (max(depths, default=0) + 1)


def step_timer(executor: Executor, batch: int, context: int, room: int | None = None) -> StepTimer:
    """Return a timer of the executor's step and its phases, at the end of ``context`` slots.

    room: how many of the slots are for new tokens.
    """
    room = room or room_for([executor.spec.longest_path])
    endless = executor.with_spec(max_new_tokens=room, eos_ids=(), logprobs=None)
    return StepTimer(endless, batch, context - room, TIMED_STEPS)


def run_benchmark(
    executors: Mapping[str, Executor],
    batches: Sequence[int],
    context: int,
    *,
    prompts: Sequence[np.ndarray] = (),
    repeats: int = 5,
) -> Iterator[BenchmarkRow]:
    """Measure every executor at every batch size, and yield each row when it is done.

    Args:
        executors: by the names of their trees, all of one base.
        batches: batch sizes.
        context: cache slots per row, without those for a tree's nodes; steps are timed near its end.
        prompts: token ids to generate for with and without a draft; without prompts the rates are left out.
        repeats: timed rounds, of which the median is taken.

    Raises:
        HydrajaxError: for a context that does not fit the model or the timed steps.
    """
    first = next(iter(executors.values()))
    config, plain = first.model.config, first.autoregressive()
    on_cpu = jax.devices()[0].platform == "cpu"
    bandwidth = None if on_cpu else copy_bandwidth()
    if context > config.max_positions:
        raise HydrajaxError(f"context: must be at most the model's {config.max_positions}, found {context}")
    room = room_for(executor.spec.longest_path for executor in executors.values())
    if context <= room:
        raise HydrajaxError(f"context: must be more than {room} for these trees, found {context}")
    for batch in batches:
        autoregressive = step_timer(plain, batch, context, room).step()
        bytes_per_step = autoregressive_bytes(first.model, first.params.base, batch, context + 1)
        for name, executor in executors.items():
            timer = step_timer(executor, batch, context, room)
            timed = {name: getattr(timer, name)() for name in PHASES} | {"autoregressive_step": autoregressive}
            found = interleaved_ms(timed, repeats)
            rates = generation_rates(plain, executor, prompts, batch, repeats) if prompts else {}
            yield BenchmarkRow(
                batch=batch,
                context=context,
                tree=name,
                nodes=executor.spec.verified_nodes,
                depth=executor.spec.longest_path,
                **found,
                draft_overhead=(found["propose"] + found["accept_commit"] + found["observe"]) / found["verify"],
                break_even=found["step"] / found["autoregressive_step"],
                prefill=timer.prefill(repeats),
                compile_seconds=timer.compile_seconds,
                autoregressive_bytes_per_step=bytes_per_step,
                autoregressive_bandwidth_fraction=bandwidth
                and bytes_per_step / bandwidth / (found["autoregressive_step"] / 1e3),
                peak_memory_bytes=peak_memory(),
                **rates,
            )


def generation_rates(plain: Executor, executor: Executor, prompts, batch: int, repeats: int) -> dict[str, Any]:
    """Return the fields of `BenchmarkRow` that need prompts, from a contest of two."""
    entrants = {AUTOREGRESSIVE: plain, "drafted": executor}
    without, found = contest(entrants, prompts, batch_size=batch, repeats=repeats)
    return {
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_second": found.tokens_per_second,
        "autoregressive_tokens_per_second": without.tokens_per_second,
        "speedup": found.speedup,
        "outputs_equal": found.equal,
    }
