"""What a decode step costs on this device: phases, tokens per second both ways, memory.

Every figure is measured against the autoregressive decoder of this package, side by side in one run after warm-up
(DESIGN section 7, "Honest speed").
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy
from hydrajax.decoding.decode import make_autoregressive_fn, make_decode_fn, right_padded
from hydrajax.decoding.step import Engine, Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.measure.timing import StepTimer, median_ms
from hydrajax.models.llama import Llama
from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

TIMED_STEPS = 8  # steps per timed call; short, so that the context hardly grows while being timed


@dataclass(frozen=True)
class BenchmarkRow:
    """One (batch, tree) cell. Times are median milliseconds per step of the whole batch; rates count all rows.

    autoregressive_step and step are whole steps; propose, verify, accept_commit and observe the parts of ``step``.
    break_even: the tokens_per_step at which the tree is as fast as autoregressive decoding, step / autoregressive_step.
    tokens_per_step, *_tokens_per_second and speedup come from generating for the prompts, when there are any: on
    random weights they would say nothing. bytes_per_step and bandwidth_fraction (of the measured copy bandwidth)
    belong to the autoregressive step and are None on a CPU, where caches blur them.
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


def first_nodes(tree: TreeTopology, sizes: Sequence[int]) -> dict[str, TreeTopology]:
    """Subtrees of ``tree`` with the given node counts, the lowest total ranks first: a sweep over tree sizes."""
    order = sorted(tree.choices, key=lambda path: (sum(path) + len(path), len(path), path))
    trees = {}
    for size in sizes:
        if not 1 <= size <= tree.size:
            raise HydrajaxError(f"tree sizes: must be from 1 to {tree.size}, found {size}")
        trees[f"first-{size}"] = TreeTopology.from_choices(order[: size - 1])
    return trees


def copy_bandwidth(megabytes: int = 1024) -> float:
    """Measured device copy bandwidth in bytes per second, counting bytes read and written."""
    source = jnp.arange(megabytes * 2**18, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)  # a plain copy could be elided
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / (median_ms(lambda: copy(source), 10) / 1e3)


def autoregressive_bytes(model: Llama, params: Any, batch: int, slots: int) -> int:
    """Bytes one autoregressive step must read: every weight but the embedding table (a row each), and the cache."""
    config = model.config
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tied_lm_head:
        weights -= params["embedding"].nbytes
    cache = 2 * config.n_layers * batch * config.n_kv_heads * slots * config.head_dim * jnp.dtype(model.dtype).itemsize
    return weights + cache


def peak_memory() -> int:
    """Peak bytes in use on the accelerator, or of this process on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_benchmark(
    model: Llama,
    drafter,
    params: Params,
    trees: dict[str, TreeTopology],
    batches: Sequence[int],
    context: int,
    *,
    rule: AcceptanceRule | None = None,
    prompts: Sequence[np.ndarray] = (),
    max_new_tokens: int = 128,
    repeats: int = 5,
) -> Iterator[BenchmarkRow]:
    """Measure every batch size and tree, yielding each row when it is done.

    context: cache slots per row, tree room excluded; steps are timed near its end. rule: `Greedy` by
    default. prompts: token ids to generate for, both ways; with none, rates are left out.
    """
    config, rule = model.config, rule or Greedy()
    on_cpu = jax.devices()[0].platform == "cpu"
    bandwidth = None if on_cpu else copy_bandwidth()
    for tree in trees.values():
        tree.check(drafter.depth, config.vocab_size)
    if context > config.max_positions:
        raise HydrajaxError(f"--context: must be at most the model's {config.max_positions}, found {context}")
    room = TIMED_STEPS * (max((tree.depth for tree in trees.values()), default=0) + 1)
    if context <= room:
        raise HydrajaxError(f"--context: must be more than {room} for these trees, found {context}")
    for batch in batches:

        def timer(drafter, draft_params, tree, batch=batch) -> StepTimer:
            engine = Engine(model, drafter, tree, rule, room)
            return StepTimer(engine, Params(params.base, draft_params), batch, context - room, TIMED_STEPS, repeats)

        autoregressive_step = timer(NoDrafter(), {}, presets.root()).step()
        bytes_per_step = autoregressive_bytes(model, params.base, batch, context + 1)
        for name, tree in trees.items():
            timed = timer(drafter, params.draft, tree)
            step, verify, propose = timed.step(), timed.verify(), timed.propose()
            accept_commit, observe = timed.accept_commit(), timed.observe()
            rates = generation_rates(model, drafter, params, tree, rule, prompts, batch, max_new_tokens, repeats)
            yield BenchmarkRow(
                batch=batch,
                context=context,
                tree=name,
                nodes=tree.size,
                depth=tree.depth,
                autoregressive_step=autoregressive_step,
                step=step,
                propose=propose,
                verify=verify,
                accept_commit=accept_commit,
                observe=observe,
                draft_overhead=(propose + accept_commit + observe) / verify,
                break_even=step / autoregressive_step,
                prefill=timed.prefill(),
                compile_seconds=timed.compile_seconds,
                autoregressive_bytes_per_step=bytes_per_step,
                autoregressive_bandwidth_fraction=bandwidth
                and bytes_per_step / bandwidth / (autoregressive_step / 1e3),
                peak_memory_bytes=peak_memory(),
                **rates,
            )


def time_round(ways: dict[str, tuple[Callable, Params]], batches, seconds: dict[str, list[float]], *rng) -> None:
    """Decode every batch in each way, a decode function and its parameters, and add what each way took."""
    for name, (decode, params) in ways.items():
        began = time.perf_counter()
        for prompt, lengths in batches:
            jax.block_until_ready(decode(params, prompt, lengths, *rng))
        seconds[name].append(time.perf_counter() - began)


def generation_rates(
    model: Llama,
    drafter,
    params: Params,
    tree: TreeTopology,
    rule: AcceptanceRule,
    prompts,
    batch: int,
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Tokens per second both ways on real prompts, interleaved; the fields of `BenchmarkRow` that need prompts."""
    if not prompts:
        return {}
    rows = [prompts[i % len(prompts)] for i in range(max(batch, len(prompts) // batch * batch))]
    ways: dict[str, tuple[Callable, Params]] = {
        "tree": (make_decode_fn(model, drafter, tree, rule, max_new_tokens=max_new_tokens), params),
        "plain": (make_autoregressive_fn(model, rule, max_new_tokens=max_new_tokens), Params(params.base, {})),
    }
    batches = []
    for start in range(0, len(rows), batch):
        group = rows[start : start + batch]
        batches.append(right_padded(group, max(map(len, rows))))  # one width: one compilation
    outputs = {way: [jax.device_get(fn(p, *b)) for b in batches] for way, (fn, p) in ways.items()}  # warm-up
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        time_round(ways, batches, seconds)
    made = {way: sum(int(out.lengths.sum()) for out in outs) for way, outs in outputs.items()}
    rate = {way: made[way] / statistics.median(seconds[way]) for way in ways}
    steps = sum(int(out.steps.sum()) for out in outputs["tree"])
    return {
        "tokens_per_step": made["tree"] / steps,
        "tokens_per_second": rate["tree"],
        "autoregressive_tokens_per_second": rate["plain"],
        "speedup": rate["tree"] / rate["plain"],
        # The other rules give another text than without a tree: of another distribution, or another draw from it.
        "outputs_equal": all(
            np.array_equal(a.tokens, b.tokens) for a, b in zip(outputs["tree"], outputs["plain"], strict=True)
        )
        if isinstance(rule, (Greedy, ExactSampling))
        else None,
    }
