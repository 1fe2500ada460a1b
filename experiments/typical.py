"""Sweeps over acceptance rules, for hydra_figure_4.py and medusa_figure_5.py.

The papers let another model judge the text. Here there is none: in its place stands the mean negative log-likelihood of
a token under the base, at temperature 1. It says how far from the base's own samples a rule's text is, not how good;
quality.py scores answers under these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import jax
import numpy as np
from common import CONSOLE, Setup
from rich.progress import track
from scipy.special import logsumexp

from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, Typical
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.language_model import LanguageModel
from hydrajax.measure.plain_pass import all_logits

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
    sweeps = {heads: partial(_sweep, setup, rules, heads) for heads in setup.heads}
    return [row for heads in sweeps for row in setup.args.parts.rows(heads, sweeps[heads])]


def _sweep(setup: Setup, rules: Sequence[Rule], heads: str) -> list[dict]:
    prompt, lengths = right_padded(setup.measured, max(map(len, setup.measured)))

    @cache  # two sweeps meet in one rule
    def measured(rule: AcceptanceRule) -> dict[str, float]:
        executor = setup.executor(heads, setup.released(heads), rule)
        out = jax.device_get(executor.decode(prompt, lengths, jax.random.key(0)))
        outputs = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
        nats = nats_per_token(setup.base, setup.measured, outputs)
        return {"tokens_per_step": out.tokens_per_step(), "nats": nats}

    return [
        {"drafter": heads, "rule": name, "parameter": parameter, "value": value} | measured(rule)
        for name, parameter, value, rule in track(rules, heads, console=CONSOLE)
    ]


def nats_per_token(base: LanguageModel, prompts: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    """Mean negative log-likelihood of the generated tokens under the base, text after text."""
    total = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = np.concatenate([prompt, output])
        logits = all_logits(base.model, base.params.base, text)[len(prompt) - 1 : -1].astype(np.float64)
        chosen = np.take_along_axis(logits, output[:, None], axis=-1)[:, 0]
        total += float((logsumexp(logits, axis=-1) - chosen).sum())
    return total / sum(map(len, outputs))
