"""Time a decode step and its phases on this device, with and without a draft.

The baseline is autoregressive decoding by this package, timed in the same rounds after warm-up (docs/design.md
section 7, "Honest speed").
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.bench.contests.contest import AUTOREGRESSIVE, contest
from hydrajax.bench.device_memory import asleep, copy_bandwidth, nbytes, peak_memory
from hydrajax.bench.roofline.passes import state_bytes
from hydrajax.bench.rounds import medians
from hydrajax.bench.timing import StepTimer
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.models.base_model import BaseModel
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, static
from hydrajax.trees.static_tree import TreeTopology

PHASES = ("step", "propose", "verify", "accept_commit", "observe")
COST_ROUNDS = 5  # of `draft_cost`
TIMED_STEPS = 8  # per timed call; few, so that the context hardly grows


@dataclass(frozen=True)
class BenchmarkRow:
    """One (batch, tree) cell. Times are median milliseconds per step of the whole batch, from interleaved rounds.

    autoregressive_step and step are whole steps; propose, verify, accept_commit and observe are the phases of ``step``.

    Attributes:
        draft_overhead: (propose + accept_commit + observe) / verify.
        break_even: Step / autoregressive_step, the tokens_per_step at which the tree is as fast as autoregressive
            decoding.
        prefill: Milliseconds. tokens_per_step, the rates (of all sequences together) and speedup come from generating
            for prompts; None without.
        autoregressive_bandwidth_fraction: Of the measured copy bandwidth; None on a CPU, whose caches distort it.
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


def first_nodes(tree: CandidateTree, sizes: Sequence[int]) -> dict[str, TreeTopology]:
    """Return subtrees of ``tree`` with the given node counts, nodes of the lowest total rank first."""
    tree = static(tree, "a sweep over tree sizes")
    order = sorted(tree.choices, key=lambda path: (sum(path) + len(path), len(path), path))
    trees = {}
    for size in sizes:
        if not 1 <= size <= tree.size:
            raise HydrajaxError(f"tree sizes: got {size}, expected 1 to {tree.size}")
        trees[f"first-{size}"] = TreeTopology.from_choices(order[: size - 1])
    return trees


def autoregressive_bytes(model: BaseModel, params: Any, batch: int, slots: int, nodes: int = 1) -> int:
    """Return the bytes that an autoregressive step must move: all weights except embedding tables, the keys and
    values, and the states of recurrent layers in and out.

    Of experts, those that the tokens are expected to choose (`woken`): one of each sequence, or ``nodes``.
    """
    config = model.config
    weights = nbytes(params) - asleep(params, config, batch * nodes)
    if not config.tied_lm_head:
        weights -= nbytes(params["embedding"])
    if config.per_layer_width:
        weights -= nbytes(params["per_layer"]["embedding"])
    of_slot = sum(heads * features for heads, features in config.kv_shapes) * (1 if config.latent else 2)
    return weights + batch * slots * of_slot * jnp.dtype(model.dtype).itemsize + 2 * state_bytes(model, batch)


def room_for(depths: Iterable[int]) -> int:
    """Return the most tokens per sequence that a timed call can emit with trees of these depths."""
    return TIMED_STEPS * (max(depths, default=0) + 1)


def step_timer(executor: Executor, batch: int, context: int, room: int | None = None) -> StepTimer:
    """Return a timer of the executor's step and its phases near the end of ``context`` slots."""
    room = room or room_for([executor.program.longest_path])
    endless = executor.with_program(max_new_tokens=room, eos_ids=(), logprobs=None)
    return StepTimer(endless, batch, context - room, TIMED_STEPS)


def run_benchmark(
    executors: Mapping[str, Executor],
    batches: Sequence[int],
    context: int,
    *,
    prompts: Sequence[np.ndarray] = (),
    repeats: int = 5,
) -> Iterator[BenchmarkRow]:
    """Measure every executor at every batch size, and yield each row when it is complete.

    Args:
        executors: by tree name, all of one base.
        context: cache slots per sequence, without those of the tree's nodes; steps are timed near its end.
        prompts: token ids to generate for; without prompts the rates are None.

    Raises:
        HydrajaxError: ``context`` does not fit the model or the timed steps.
    """
    first = next(iter(executors.values()))
    config, plain = first.model.config, first.autoregressive()
    on_cpu = jax.devices()[0].platform == "cpu"
    bandwidth = None if on_cpu else copy_bandwidth()
    if context > config.max_positions:
        raise HydrajaxError(f"context: got {context}, expected at most the model's {config.max_positions}")
    room = room_for(executor.program.longest_path for executor in executors.values())
    if context <= room:
        raise HydrajaxError(f"context: got {context}, expected more than {room} for these trees")
    for batch in batches:
        autoregressive = step_timer(plain, batch, context, room).step()
        bytes_per_step = autoregressive_bytes(first.model, first.params.base, batch, context + 1)
        for name, executor in executors.items():
            timer = step_timer(executor, batch, context, room)
            timed = {name: getattr(timer, name)() for name in PHASES} | {"autoregressive_step": autoregressive}
            found = medians(timed, repeats)
            rates = generation_rates(plain, executor, prompts, batch, repeats) if prompts else {}
            yield BenchmarkRow(
                batch=batch,
                context=context,
                tree=name,
                nodes=executor.program.verified_nodes,
                depth=executor.program.longest_path,
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
    """Return the fields of `BenchmarkRow` that need prompts, from a contest with the baseline."""
    entrants = {AUTOREGRESSIVE: plain, "drafted": executor}
    without, found = contest(entrants, prompts, batch_size=batch, repeats=repeats)
    return {
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_second": found.tokens_per_second,
        "autoregressive_tokens_per_second": without.tokens_per_second,
        "speedup": found.speedup,
        "outputs_equal": found.equal,
    }


def draft_cost(executor: Executor, batch_size: int, context: int) -> float:
    """Return c: the time to propose one token, in autoregressive steps, timed in the same rounds.

    Both run after ``context`` tokens, or as near to it as the timed steps and the model allow.
    """
    one = executor.with_program(tree=presets.chain(1))
    room = room_for([one.program.longest_path])
    context = max(room + 1, min(context, executor.model.config.max_positions))
    timed = {"draft": step_timer(one, batch_size, context, room).propose()}
    timed["base"] = step_timer(executor.autoregressive(), batch_size, context, room).step()
    found = medians(timed, COST_ROUNDS)
    return found["draft"] / found["base"]
