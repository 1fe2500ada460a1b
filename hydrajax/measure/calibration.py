"""What a drafter knows of the base's own text: the statistics from which trees are grown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.drafters.drafter import Drafter
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base

CHUNK_TOKENS = 1024  # positions whose logits exist at once


@dataclass(frozen=True)
class Calibration:
    """Where each true token stands among a drafter's guesses, all over a text that the base wrote.

    ranks: int32 ``[K, rows, T]``, see `hydrajax.drafters.ranks`. spans: ``(row, start, end)`` of what the base wrote.
    overlaps: float32 ``[rows, T]`` the sum over all tokens of min(p, q) after each place, β in Leviathan et al. 3.1; of
    rejection sampling with a drafter that has a distribution after any text, else None.
    """

    ranks: Int[np.ndarray, "K rows T"]
    spans: tuple[tuple[int, int, int], ...]
    overlaps: Float[np.ndarray, "rows T"] | None = None

    @property
    def acceptance(self) -> float:
        """α in Leviathan et al. 3.2: the chance that the draft's next token is accepted, over what the base wrote.

        Where the best guess is judged and no draw, that is how often the base's own token is it: with p(x) the guess x
        is what the base writes, and under the greedy rule p is all or nothing.
        """
        if self.overlaps is not None:  # after the place before each token
            values = [self.overlaps[row, start : end - 1] for row, start, end in self.spans]
        else:  # at place t the guess is of token t + 2
            values = [self.ranks[0, row, start - 1 : max(end - 2, start - 1)] == 0 for row, start, end in self.spans]
        found = np.concatenate(values)
        return float(found.mean()) if found.size else 0.0

    def at_every_step(self) -> Int[np.ndarray, "K steps"]:
        """The ranks wherever a step may begin whose every head still has a true token to be compared with."""
        depth = len(self.ranks)
        parts = [self.ranks[:, row, start - 1 : max(end - 1 - depth, start - 1)] for row, start, end in self.spans]
        return np.concatenate(parts, axis=1)


def calibrate(
    executor: Executor,
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int = 16,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Let the base continue the prompts without a draft, by the spec's rule, and rank every token that it wrote.

    This takes one autoregressive and one teacher-forced pass, whatever trees are grown from it afterwards. The spec's
    own tree does not matter. ``on_progress`` is called with how many prompts of how many are done.
    """
    plain, width = executor.autoregressive(), max(map(len, prompts))
    model, spec, drafter = executor.model, executor.spec, executor.spec.drafter

    @jax.jit
    def rank(params, tokens):
        forward = run_base(model, params.base, tokens, drafter.spec.aux_hidden_layers)
        base = BoundBase(model, params.base)
        ranks = drafter.ranks(
            params.draft, forward.aux_hidden_states, {"tokens": tokens}, base, CHUNK_TOKENS, drafter.spec.depth
        )
        if not (spec.rule.needs_draws and drafter.spec.has_distribution):
            return ranks, None
        return ranks, overlaps(spec.rule, drafter, params.draft, base, tokens, forward.hidden)

    found, overlapping, spans = [], [], []
    for prompt, lengths, n_real in batches(prompts, batch_size):
        done = len(spans)
        key = jax.random.fold_in(jax.random.key(seed), done)
        out = jax.device_get(plain.decode(prompt, lengths, key))
        rows = np.zeros((batch_size, width + spec.max_new_tokens), np.int32)
        ends = lengths + out.lengths
        for row, (start, end) in enumerate(zip(lengths, ends, strict=True)):
            rows[row, :start] = prompt[row, :start]
            rows[row, start:end] = out.tokens[row, : out.lengths[row]]
        spans += [(done + row, int(lengths[row]), int(ends[row])) for row in range(n_real)]
        ranks, shares = rank(executor.params, jnp.asarray(rows))
        found.append(np.asarray(ranks)[:, :n_real])
        if shares is not None:
            overlapping.append(np.asarray(shares)[:n_real])
        on_progress(len(spans), len(prompts))
    shares = np.concatenate(overlapping) if overlapping else None
    return Calibration(np.concatenate(found, axis=1), tuple(spans), shares)


def overlaps(
    rule: RejectionSampling,
    drafter: Drafter,
    draft_params,
    base: BoundBase,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T"]:
    """The sum over all tokens of min(p, q) after each token, with the rule's p and the temperature that it draws at.

    It is the chance that a draw from q is accepted (Leviathan et al. 2023, 3.1 to 3.3). hidden: the base's, of the same
    tokens. One row's logits exist at once.
    """
    temperature = rule.temperature if rule.draft_temperature is None else rule.draft_temperature

    def of_row(row):
        tokens, hidden = row
        p = jax.nn.softmax(rule.shape(base.logits(hidden)), axis=-1)
        q = jax.nn.softmax(drafter.next_logits(draft_params, tokens[None])[0] / temperature, axis=-1)
        return jnp.sum(jnp.minimum(p, q), axis=-1)

    return jax.lax.map(of_row, (tokens, hidden))
