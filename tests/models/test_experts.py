"""The router of a mixture of experts, and the ways to multiply with the chosen experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.refusals import refusal
from hydrajax.models import experts
from hydrajax.models.expert_settings import Experts
from hydrajax.models.experts import clamped_swiglu, expert_sum, route
from hydrajax.models.layers import ACTIVATIONS
from hydrajax.ops import trace
from hydrajax.ops.cpu.backend import Cpu

COUNT, PER_TOKEN, WIDTH, MLP = 6, 2, 48, 40


def problem(n_tokens: int, dtype=np.float32):
    """Return tokens whose experts are 1, 2 and 4, with NaN in the weights of all others."""
    random = np.random.default_rng(n_tokens)
    x = random.normal(size=(2, n_tokens, WIDTH)).astype(dtype)
    ids = np.sort(random.permuted(np.tile([1, 2, 4], (2, n_tokens, 1)), axis=-1)[..., :PER_TOKEN], axis=-1)
    weights = random.uniform(0.1, 1, ids.shape).astype(np.float32)
    gate_up = random.normal(0, WIDTH**-0.5, (COUNT, WIDTH, 2, MLP)).astype(dtype)
    down = random.normal(0, MLP**-0.5, (COUNT, MLP, WIDTH)).astype(dtype)
    for kernels in (gate_up, down):
        kernels[[0, 3, 5]] = np.nan
    return x, ids.astype(np.int32), weights, gate_up, down


def expected(x, ids, weights, gate_up, down, activation=None, biases=None) -> np.ndarray:
    x, gate_up, down = (a.astype(np.float32) for a in (x, gate_up, down))
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        for expert, weight in zip(ids[place], weights[place], strict=True):
            *gate, up = (x[place] @ gate_up[expert, :, part] for part in range(gate_up.shape[2]))
            if biases is None:
                inner = gate[0] / (1 + np.exp(-gate[0])) * up if gate else np.maximum(up, 0) ** 2
                out[place] += weight * (inner @ down[expert])
            else:
                inner = activation(gate[0] + biases[0][expert, 0], up + biases[0][expert, 1])
                out[place] += weight * (inner @ down[expert] + biases[1][expert])
    return out


def summed(*args):
    return expert_sum(*args, COUNT, ACTIVATIONS["silu" if args[3].shape[2] == 2 else "relu2"])


@pytest.fixture(params=["kernels", "blocks"])
def way(request, monkeypatch):
    """Choose how to multiply: by our CPU kernels, if they are built, or by XLA, a block of rows at a time."""
    if request.param == "blocks":
        monkeypatch.setattr(experts, "ROWS_OF_BLOCK", 8)
        monkeypatch.setattr(Cpu, "multiplies_pairs", lambda *_: False)


@pytest.mark.parametrize(("n_tokens", "dtype"), [(1, np.float32), (40, np.float32), (7, jnp.bfloat16)])
def test_only_chosen_experts_are_read(way, n_tokens, dtype):
    args = problem(n_tokens, dtype)
    tolerance = {"atol": 1e-5} if dtype == np.float32 else {"atol": 0.05}
    np.testing.assert_allclose(jax.jit(summed)(*args).astype(np.float32), expected(*args), rtol=0, **tolerance)
    if n_tokens == 40:  # without a gate
        args = *args[:3], args[3][:, :, 1:], args[4]
        np.testing.assert_allclose(jax.jit(summed)(*args), expected(*args), rtol=0, atol=1e-5)


def test_biases_and_the_clamped_swiglu(way, monkeypatch):
    """In every way to multiply, of which a GPU gathers the experts of one row."""
    random = np.random.default_rng(0)
    biases = random.normal(size=(COUNT, 2, MLP)).astype(np.float32), random.normal(size=(COUNT, WIDTH))
    biases = biases[0], biases[1].astype(np.float32)

    def swiglu(gate, up):
        gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
        return gate / (1 + np.exp(-1.7 * gate)) * (up + 1)

    for n_tokens in (1, 20):
        if n_tokens == 1:
            monkeypatch.setattr(Cpu, "gathers_experts", lambda self, rows: True)
        args = problem(n_tokens)
        found = jax.jit(lambda *args: expert_sum(*args, COUNT, partial(clamped_swiglu, 1.7, 0.5), biases))(*args)
        np.testing.assert_allclose(found, expected(*args, swiglu, biases), rtol=0, atol=1e-5)
        monkeypatch.setattr(Cpu, "gathers_experts", lambda self, rows: False)


@pytest.mark.skipif(not trace.has_cpu_kernels(), reason="XLA's products of one row sum in another order")
def test_a_token_has_the_same_bits_in_any_batch():
    x, ids, weights, *kernels = problem(40)
    together = jax.jit(summed)(x, ids, weights, *kernels)[:, 3:4]
    alone = jax.jit(summed)(*(a[:, 3:4] for a in (x, ids, weights)), *kernels)
    np.testing.assert_array_equal(alone, together)


def test_gradients_are_those_of_the_sum_over_all_experts(way):
    x, ids, weights, gate_up, down = problem(5)
    gate_up, down = np.nan_to_num(gate_up), np.nan_to_num(down)

    def by_hand(x, weights, gate_up, down):
        gate, up = jnp.moveaxis(jnp.einsum("btd,edpf->btepf", x, gate_up), 3, 0)
        outs = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, down)
        share = jnp.sum(jnp.where(ids[..., None] == jnp.arange(COUNT), weights[..., None], 0), axis=2)
        return jnp.einsum("bted,bte->btd", outs, share)

    slope = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    arrays = x, weights, gate_up, down
    found, wanted = (
        jax.jit(jax.grad(lambda args, f=f: jnp.sum(f(*args) * slope)))(arrays)
        for f in (lambda x, w, *kernels: summed(x, ids, w, *kernels), by_hand)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


routed = jax.jit(route, static_argnums=1)


def test_ties_go_to_the_first_expert():
    logits = np.float32([[1, 2, 2, 0, 2], [0, 0, 0, 0, 0]])
    ids, weights = routed(logits, Experts(5, 2, 8, normalized=True), None)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(weights, [[0.5, 0.5], [0.5, 0.5]])


def test_weights_without_and_with_division_by_their_sum():
    logits = np.log(np.float32([[1, 5, 2, 2]]))
    np.testing.assert_allclose(routed(logits, Experts(4, 2, 8), None)[1], [[0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(routed(logits, Experts(4, 2, 8, normalized=True, scale=7), None)[1], [[5, 2]], rtol=1e-6)


def test_a_bias_chooses_and_does_not_weigh():
    logits, bias = np.float32([[0, 0, 1, -1]]), np.float32([0, 0, -9, 9])
    ids, weights = routed(logits, Experts(4, 2, 8, scores="sigmoid", choice_bias=True), bias)
    np.testing.assert_array_equal(ids, [[0, 3]])
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[0, 1]])), rtol=1e-6)


def test_groups_with_the_best_pairs_of_experts():
    """The group of the best expert is not among them."""
    logits = np.float32([[9, -9, -9, 1, 1, -9, 2, 0, -9]])
    experts = Experts(9, 2, 8, scores="sigmoid", groups=3, chosen_groups=1)
    np.testing.assert_array_equal(routed(logits, experts, None)[0], [[3, 4]])
    np.testing.assert_array_equal(routed(logits, Experts(9, 2, 8, scores="sigmoid"), None)[0], [[0, 6]])


def test_impossible_settings():
    for settings, *pieces in (
        ({"per_token": 9}, "per_token", "9", "at most 8"),
        ({"per_token": 5, "groups": 4, "chosen_groups": 2}, "per_token", "5", "at most 4"),
        ({"groups": 3}, "groups", "3", "equal parts of 8"),
        ({"chosen_groups": 2}, "chosen_groups", "2", "at most 1"),
        ({"scores": "relu"}, "scores", "relu", "softmax"),
        ({"width": 0}, "width", "0", "at least 1"),
    ):
        fields = {"count": 8, "per_token": 2, "width": 4} | settings
        refusal(lambda fields=fields: Experts(**fields), *pieces)
