"""The split executor, timed: against the same pair in turn, and part by part."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hydrajax.autotune.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.state import Params
from hydrajax.ssd.draft_side import MISS
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.record import Record
from hydrajax.ssd.simulator import Times
from hydrajax.ssd.split_executor import PARTS, SplitExecutor

IN_TURN, ONE_PROGRAM = "in turn", "one program"


@dataclasses.dataclass(frozen=True)
class SplitRow:
    """The figures of an executor, with those of its preparations.

    fan_out: the counts of `FanOut`, None where base and draft are not split. hit_rate, ready_rate: of `Record`, over
    all prompts; None where nothing is prepared.
    """

    measured: Measured
    fan_out: tuple[int, ...] | None = None
    hit_rate: float | None = None
    ready_rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        own = {"fan_out": self.fan_out, "hit_rate": self.hit_rate, "ready_rate": self.ready_rate}
        return self.measured.as_dict() | own


def split_contest(
    executor: SplitExecutor,
    fan_outs: Sequence[int | FanOut],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[SplitRow]:
    """Time decoding without a draft, with the pair in one program on the base's devices, in turn, and ahead.

    The first row is the baseline, the last ones prepare for each of ``fan_outs``.
    """
    draft = jax.device_put(executor.params.draft, executor.placement.homes()[0])
    together = FusedExecutor(executor.model, Params(executor.params.base, draft), executor.spec)
    split = {IN_TURN: executor.with_fan_out(0)}
    for fan_out in fan_outs:
        total = fan_out.total if isinstance(fan_out, FanOut) else fan_out
        split[f"ahead, {total} outcomes"] = executor.with_fan_out(fan_out)
    others = {AUTOREGRESSIVE: executor.autoregressive(), ONE_PROGRAM: together}
    found = contest(others | split, prompts, batch_size=batch_size, repeats=repeats, on_status=on_status)
    rows = [SplitRow(each) for each in found[:2]]
    for each, measured in zip(split.values(), found[2:], strict=True):
        record = joined(recorded(each, prompts, batch_size))
        rates = (record.hit_rate, record.ready_rate) if each.fan_out.total else (None, None)
        rows.append(SplitRow(measured, each.fan_out.counts, *rates))
    return rows


def recorded(executor: SplitExecutor, prompts: Sequence[np.ndarray], batch_size: int, seed: int = 0) -> list[Record]:
    """Return the record of each batch of prompts."""
    key = jax.random.key(seed)
    found = []
    for prompt, lengths, n_real in batches(prompts, batch_size):
        record = executor.recorded(prompt, lengths, key)[1]
        found.append(Record(record.numbers[:n_real], record.accept_lengths[:n_real], record.fan_out))
    return found


def joined(records: Sequence[Record]) -> Record:
    """One after the other, as if a batch had gone on with the next prompts."""
    rows = max(len(record.numbers) for record in records)

    def beside(name: str, fill: int) -> np.ndarray:
        parts = [getattr(record, name) for record in records]
        missing = [((0, rows - len(part)), (0, 0)) for part in parts]
        return np.concatenate(
            [np.pad(part, pad, constant_values=fill) for part, pad in zip(parts, missing, strict=True)], axis=1
        )

    return Record(beside("numbers", MISS - 1), beside("accept_lengths", -1), records[0].fan_out)


def part_seconds(executor: SplitExecutor, prompt: np.ndarray, lengths: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Median seconds of each of `PARTS` when they are run in turn and waited for; of "answer" as "hit" and "miss".

    One batch of prompts, of which the first round is left out; a median over nothing is NaN. What is handed over and
    told took the way from one device's memory to another's, and the host's part in it.
    """
    key = jax.random.key(seed)
    executor.decode(prompt, lengths, key)  # compiles
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    began = time.perf_counter()

    def watch(name: str, given: Any) -> None:
        nonlocal began
        jax.block_until_ready(given)
        now = time.perf_counter()
        times[name].append(now - began)
        began = now

    _, record = executor.recorded(prompt, lengths, key, watch=watch)
    # Rows that have finished count as hits; after the last round that somebody took there is nothing to answer.
    rounds = int((record.numbers > MISS - 1).any(axis=0).sum())
    missed = (record.numbers == MISS).any(axis=0)[:rounds]
    answers = np.array(times.pop("answer")[:rounds])
    found = {name: _median(some[1:rounds]) for name, some in times.items()}
    later = np.arange(rounds) > 0
    return found | {"hit": _median(answers[later & ~missed]), "miss": _median(answers[later & missed])}


def round_seconds(
    executor: SplitExecutor, prompt: np.ndarray, lengths: np.ndarray, repeats: int = 3, seed: int = 0
) -> float:
    """Median seconds of a round as it is run, the first one and the prompts left out. One batch of prompts."""
    key, rows = jax.random.key(seed), len(prompt)
    times: list[float] = []
    rounds = 1
    for _ in range(repeats):
        took = {}
        for limit in (1, executor.room):
            began = time.perf_counter()
            out = jax.block_until_ready(executor.decode(prompt, lengths, key, np.full(rows, limit, np.int32)))
            took[limit] = time.perf_counter() - began
        rounds = int(np.max(out.steps)) - 1
        times.append((took[executor.room] - took[1]) / max(rounds, 1))
    return statistics.median(times)


def times_of(parts: Mapping[int, Mapping[str, float]], total: int) -> Times:
    """What `hydrajax.ssd.simulator` wants to know of rounds with ``total`` outcomes, from parts by number of outcomes.

    parts: as `part_seconds` gives them, for 0 outcomes too. What a draft in turn takes is the whole answer where
    nothing was prepared; without the drafting an answer takes what it takes on a hit, if need be with other outcomes.
    """
    hits = [found["hit"] for found in parts.values() if not math.isnan(found["hit"])]
    own = parts[total]["hit"]
    take = min(hits, default=0.0) if math.isnan(own) else own
    transfer = (parts[total]["hand over"] + parts[total]["tell"]) / 2
    prepare = parts[total]["prepare"] if total else 0.0
    return Times(parts[total]["verify"], max(parts[0]["miss"] - take, 0.0), prepare, transfer, take)


def _median(values: Sequence[float] | np.ndarray) -> float:
    return statistics.median(map(float, values)) if len(values) else float("nan")
