"""Interleaved benchmarks: in every round all executors decode the same prompts.

Load on the machine affects all executors of a round alike, so confidence intervals resample whole rounds. The second
stage of tree search (hydra section 4) compares trees in this way.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from hydrajax.bench.rounds import in_rounds, seconds
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.processes import fetch

AUTOREGRESSIVE = "autoregressive"  # the name of the baseline
RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """The measurements of one executor in a contest.

    Attributes:
        tokens_per_step: Mean over all steps (τ).
        tokens_per_second: tokens_per_step * the median over the rounds of the steps per second, of all sequences
            together and prefill included; low and high are its 95% bootstrap interval.
        speedup: This rate / the baseline's; speedup_low and speedup_high are its 95% bootstrap interval.
        chance_best: Share of the bootstrap samples in which no executor but the baseline was faster. Intervals and
            chance_best are None after a single round.
        equal: Whether the tokens are the baseline's; None for rules that do not guarantee that.
    """

    name: str
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    low: float | None
    high: float | None
    chance_best: float | None
    speedup: float
    equal: bool | None
    speedup_low: float | None = None
    speedup_high: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds per decode step, prefill included."""
        return self.tokens_per_step / self.tokens_per_second


def contest(
    executors: Mapping[str, Executor],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    divided: bool = False,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate for the prompts with every executor in ``repeats`` interleaved rounds.

    Args:
        executors: by name. The first is the baseline.
        prompts: token ids, int32 ``[P]`` each.
        divided: divide the batches among the rounds, so that more texts are decoded in the same time; otherwise every
            round decodes all batches. There must be a batch for every round.
        seed: seeds the order within rounds, and sampling.
    """
    filled = list(batches(prompts, batch_size))
    key = jax.random.key(seed)
    outputs = {}
    for number, (name, executor) in enumerate(executors.items(), start=1):
        on_status(f"compiling {name}, {number} of {len(executors)}")
        outputs[name] = [fetch(executor.decode(prompt, lengths, key)) for prompt, lengths, _ in filled]

    def step_seconds(name: str, number: int) -> float:
        own = slice(number, None, repeats) if divided else slice(None)
        spent = sum(seconds(executors[name].decode, prompt, lengths, key) for prompt, lengths, _ in filled[own])
        return spent / sum(int(out.steps.sum()) for out in outputs[name][own])

    random = np.random.default_rng(seed)
    timed = in_rounds(
        {name: partial(step_seconds, name) for name in executors},
        repeats,
        order=lambda number, count: random.permutation(count),
        on_round=on_status,
    )
    tokens_per_step = {
        name: sum(int(out.lengths.sum()) for out in outs) / sum(int(out.steps.sum()) for out in outs)
        for name, outs in outputs.items()
    }
    rates = {name: tokens_per_step[name] / np.array(timed[name]) for name in outputs}
    picked = random.integers(0, repeats, (RESAMPLES, repeats))  # whole rounds: all executors had the same load
    medians = {name: np.median(rates[name][picked], axis=1) for name in outputs}
    baseline, *others = outputs
    best = np.max([medians[name] for name in others or [baseline]], axis=0)
    plain = statistics.median(rates[baseline])

    def chances(name: str) -> dict[str, float | None]:
        if repeats == 1:
            return {"low": None, "high": None, "chance_best": None}
        low, high = np.percentile(medians[name], (2.5, 97.5)).tolist()
        slowest, fastest = np.percentile(medians[name] / medians[baseline], (2.5, 97.5)).tolist()
        return {
            "low": low, "high": high, "chance_best": float(np.mean(medians[name] >= best)),
            "speedup_low": slowest, "speedup_high": fastest,
        }  # fmt: skip

    return [
        Measured(
            name=name,
            nodes=executor.program.verified_nodes,
            tokens_per_step=tokens_per_step[name],
            tokens_per_second=statistics.median(rates[name]),
            **chances(name),
            speedup=statistics.median(rates[name]) / plain,
            equal=same_tokens(outputs[name], outputs[baseline]) if executor.program.rule.same_output else None,
        )
        for name, executor in executors.items()
    ]


def same_tokens(ours: Sequence, theirs: Sequence) -> bool:
    """Return whether two lists of outputs have equal tokens up to their lengths."""
    return all(
        np.array_equal(a.lengths, b.lengths)
        and all(np.array_equal(x[:n], y[:n]) for x, y, n in zip(a.tokens, b.tokens, a.lengths, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )
