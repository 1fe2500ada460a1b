"""Training objectives against the official code of Hydra and EAGLE: losses, accuracies and gradients."""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.recordings import as_recorded
from hydrajax import load
from hydrajax.formats.eagle_format import EAGLE, EAGLE_3
from hydrajax.formats.hydra_format import Hydra
from hydrajax.language_model import LanguageModel
from hydrajax.models.base_model import BoundBase
from hydrajax.models.layout import write
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import IGNORED, HeadCounts, Objective, draft_loss

pytestmark = pytest.mark.quick("hydra_pp", "masked")  # Hydra++ has what Hydra has, and the prefix layer


@pytest.fixture(scope="module", params=["hydra_mlp", "hydra_pp"])
def official(golden, request):
    """The official run of one architecture: ``(model, recorded values per head, loss(objective, params), folder)``."""
    folder = golden / request.param
    m = load(golden / "base" / "mha", folder / "heads")
    recorded = np.load(folder / "losses.npz")
    batch = {name: recorded[key].astype(np.int32) for name, key in (("tokens", "input_ids"), ("labels", "labels"))}
    base = BoundBase(m.model, m.params.base)
    forward = jax.jit(lambda params: run_base(m.model, params, batch["tokens"]))(m.params.base)

    def loss(objective, params):
        return draft_loss(objective, m.drafter, params, forward.aux_hidden_states, forward.hidden, batch, base)

    logs = json.loads((folder / "loss_logs.json").read_text())

    def per_head(name: str) -> list[float]:
        return [logs[f"hydra{k}_{name}"] for k in range(m.drafter.spec.depth)]

    return m, per_head, loss, folder


def test_losses_equal_the_official_code(official):
    m, per_head, loss, _ = official
    objective = Objective(lm_weight=0.5, reconstruction_weight=2.0, chunk_tokens=14)  # 5 chunks of 7 positions, of 32
    value, metrics = jax.jit(functools.partial(loss, objective))(m.params.draft)
    names = {"lm": "lm_loss", "teacher": "teacher_loss", "reconstruction": "reconstruct_loss"}
    names |= {"top1": "top1", "agreement": "teacher_top1"}
    for field, name in names.items():
        np.testing.assert_allclose(getattr(metrics, field), per_head(name), atol=1e-4, err_msg=name)
    lm, teacher, reconstruction = (sum(per_head(names[field])) for field in ("lm", "teacher", "reconstruction"))
    assert float(value) == pytest.approx(0.5 * lm + teacher + 2 * reconstruction, abs=3e-4)


def test_teacher_gradients_equal_the_official_code(official):
    m, per_head, loss, folder = official
    step = jax.jit(jax.value_and_grad(functools.partial(loss, Objective(chunk_tokens=14)), has_aux=True))
    (value, _), gradient = step(m.params.draft)
    assert float(value) == pytest.approx(sum(per_head("teacher_loss")), abs=1e-4)
    ours = write(Hydra().layout(m.drafter, json.loads((folder / "heads" / "config.json").read_text())), gradient)
    expected = load_file(folder / "teacher_loss_grads.safetensors")
    assert len(expected) > 15
    for name, values in expected.items():
        scale = np.abs(values).max()
        found = as_recorded(ours[name], values)
        np.testing.assert_allclose(found / scale, values / scale, atol=1e-4, rtol=0, err_msg=name)


class Official(NamedTuple):
    """One architecture: the loaded model, the recorded losses and gradients, and token ids int32 ``[2, 32]``."""

    loaded: LanguageModel
    losses: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    tokens: np.ndarray

    @classmethod
    def read(cls, golden, arch: str) -> "Official":
        folder = golden / "eagle" / arch
        tokens = np.load(folder / "teacher_forced.npz")["input_ids"].astype(np.int32)
        losses, gradients = np.load(folder / "losses.npz"), load_file(folder / "loss_grads.safetensors")
        return cls(load(golden / "base" / "mha", folder / "draft"), losses, gradients, tokens)


def loss_and_gradient(official: Official, objective: Objective, mask: np.ndarray, ahead: int, counts: HeadCounts):
    """Of the places whose ``mask`` holds, which the official code gives for the place that a guess is made at and we
    for the token ``ahead`` of it. One more token ends the rows, as the official code also teaches what follows them.
    """
    m, rows = official.loaded, np.pad(official.tokens, ((0, 0), (0, 1)))
    labels = np.where(np.pad(mask[:, : 33 - ahead], ((0, 0), (ahead, 0))) > 0, rows, IGNORED)
    labels[:, -1] = IGNORED if ahead == 1 else labels[:, -1]
    batch = {"tokens": rows, "labels": labels.astype(np.int32)}
    base = BoundBase(m.model, m.params.base)

    def run(params):
        out = run_base(m.model, m.params.base, batch["tokens"], m.drafter.spec.aux_hidden_layers)
        inputs = m.drafter, params, out.aux_hidden_states, out.hidden, batch, base
        return draft_loss(objective, *inputs, counts=counts)

    return jax.jit(jax.value_and_grad(run, has_aux=True))(m.params.draft)


@pytest.mark.parametrize("which", ["all", "masked"])
def test_eagle_1(golden, which):
    run = Official.read(golden, "eagle1_mha")
    mask = run.losses[f"{which}_loss_mask"].copy()
    mask[:, -1] = 0
    counts = HeadCounts(*[jnp.full(1, mask.sum(), jnp.float32)] * 2)
    hidden = Objective(reconstruction_weight=1.0, teacher_weight=0.0)
    (vloss, _), slope = loss_and_gradient(run, hidden, mask, 1, counts)
    (ploss, _), more = loss_and_gradient(run, Objective(teacher_weight=0.1, chunk_tokens=14), mask, 2, counts)
    assert float(vloss) == pytest.approx(run.losses[f"{which}_vloss"], abs=1e-5)
    assert float(ploss) == pytest.approx(0.1 * run.losses[f"{which}_ploss"], abs=1e-5)
    if which == "masked":
        gradient = jax.tree.map(jnp.add, slope, more)
        check_gradient(write(EAGLE.layout(run.loaded.drafter, {}), gradient), run.gradients)


@pytest.mark.parametrize("which", ["all", "masked"])
def test_eagle_3_with_its_training_time_test(golden, which):
    run = Official.read(golden, "eagle3_mha")
    mask, n_guesses = run.losses[f"{which}_loss_mask"], int(run.losses["length"])
    assert run.loaded.drafter.spec.num_draft_heads == n_guesses
    counts = HeadCounts(*[jnp.full(n_guesses, mask.size, jnp.float32)] * 2)
    objective = Objective(head_decay=0.8, chunk_tokens=14)
    (loss, metrics), gradient = loss_and_gradient(run, objective, mask, 2, counts)
    np.testing.assert_allclose(metrics.teacher, run.losses[f"{which}_plosses"], atol=1e-4)
    assert float(loss) == pytest.approx(run.losses[f"{which}_loss"], abs=3e-4)
    places = np.array([mask[:, k:].sum() for k in range(n_guesses)])
    np.testing.assert_allclose(metrics.agreement * mask.size / places, run.losses[f"{which}_acces"], atol=1e-4)
    if which == "masked":
        check_gradient(write(EAGLE_3.layout(run.loaded.drafter, {}), gradient), run.gradients)


def check_gradient(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(as_recorded(ours[name], values), values, atol=2e-5, err_msg=name)
