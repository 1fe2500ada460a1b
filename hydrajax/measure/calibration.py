"""What the draft heads know of the base's own text: the statistics from which trees are grown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.decode import make_autoregressive_fn, right_padded
from hydrajax.decoding.step import Params
from hydrajax.drafters.drafter import BoundBase
from hydrajax.drafters.ranks import head_ranks
from hydrajax.models.llama import Llama
from hydrajax.models.rows import run_base

CHUNK_TOKENS = 1024  # positions whose logits exist at once


@dataclass(frozen=True)
class Calibration:
    """ranks: int32 ``[K, rows, T]``, of each true token among its head's guesses (`hydrajax.drafters.ranks`).
    spans: ``(row, start, end)`` of what the base wrote.
    """

    ranks: Int[np.ndarray, "K rows T"]
    spans: tuple[tuple[int, int, int], ...]

    def at_every_step(self) -> Int[np.ndarray, "K steps"]:
        """The ranks wherever a step may begin whose every head still has a true token to be compared with."""
        n_heads = len(self.ranks)
        parts = [self.ranks[:, row, start - 1 : max(end - 1 - n_heads, start - 1)] for row, start, end in self.spans]
        return np.concatenate(parts, axis=1)


def calibrate(
    model: Llama,
    drafter,
    params: Params,
    prompts: Sequence[np.ndarray],
    *,
    new_tokens: int,
    rule: AcceptanceRule | None = None,
    eos_ids: tuple[int, ...] = (),
    batch_size: int = 16,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Let the base continue the prompts on its own, greedily or as ``rule`` says, and rank every token it wrote.

    One autoregressive pass and one teacher-forced pass, whatever trees are grown from it afterwards.
    """
    decode = make_autoregressive_fn(model, rule or Greedy(), max_new_tokens=new_tokens, eos_ids=eos_ids)
    width = max(map(len, prompts))

    @jax.jit
    def rank(params: Params, tokens):
        forward = run_base(model, params.base, tokens, drafter.hidden_state_offset)
        base = BoundBase(model, params.base)
        return head_ranks(drafter, params.draft, forward.features, {"tokens": tokens}, base, CHUNK_TOKENS)

    found, spans = [], []
    for first in range(0, len(prompts), batch_size):
        group = list(prompts[first : first + batch_size])
        n_rows = len(group)
        group += [group[-1]] * (batch_size - n_rows)  # one shape, one compilation
        prompt, lengths = right_padded(group, width)
        rng = jax.random.fold_in(jax.random.key(seed), first)
        out = jax.device_get(decode(Params(params.base, {}), prompt, lengths, rng))
        rows = np.zeros((batch_size, width + new_tokens), np.int32)
        for row in range(batch_size):
            start, end = lengths[row], lengths[row] + out.lengths[row]
            rows[row, :start] = prompt[row, :start]
            rows[row, start:end] = out.tokens[row, : out.lengths[row]]
            if row < n_rows:
                spans.append((first + row, int(start), int(end)))
        found.append(np.asarray(rank(params, jnp.asarray(rows)))[:, :n_rows])
        on_progress(min(first + batch_size, len(prompts)), len(prompts))
    return Calibration(np.concatenate(found, axis=1), tuple(spans))
