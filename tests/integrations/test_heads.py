"""Heads that are trained in the loop of a policy's own training."""

import jax
import numpy as np
import pytest

from helpers.compilations import no_compilation
from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.integrations.heads import HeadsInLoop
from hydrajax.language_model import LanguageModel
from hydrajax.models.llama_config import LlamaConfig

CONFIG = LlamaConfig(32, 32, 48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]


def steps_of(m: LanguageModel) -> tuple[list[list[int]], int]:
    found = m.generate(PROMPTS, tree="chain-2", max_new_tokens=24, batch_size=4)
    return [one.output_ids for one in found], sum(one.steps for one in found)


@pytest.mark.quick("medusa")
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_follow_the_policy_and_change_no_text(kind):
    model, base = random_base(CONFIG)
    base = jax.tree.map(lambda x: 15 * x if x.ndim > 1 else x, base)  # far from uniform
    m = LanguageModel(model, *random_draft(model, base, kind))
    texts, steps = steps_of(m)
    heads = HeadsInLoop(m, learning_rate=1e-2, batch_size=4)
    samples = [np.array(prompt + ids, np.int32) for prompt, ids in zip(PROMPTS, texts, strict=True)]
    losses = [loss for turn in range(30) for loss in heads.train(samples, turn)]
    assert losses[-1] < losses[0] - 0.5
    with no_compilation():  # the executor has the new heads
        after, fewer = steps_of(m)
    assert after == texts
    assert fewer < 0.8 * steps
    other = jax.tree.map(lambda x: x[::-1] if x.ndim > 1 else x, base)
    with no_compilation():
        m.update_params(other)
        heads.train(samples)


def test_only_heads_are_trained():
    model, base = random_base(CONFIG)
    m = LanguageModel(model, NoDrafter(), Params(base, {})).with_draft("lookup")
    with pytest.raises(HydrajaxError, match=r"^refresh_heads: got .*, expected a draft with heads$"):
        HeadsInLoop(m, 1e-3, 4)
