"""What a drafter knows of the base's own text: the statistics from which trees are grown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.prompts import batches
from hydrajax.measure.way import Way
from hydrajax.models.base import BoundBase
from hydrajax.models.rows import run_base

CHUNK_TOKENS = 1024  # positions whose logits exist at once


@dataclass(frozen=True)
class Calibration:
    """Where each true token stands among a drafter's guesses, all over a text that the base wrote.

    ranks: int32 ``[K, rows, T]``, see `hydrajax.drafters.ranks`. spans: ``(row, start, end)`` of what the base wrote.
    """

    ranks: Int[np.ndarray, "K rows T"]
    spans: tuple[tuple[int, int, int], ...]

    def at_every_step(self) -> Int[np.ndarray, "K steps"]:
        """The ranks wherever a step may begin whose every head still has a true token to be compared with."""
        depth = len(self.ranks)
        parts = [self.ranks[:, row, start - 1 : max(end - 1 - depth, start - 1)] for row, start, end in self.spans]
        return np.concatenate(parts, axis=1)


def calibrate(
    way: Way,
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int = 16,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Let the base of a way continue the prompts alone, by the way's rule, and rank every token that it wrote.

    This takes one autoregressive and one teacher-forced pass, whatever trees are grown from it afterwards. The way's
    own tree does not matter. ``on_progress`` is told how many prompts of how many are done.
    """
    plain, width = way.autoregressive(), max(map(len, prompts))

    @jax.jit
    def rank(params, tokens):
        forward = run_base(way.model, params.base, tokens, way.drafter.reads)
        base = BoundBase(way.model, params.base)
        drafter = way.drafter
        return drafter.ranks(params.draft, forward.features, {"tokens": tokens}, base, CHUNK_TOKENS, drafter.depth)

    found, spans = [], []
    for prompt, lengths, n_real in batches(prompts, batch_size):
        done = len(spans)
        key = jax.random.fold_in(jax.random.key(seed), done)
        out = jax.device_get(plain.decode(prompt, lengths, key))
        rows = np.zeros((batch_size, width + way.max_new_tokens), np.int32)
        ends = lengths + out.lengths
        for row, (start, end) in enumerate(zip(lengths, ends, strict=True)):
            rows[row, :start] = prompt[row, :start]
            rows[row, start:end] = out.tokens[row, : out.lengths[row]]
        spans += [(done + row, int(lengths[row]), int(ends[row])) for row in range(n_real)]
        found.append(np.asarray(rank(way.params, jnp.asarray(rows)))[:, :n_real])
        on_progress(len(spans), len(prompts))
    return Calibration(np.concatenate(found, axis=1), tuple(spans))
