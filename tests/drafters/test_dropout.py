"""Dropout of the draft heads, and the logical axes of their fresh parameters.

The heads are identities, so their output shows the dropout masks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import forced_logits
from helpers.lab import quick_jit
from helpers.noise import draft_noise
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.ops import drop, trace

WIDTH, VOCAB = 32, 61  # of the `tiny_model` fixture
RATE = 0.25
TOKENS = np.zeros((4, 64), np.int32)
ONES = np.ones((4, 64, WIDTH), np.float32)  # 8192 elements: shares are accurate to 0.02


def fresh(drafter, base, seed=0):
    return quick_jit(lambda rng: drafter.init(rng, base))(jax.random.key(seed))


def share_kept(values, scale: float) -> float:
    """Return the share of nonzero elements, all of which must equal ``scale``."""
    values = np.asarray(values)
    np.testing.assert_allclose(values[values != 0], scale, rtol=1e-6)
    return float((values != 0).mean())


@pytest.mark.parametrize(("kind", "n_layers"), [(MedusaHeads, 1), (HydraHeads, 3)])
def test_every_block_has_its_own_mask(base, kind, n_layers):
    """This includes a shared block that is applied n times: equal masks would keep 0.75 of the elements, not 0.75^n."""
    drafter = kind(2, WIDTH, VOCAB, n_layers, dropout=RATE)
    params = fresh(drafter, base)  # fresh heads are identities
    read = quick_jit(lambda params, key: drafter.teacher_hidden(params, ONES, TOKENS, base, key))
    np.testing.assert_array_equal(read(params, None)[1], ONES)
    hidden = read(params, jax.random.key(1))
    for values in hidden:
        assert share_kept(values, (1 - RATE) ** -n_layers) == pytest.approx((1 - RATE) ** n_layers, abs=0.02)
    assert np.any(np.asarray(hidden[0]) != np.asarray(hidden[1])), "two heads share their masks"


def test_the_path_of_a_conditioned_block_is_dropped_too(base):
    drafter = HydraHeads(2, WIDTH, VOCAB, dropout=RATE)
    params = fresh(drafter, base)
    block = params["head_1"]["conditioned"]
    block["shared_kernel"] = jnp.zeros_like(block["shared_kernel"])
    block["path_kernel"] = block["path_kernel"].at[:, 1].set(jnp.eye(WIDTH))  # passes E(token t + 2) on
    read = quick_jit(lambda key: drafter.teacher_hidden(params, ONES, TOKENS, base, key)[1])(jax.random.key(1))
    embedding = np.asarray(base.params["embedding"])[0]
    assert share_kept(np.asarray(read) / embedding, 1 / (1 - RATE)) == pytest.approx(1 - RATE, abs=0.02)


@pytest.mark.parametrize("prefix", [False, True])
def test_the_lm_head_drops_its_own_input(base, prefix):
    drafter = MedusaHeads(1, WIDTH, WIDTH, dropout=RATE)
    params = {"head_0": {"lm_kernel": jnp.eye(WIDTH)}}
    if prefix:
        drafter, params = drafter.with_prefix(base.config), {"heads": params}
    np.testing.assert_array_equal(drafter.head_logits(params, 0, ONES, base), ONES)
    dropped = drafter.head_logits(params, 0, ONES, base, jax.random.key(2))
    assert share_kept(dropped, 1 / (1 - RATE)) == pytest.approx(1 - RATE, abs=0.02)


def test_decoding_and_evaluation_never_drop(base):
    plain, dropping = (HydraHeads(2, WIDTH, VOCAB, 2, dropout=rate).with_prefix(base.config) for rate in (0.0, 0.9))
    params = draft_noise(plain, base, seed=3)
    aux_hidden_states = np.random.default_rng(0).standard_normal((1, 5, WIDTH)).astype(np.float32)

    def logits(drafter):
        forward = quick_jit(lambda params: forced_logits(drafter, params, aux_hidden_states, TOKENS[:1, :5], base))
        return np.asarray(forward(params))

    np.testing.assert_array_equal(logits(plain), logits(dropping))


@pytest.mark.parametrize("tokens", [8, 13])
def test_a_tpu_drops_the_same_elements(tokens):
    """There the mask is stored, a bit for each element."""
    x, key = np.random.default_rng(1).standard_normal((2, tokens, 6)).astype(np.float32), jax.random.key(5)
    with trace.tracing(platform=trace.Platform("tpu", 1)):
        program = jax.jit(lambda x: drop(x, RATE, key)).lower(x)
    assert "ui8" in program.as_text()
    np.testing.assert_array_equal(program.compile()(x), jax.jit(lambda x: drop(x, RATE, key))(x))


def test_bad_rates_are_rejected():
    for rate in (-0.1, 1.0, float("nan")):
        for kind in (MedusaHeads, HydraHeads):
            with pytest.raises(HydrajaxError, match=r"dropout: got .*, expected at least 0 and less than 1"):
                kind(1, WIDTH, VOCAB, dropout=rate)
