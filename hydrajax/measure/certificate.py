"""Whether a rule did what it promises with a base, a draft and a tree: checked against passes without any of them.

Greedy, exact and rejection sampling promise the base's own output or its distribution. Typical acceptance promises only
that every draft token it took passed its threshold. The references here use no cache, no tree and no loop: whole texts
go through the base (`hydrajax.measure.plain_pass`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.errors import HydrajaxError
from hydrajax.measure.plain_pass import all_logits, last_logits
from hydrajax.measure.way import Way

# The chi-square test enumerates the first tokens, of each the likeliest few.
FIRST_TOKENS, LIKELIEST, P_VALUE = 3, 4, 0.001
DRAWS_AT_ONCE = 64
FEWEST_EXPECTED = 5  # sequences expected less often are counted together


@dataclass(frozen=True)
class Check:
    """One promise: what was compared, whether it holds, and the figures."""

    name: str
    holds: bool
    summary: str
    details: list[dict[str, Any]]


@dataclass(frozen=True)
class Divergence:
    """Where tree and plain decoding part. position: of the output. tokens: the tree's and the plain one.

    margin: by how much the worse of the two tokens falls short of the best logit, recomputed in float32. rounding:
    twice the largest difference between float32 and the computing dtype's logits there, in a pass of one shape.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    margin: float
    rounding: float

    @property
    def verdict(self) -> str:
        return "tie within rounding" if self.margin <= self.rounding else "defect"


def certify(
    way: Way,
    prompts: Sequence[Int[np.ndarray, " P"]],
    *,
    exact: Way | None = None,
    samples: int = 4096,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda status: None,
) -> Iterator[Check]:
    """Yield every check that applies to the way's rule, as soon as it is done.

    exact: the same way with its base and draft in float32, by default the way itself.

    - Greedy, and exact sampling with one seed: tokens equal to decoding without a tree. In float32 every difference is
      a defect; in bfloat16 one where float32 sees a tie within rounding is none (greedy), or is only counted
      (sampling: the distribution is what counts).
    - Exact and rejection sampling, in float32: chi-square of the first `FIRST_TOKENS` tokens of ``samples`` drawings
      of the first prompt, top-k at most `LIKELIEST`, against the enumerated distribution; p at least `P_VALUE`.
    - Typical: every accepted draft token passes the threshold in a plain pass (with slack for rounding).
    """
    if not prompts:
        raise HydrajaxError("certify: no prompts")
    exact = exact or way
    if way.promises_same_output:
        on_status("comparing with decoding without a tree")
        yield check_equality(way, exact, prompts, seed)
    if isinstance(way.rule, (ExactSampling, RejectionSampling)):
        on_status("drawing samples")
        yield check_distribution(exact, prompts[0], samples, seed)
    if isinstance(way.rule, Typical):
        on_status("recomputing thresholds")
        yield check_typical(exact, prompts)


# --- equality -------------------------------------------------------------------------------------------------------


def check_equality(way: Way, exact: Way, prompts, seed: int) -> Check:
    """Compare token for token with decoding without a tree, and where they part say why."""
    plain, found, tokens, steps = way.autoregressive(), [], 0, 0
    for number, prompt in enumerate(prompts):
        key = jax.random.fold_in(jax.random.key(seed), number)
        with_tree = jax.device_get(way.decode(prompt[None], key=key))
        without = jax.device_get(plain.decode(prompt[None], key=key))
        tokens += int(with_tree.lengths[0])
        steps += int(with_tree.steps[0])
        different = np.flatnonzero(with_tree.tokens[0] != without.tokens[0])
        if different.size:
            at = int(different[0])
            parted = int(with_tree.tokens[0, at]), int(without.tokens[0, at])
            found.append(_divergence(way, exact, number, prompt, without.tokens[0, :at], parted))
    defects = [d for d in found if d.verdict == "defect"]
    in_float32 = way.model.dtype == jnp.float32
    holds = not (found if in_float32 else defects if isinstance(way.rule, Greedy) else [])
    summary = (
        f"{len(prompts)} prompts, {tokens} tokens in {steps} steps (tokens_per_step {tokens / max(steps, 1):.2f}); "
        f"{len(found)} differ, of which {len(found) - len(defects)} at a tie within rounding"
    )
    details = [dataclasses.asdict(d) | {"verdict": d.verdict} for d in found]
    return Check("tokens equal to decoding without a tree", holds, summary, details)


def _divergence(way: Way, exact: Way, number: int, prompt, output, tokens: tuple[int, int]) -> Divergence:
    before = [np.concatenate([prompt, output])]
    precise, rounded = (
        _penalised(last_logits(each.model, each.params.base, before)[0], way.rule, prompt, output)
        for each in (exact, way)
    )
    margin = float(precise.max() - min(precise[token] for token in tokens))  # -1, no token at all, is a margin too
    return Divergence(number, len(output), tokens, margin, 2 * float(np.abs(precise - rounded).max()))


# --- distribution ---------------------------------------------------------------------------------------------------


def check_distribution(exact: Way, prompt, samples: int, seed: int) -> Check:
    """Chi-square of the joint distribution of the first tokens, in float32."""
    from scipy import stats

    rule = dataclasses.replace(exact.rule, top_k=min(exact.rule.top_k or LIKELIEST, LIKELIEST))
    expected = enumerated(exact, prompt, rule)
    short = dataclasses.replace(exact, rule=rule, max_new_tokens=FIRST_TOKENS, eos_ids=())
    batch = np.repeat(np.asarray(prompt)[None], DRAWS_AT_ONCE, axis=0)
    counts = dict.fromkeys(expected, 0)
    n_batches = -(-samples // DRAWS_AT_ONCE)
    impossible = 0
    for number in range(n_batches):
        out = short.decode(batch, key=jax.random.fold_in(jax.random.key(seed), number))
        for sequence in map(tuple, np.asarray(out.tokens).tolist()):
            if sequence in counts:
                counts[sequence] += 1
            else:
                impossible += 1
    drawn = n_batches * DRAWS_AT_ONCE
    observed, wanted = pooled(np.array(list(counts.values())), np.array(list(expected.values())) * drawn)
    p_value = (
        float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue) if len(wanted) > 1 else 1.0
    )
    summary = (
        f"{drawn} drawings of {FIRST_TOKENS} tokens, top-k {rule.top_k}, {len(expected)} sequences in {len(wanted)} "
        f"cells: p = {p_value:.3g}; {impossible} were impossible"
    )
    details = [{"p_value": p_value, "impossible": impossible, "cells": len(wanted), "samples": drawn}]
    return Check("distribution of the first tokens", impossible == 0 and p_value >= P_VALUE, summary, details)


def enumerated(exact: Way, prompt, rule) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of `FIRST_TOKENS` tokens that the rule allows."""
    found = {(): 1.0}
    for _ in range(FIRST_TOKENS):
        texts = [np.concatenate([prompt, np.array(sequence, np.int32)]) for sequence in found]
        logits = last_logits(exact.model, exact.params.base, texts)
        grown = {}
        for (sequence, probability), row in zip(found.items(), logits, strict=True):
            shaped = _shaped(_penalised(row.astype(np.float64), rule, prompt, sequence), rule)
            grown |= {(*sequence, int(token)): probability * shaped[token] for token in np.flatnonzero(shaped)}
        found = grown
    return found


def _penalised(logits: np.ndarray, rule, prompt, output) -> np.ndarray:
    """What `Penalties.penalise` should give, written token by token; the logits as they are for a rule without."""
    if not rule.penalises:
        return logits
    found = logits.copy()
    for token in {int(token) for token in (*prompt, *output)}:
        found[token] *= rule.repetition_penalty if found[token] < 0 else 1 / rule.repetition_penalty
    for token in output:
        found[token] -= rule.frequency_penalty
    for token in {int(token) for token in output}:
        found[token] -= rule.presence_penalty
    return found


def _shaped(logits: np.ndarray, rule) -> np.ndarray:
    """What `Sampling.shape` should give, written by sorting."""
    p = np.exp((logits - logits.max()) / rule.temperature)
    p[p < np.sort(p)[-rule.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order][before < rule.top_p].min()
    p[p < least] = 0
    p[p < rule.min_p * p.max()] = 0
    return p / p.sum()


def pooled(observed: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells of at least `FEWEST_EXPECTED`; the rarer ones together make one more, if they are enough."""
    rare = wanted < FEWEST_EXPECTED
    if wanted[rare].sum() >= FEWEST_EXPECTED:
        return tuple(np.append(x[~rare], x[rare].sum()) for x in (observed, wanted))
    return observed[~rare], wanted[~rare]


# --- typical --------------------------------------------------------------------------------------------------------


def check_typical(exact: Way, prompts) -> Check:
    """Recompute p(x) and the threshold of every accepted draft token, and the argmax of every root, in a plain pass."""
    rule = exact.rule
    slack = 1e-3  # of probability: one matmul shape against another in float32
    drafted = roots = 0
    wrong = []
    for number, prompt in enumerate(prompts):
        out = jax.device_get(exact.decode(prompt[None]))
        tokens = out.tokens[0, : out.lengths[0]]
        logits = all_logits(exact.model, exact.params.base, np.concatenate([prompt, tokens]))
        is_root = np.zeros(len(tokens), bool)
        is_root[np.cumsum([0, *(out.accept_lengths[0, : out.steps[0]] + 1)])[:-1]] = True
        for at, token in enumerate(tokens):
            row = logits[len(prompt) + at - 1].astype(np.float64)
            if is_root[at]:
                roots += 1
                short = float(row.max() - row[token])
                bad = short > slack
            else:
                drafted += 1
                p = np.exp((row - row.max()) / rule.temperature)
                p /= p.sum()
                alpha = rule.epsilon**0.5 if rule.alpha is None else rule.alpha
                threshold = min(rule.epsilon, alpha * np.exp((p * np.log(p + 1e-5)).sum()))
                short = float(threshold - p[token])
                bad = short > slack
            if bad:
                wrong.append({"prompt": number, "position": at, "token": int(token), "short": short})
    summary = f"{drafted} draft tokens above the threshold and {roots} roots the argmax, but for {len(wrong)}"
    return Check("typical acceptance as defined (not the base's distribution)", not wrong, summary, wrong)
