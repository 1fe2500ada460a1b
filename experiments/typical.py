"""Sweeps over acceptance rules, for hydra_figure_4.py and medusa_figure_5.py.

The papers let another model judge the text. Here there is none: in its place stands the mean negative log-likelihood of
a token under the base, at temperature 1. It says how far from the base's own samples a rule's text is, not how good;
``hydrajax evaluate --rule typical`` writes answers that FastChat's judge reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from common import CONSOLE, Setup, right_padded
from rich.progress import track

from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, Typical
from hydrajax.models.rows import run_base

REMARK = "no judge: quality is not measured, only how likely the base finds the text (nats per token, temperature 1)"

Rule = tuple[str, str | None, float | None, AcceptanceRule]  # name, what is varied, its value, the rule


def fixed_rules(temperature: float) -> list[Rule]:
    return [("greedy", None, None, Greedy()), (f"exact, T {temperature:g}", None, None, ExactSampling(temperature))]


def over_epsilon(epsilons: Sequence[float], temperature: float) -> list[Rule]:
    """Typical acceptance with α = √ε, as both papers set it."""
    return [(f"typical, T {temperature:g}", "epsilon", e, Typical(e, temperature=temperature)) for e in epsilons]


def over_temperature(temperatures: Sequence[float]) -> list[Rule]:
    exact = [("exact", "temperature", t, ExactSampling(t)) for t in temperatures]
    return exact + [("typical, ε 0.1", "temperature", t, Typical(0.1, temperature=t)) for t in temperatures]


def sweep(setup: Setup, rules: Sequence[Rule]) -> list[dict]:
    """Rows of an "acceptance" result, each kind of heads with the released tree."""
    parts, nats_per_token = setup.args.parts, make_nats_per_token(setup)
    sweeps = {heads: partial(_sweep, setup, rules, heads, nats_per_token) for heads in setup.heads}
    return [row for heads in sweeps for row in parts.rows(heads, sweeps[heads])]


def _sweep(setup: Setup, rules: Sequence[Rule], heads: str, nats_per_token: Callable[..., float]) -> list[dict]:
    prompt, lengths = right_padded(setup.measured, max(map(len, setup.measured)))

    @cache  # two sweeps meet in one rule
    def measured(rule: AcceptanceRule) -> dict[str, float]:
        way = setup.way(heads, setup.released(heads), rule)
        out = jax.device_get(way.decode(way.params, prompt, lengths, jax.random.key(0)))
        nats = nats_per_token(prompt, lengths, out.tokens, out.lengths)
        return {"tokens_per_step": out.tokens_per_step(), "nats": nats}

    return [
        {"drafter": heads, "rule": name, "parameter": parameter, "value": value} | measured(rule)
        for name, parameter, value, rule in track(rules, heads, console=CONSOLE)
    ]


def make_nats_per_token(setup: Setup) -> Callable[..., float]:
    """``nats_per_token(prompt, prompt_lengths, tokens, lengths)``: mean negative log-likelihood of the generated tokens
    under the base, float32, row after row. Compiled once for all rules and heads.
    """
    model, params = setup.base.model, setup.base.params.base

    @jax.jit
    def of_row(params, row):
        hidden = run_base(model, params, row[None], 0).hidden
        logits = model.apply({"params": params}, hidden, method="logits")[0].astype(jnp.float32)
        chosen = jnp.take_along_axis(logits[:-1], row[1:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits[:-1], axis=-1) - chosen

    def nats_per_token(prompt, prompt_lengths, tokens, lengths) -> float:
        total = 0.0
        for before, n_prompt, after, n_after in zip(prompt, prompt_lengths, tokens, lengths, strict=True):
            row = np.zeros(prompt.shape[1] + tokens.shape[1], np.int32)
            row[:n_prompt] = before[:n_prompt]
            row[n_prompt : n_prompt + n_after] = after[:n_after]
            total += float(np.asarray(of_row(params, row))[n_prompt - 1 : n_prompt + n_after - 1].sum())
        return total / int(lengths.sum())

    return nats_per_token
