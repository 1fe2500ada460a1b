"""Sweeps over acceptance rules, for hydra_figure_4.py and medusa_figure_5.py.

The papers let another model judge the text. These scripts report the mean negative log-likelihood per token under the
base at temperature 1 instead. It measures the distance to the base's own samples, not quality; quality.py scores
answers under these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import jax
import numpy as np
from common import CONSOLE, Setup
from rich.progress import track
from scipy.special import logsumexp

from hydrajax.bench.uncached_forward import all_logits
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.typical import Typical
from hydrajax.language_model import LanguageModel

REMARK = "no judge: text likelihood under the base (nats per token, temperature 1), not quality"

Rule = tuple[str, str | None, float | None, AcceptanceRule]  # name, varied parameter, its value, rule


def fixed_rules(temperature: float) -> list[Rule]:
    return [("greedy", None, None, Greedy()), (f"exact, T {temperature:g}", None, None, ExactSampling(temperature))]


def over_epsilon(epsilons: Sequence[float], temperature: float) -> list[Rule]:
    """Return rules of typical acceptance with α = √ε, as in both papers."""
    return [(f"typical, T {temperature:g}", "epsilon", e, Typical(e, temperature=temperature)) for e in epsilons]


def over_temperature(temperatures: Sequence[float]) -> list[Rule]:
    exact = [("exact", "temperature", t, ExactSampling(t)) for t in temperatures]
    return exact + [("typical, ε 0.1", "temperature", t, Typical(0.1, temperature=t)) for t in temperatures]


def sweep(setup: Setup, rules: Sequence[Rule]) -> list[dict]:
    """Measure rules with each kind of heads and the released tree. Return rows of an "acceptance" result."""
    sweeps = {heads: partial(_sweep, setup, rules, heads) for heads in setup.heads}
    return [row for heads in sweeps for row in setup.args.parts.rows(heads, sweeps[heads])]


def _sweep(setup: Setup, rules: Sequence[Rule], heads: str) -> list[dict]:
    prompt, lengths = right_padded(setup.measured, max(map(len, setup.measured)))

    @cache  # two sweeps can share a rule
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
    """Return the mean negative log-likelihood of the generated tokens under the base."""
    total = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = np.concatenate([prompt, output])
        logits = all_logits(base.model, base.params.base, text)[len(prompt) - 1 : -1].astype(np.float64)
        chosen = np.take_along_axis(logits, output[:, None], axis=-1)[:, 0]
        total += float((logsumexp(logits, axis=-1) - chosen).sum())
    return total / sum(map(len, outputs))
