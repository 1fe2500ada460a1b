"""Certificates: check the guarantee of an acceptance rule for a base, a draft and a tree.

Greedy, exact and rejection sampling guarantee the base's own output or its distribution. Typical acceptance only
guarantees that every accepted draft token passed its threshold. The references use no cache, no tree and no loop: the
base scores whole sequences (`hydrajax.bench.uncached_forward`), and NumPy does the rest.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.bench.uncached_forward import all_logits, last_logits
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.constraints import Constraint, allowed_next
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import Sampling
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError

# The chi-square test enumerates all continuations of this length among the most likely tokens.
FIRST_TOKENS, MOST_LIKELY, P_VALUE = 3, 4, 0.001
DRAWS_PER_BATCH = 64
MIN_EXPECTED = 5  # rarer sequences are pooled


@dataclass(frozen=True)
class Check:
    """One guarantee: the compared quantity, whether it holds, and the figures."""

    name: str
    holds: bool
    summary: str
    details: list[dict[str, Any]]


def certify(
    executor: Executor,
    prompts: Sequence[Int[np.ndarray, " P"]],
    *,
    exact: Executor | None = None,
    samples: int = 4096,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda status: None,
) -> Iterator[Check]:
    """Yield every check that applies to the request's rule, as soon as it is complete.

    - Greedy, and exact sampling with one seed: tokens are equal to decoding without a tree. In float32 every difference
      is a defect. In bfloat16, greedy differences within rounding are ties, and differences of sampling are counted
      only.
    - Exact and rejection sampling, in float32: chi-square test of the first `FIRST_TOKENS` tokens of ``samples`` draws
      for the first prompt, top-k at most `MOST_LIKELY`, against the enumerated distribution; p is at least `P_VALUE`.
    - Typical: every accepted draft token passes the threshold in an uncached pass, with slack for rounding.
    - With a grammar, all of these under its masks, and every output is read again by a new parser.

    Args:
        exact: the same executor with base and draft in float32 (default: ``executor``).
        samples: draws of the chi-square test.
    """
    if not prompts:
        raise HydrajaxError("prompts: got none, expected at least one")
    exact, rule = exact or executor, executor.request.rule
    for each in {id(each): each for each in (executor, exact)}.values():
        _fill_corpus(each, prompts, seed)
    if rule.same_output:
        on_status("comparing with decoding without a tree")
        yield check_equality(executor, exact, prompts, seed)
    if isinstance(rule, Sampling) and rule.temperature > 0:
        on_status("drawing samples")
        yield check_distribution(exact, prompts[0], samples, seed)
    if isinstance(rule, Typical):
        on_status("recomputing thresholds")
        yield check_typical(exact, prompts)
    if executor.request.grammar is not None:
        on_status("reading outputs by the grammar")
        yield check_grammar(executor, prompts, seed)


def _fill_corpus(executor: Executor, prompts, seed: int) -> None:
    """Let a draft with a corpus read what the base generates without it: an empty one drafts nothing."""
    if (corpus := executor.params.corpus) is None:
        return
    plain = executor.autoregressive()
    for prompt in prompts:
        (ids,) = plain.decode(prompt[None], rng=jax.random.key(seed)).ids()
        corpus.remember(ids, prompt)


# --- equality -------------------------------------------------------------------------------------------------------


def check_equality(executor: Executor, exact: Executor, prompts, seed: int) -> Check:
    """Compare tokens with decoding without a tree, and classify the first difference of each prompt."""
    plain, found, tokens, steps = executor.autoregressive(), [], 0, 0
    for number, prompt in enumerate(prompts):
        key = jax.random.fold_in(jax.random.key(seed), number)
        with_tree = jax.device_get(executor.decode(prompt[None], rng=key))
        without = jax.device_get(plain.decode(prompt[None], rng=key))
        tokens += int(with_tree.lengths[0])
        steps += int(with_tree.steps[0])
        different = np.flatnonzero(with_tree.tokens[0] != without.tokens[0])
        if different.size:
            at = int(different[0])
            parted = int(with_tree.tokens[0, at]), int(without.tokens[0, at])
            found.append(_divergence(executor, exact, number, prompt, without.tokens[0, :at], parted))
    defects = [each for each in found if each["verdict"] == "defect"]
    in_float32 = executor.model.dtype == jnp.float32
    holds = not (found if in_float32 else defects if isinstance(executor.request.rule, Greedy) else [])
    summary = (
        f"{len(prompts)} prompts, {tokens} tokens in {steps} steps (tokens_per_step {tokens / max(steps, 1):.2f}); "
        f"{len(found)} differ, of which {len(found) - len(defects)} at a tie within rounding"
    )
    return Check("tokens equal to decoding without a tree", holds, summary, found)


def _divergence(executor: Executor, exact: Executor, number: int, prompt, output, tokens: tuple[int, int]) -> dict:
    """Return the first difference between decoding with a tree and without: the two tokens at this position.

    ``margin`` is the best logit less that of the worse of the two, in float32; ``rounding`` twice the largest
    difference between the logits in float32 and in the computing dtype.
    """
    before, grammar = [np.concatenate([prompt, output])], _start(executor)
    precise, rounded = (
        _processed(last_logits(each.model, each.params.base, before)[0], executor.request, grammar, prompt, output)
        for each in (exact, executor)
    )
    margin = float(precise.max() - min(precise[token] for token in tokens))  # token -1 (none) has a margin too
    rounding = 2 * float(np.abs(precise - rounded).max())
    found = {"prompt": number, "position": len(output), "tokens": tokens, "margin": margin, "rounding": rounding}
    return found | {"verdict": "tie within rounding" if margin <= rounding else "defect"}


# --- distribution ---------------------------------------------------------------------------------------------------


def check_distribution(exact: Executor, prompt, samples: int, seed: int) -> Check:
    """Run a chi-square test of the joint distribution of the first tokens, in float32."""
    from scipy import stats

    rule = exact.request.rule
    rule = dataclasses.replace(rule, top_k=min(rule.top_k or MOST_LIKELY, MOST_LIKELY))
    short = exact.with_request(rule=rule, max_new_tokens=FIRST_TOKENS)
    if short.request.grammar is None:  # a grammar needs EOS: it may be the only token that is allowed
        short = short.with_program(eos_ids=())
    expected = enumerated(short, prompt)
    batch = np.repeat(np.asarray(prompt)[None], DRAWS_PER_BATCH, axis=0)
    counts = dict.fromkeys(expected, 0)
    n_batches = -(-samples // DRAWS_PER_BATCH)
    impossible = 0
    for number in range(n_batches):
        out = short.decode(batch, rng=jax.random.fold_in(jax.random.key(seed), number))
        for sequence in map(tuple, np.asarray(out.tokens)[:, :FIRST_TOKENS].tolist()):
            if sequence in counts:
                counts[sequence] += 1
            else:
                impossible += 1
    drawn = n_batches * DRAWS_PER_BATCH
    observed, wanted = pooled(np.array(list(counts.values())), np.array(list(expected.values())) * drawn)
    p_value = (
        float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue) if len(wanted) > 1 else 1.0
    )
    summary = (
        f"{drawn} draws of {FIRST_TOKENS} tokens, top-k {rule.top_k}, {len(expected)} sequences in {len(wanted)} "
        f"cells: p = {p_value:.3g}; {impossible} were impossible"
    )
    details = [{"p_value": p_value, "impossible": impossible, "cells": len(wanted), "samples": drawn}]
    return Check("distribution of the first tokens", impossible == 0 and p_value >= P_VALUE, summary, details)


def enumerated(exact: Executor, prompt) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of `FIRST_TOKENS` tokens that the rule allows; -1 after EOS."""
    request, grammar, found = exact.request, _start(exact), {(): 1.0}
    ends = (-1, *exact.program.eos_ids)
    for _ in range(FIRST_TOKENS):
        grown = {(*sequence, -1): p for sequence, p in found.items() if sequence and sequence[-1] in ends}
        open_ = [sequence for sequence in found if (*sequence, -1) not in grown]
        texts = [np.concatenate([prompt, np.array(sequence, np.int32)]) for sequence in open_]
        logits = last_logits(exact.model, exact.params.base, texts) if texts else []
        for sequence, row in zip(open_, logits, strict=True):
            p = shaped(_processed(row.astype(np.float64), request, grammar, prompt, sequence), request.rule)
            grown |= {(*sequence, int(token)): found[sequence] * p[token] for token in np.flatnonzero(p)}
        found = grown
    return found


def _processed(logits: np.ndarray, request: Request, grammar: Constraint | None, prompt, output) -> np.ndarray:
    """Apply the references of the request's logits processors, and the grammar, given at its start."""
    for processor in request.processors:
        logits = processor.reference(logits, prompt, output)
    return logits if grammar is None else np.where(_allowed(grammar, output, len(logits)), logits, -np.inf)


def _start(executor: Executor) -> Constraint | None:
    """Return a new parser of the request's grammar, None without one."""
    (found,) = executor.constraints([executor.request]) or (None,)
    return found


def _allowed(grammar: Constraint, output, vocab_size: int) -> Bool[np.ndarray, " V"]:
    """Return the tokens that a grammar, given at its start, allows after an output."""
    here = grammar.copy()
    here.follow([int(token) for token in output])
    return np.unpackbits(allowed_next(here, vocab_size).view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def shaped(logits: np.ndarray, rule) -> np.ndarray:
    """Return the probabilities of `hydrajax.decoding.sampling.shaped`, computed by sorting."""
    p = np.exp((logits - logits.max()) / rule.temperature)
    if rule.top_k is not None:
        p[p < np.sort(p)[-min(rule.top_k, len(p))]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order][before < rule.top_p].min()
    p[p < least] = 0
    p[p < rule.min_p * p.max()] = 0
    return p / p.sum()


def pooled(observed: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep cells of at least `MIN_EXPECTED`, and pool the rarer ones into one cell if they reach it together."""
    rare = wanted < MIN_EXPECTED
    if wanted[rare].sum() >= MIN_EXPECTED:
        return tuple(np.append(x[~rare], x[rare].sum()) for x in (observed, wanted))
    return observed[~rare], wanted[~rare]


# --- grammars -------------------------------------------------------------------------------------------------------


def check_grammar(executor: Executor, prompts, seed: int) -> Check:
    """Read every output again, token by token, by a parser that has seen nothing of the tree."""
    (grammar,), size = executor.constraints([executor.request]), executor.model.config.vocab_size
    wrong, tokens, complete = [], 0, 0
    for number, prompt in enumerate(prompts):
        out = executor.decode(prompt[None], rng=jax.random.fold_in(jax.random.key(seed), number)).ids()[0]
        tokens += len(out)
        complete += bool(out) and out[-1] in executor.program.eos_ids
        refused = [at for at, token in enumerate(out) if not _allowed(grammar, out[:at], size)[token]]
        wrong += [{"prompt": number, "position": at, "token": out[at]} for at in refused[:1]]
    summary = f"{len(prompts)} prompts, {tokens} tokens, {complete} complete texts; {len(wrong)} leave the grammar"
    return Check("tokens allowed by the grammar", not wrong, summary, wrong)


# --- typical --------------------------------------------------------------------------------------------------------


def check_typical(exact: Executor, prompts) -> Check:
    """Recompute p(x) and the threshold of every accepted draft token, and the argmax of every root, without a cache."""
    request, grammar, rule = exact.request, _start(exact), exact.request.rule
    alpha = rule.epsilon**0.5 if rule.alpha is None else rule.alpha
    slack = 1e-3  # in probability: float32 matmuls of different shapes differ
    drafted = roots = 0
    wrong = []
    for number, prompt in enumerate(prompts):
        out = jax.device_get(exact.decode(prompt[None]))
        tokens = out.tokens[0, : out.lengths[0]]
        logits = all_logits(exact.model, exact.params.base, np.concatenate([prompt, tokens]))
        is_root = np.zeros(len(tokens), bool)
        is_root[np.cumsum([0, *(out.accept_lengths[0, : out.steps[0]] + 1)])[:-1]] = True
        for at, token in enumerate(tokens):
            row = _processed(logits[len(prompt) + at - 1].astype(np.float64), request, grammar, prompt, tokens[:at])
            if is_root[at]:
                roots += 1
                short = float(row.max() - row[token])
            else:
                drafted += 1
                p = shaped(row, rule)
                threshold = min(rule.epsilon, alpha * np.exp((p * np.log(p + 1e-5)).sum()))
                short = float(threshold - p[token])
            if short > slack:
                wrong.append({"prompt": number, "position": at, "token": int(token), "short": short})
    summary = f"{drafted} draft tokens and {roots} roots checked, {len(wrong)} fail their threshold or argmax"
    return Check("typical acceptance as defined (not the base's distribution)", not wrong, summary, wrong)
