"""A split pair of base and draft: its roofline against bytes, and the simulator against the closed form."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import ssd_roofline
from ssd_roofline import pair_times
from ssd_simulator import Outcomes, Times, best, predict, simulate

from helpers.operator_counts import flops, moved
from helpers.refusals import assert_refused
from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.roofline.passes import forward
from hydrajax.bench.shapes import PRESETS
from hydrajax.models.llama import Llama
from hydrajax.ssd.fan_out import FanOut

BASE, DRAFT, DEVICE = PRESETS["7b"], PRESETS["1b"], DEVICES["H200"]


def bytes_read(config, context: int) -> float:
    """Bytes of one token: every matrix of the layers, the lm head, and the cache, in 16 bits."""
    c = config
    heads = c.n_heads + 2 * c.n_kv_heads + c.n_heads
    layer = c.width * (heads * c.head_dim + 3 * c.mlp_width)
    cache = 2 * context * c.n_kv_heads * c.head_dim
    return 2.0 * (c.n_layers * (layer + cache) + c.width * c.vocab_size)


def test_small_passes_take_as_long_as_their_weights():
    times = pair_times(DEVICE, BASE, DRAFT, depth=4, outcomes=8, context=1024)
    assert times.verify == pytest.approx(bytes_read(BASE, 1024) / DEVICE.bandwidth, rel=0.03)
    assert times.draft == pytest.approx(4 * bytes_read(DRAFT, 1024) / DEVICE.bandwidth, rel=0.05)
    # A pass for eight outcomes reads the same weights, so preparing is a pass more than drafting, and a little.
    assert 5 / 4 < times.prepare / times.draft < 1.1 * 5 / 4


def test_operators_are_linear_in_the_slots_of_the_cache():
    for slots in [8, 1000]:
        model = Llama(PRESETS["8b"], jnp.bfloat16)
        traced, ours = forward(model, 2, 8, slots), ssd_roofline._forward(model, 2, 8, slots)
        assert (moved(ours), flops(ours)) == (moved(traced), flops(traced))


TIMES = Times(verify=10.0, draft=6.0, prepare=9.0, transfer=0.25, take=0.5)
SOME = Outcomes(np.array([[0.2, 0.05], [0.1, 0.1], [0.3, 0.05]]), np.array([0.05, 0.1, 0.05]))


def test_simulated_rounds_agree_with_the_closed_form():
    near = {"hit_rate": {"abs": 0.01}, "ready": {"abs": 0.01}, "hidden": {"abs": 0.02}}
    near |= {"seconds": {"rel": 0.01}, "tokens_per_second": {"rel": 0.02}}
    for batch, prepare in itertools.product((1, 3), (4.0, 14.0)):
        times, fan_out = dataclasses.replace(TIMES, prepare=prepare), FanOut((2, 1, 1))
        told = predict(times, SOME, fan_out, batch)
        played = simulate(times, SOME, fan_out, batch, rounds=20_000)
        assert (told.hit_rate, told.ready) == pytest.approx((0.65, 0.65**batch))
        for name, tolerance in near.items():
            assert getattr(played, name) == pytest.approx(getattr(told, name), **tolerance), name


def test_limits():
    always = Outcomes(np.array([[0.5], [0.5]]), np.zeros(2))
    everything, none = FanOut((1, 1)), FanOut((0, 0))
    hit = predict(TIMES, always, everything)
    assert hit.seconds == max(10.0 + 0.5, 9.0) + 0.5  # all of the drafting is hidden
    assert hit.hidden == 1
    assert hit.tokens_per_second == pytest.approx(1.5 / 11)
    slow = predict(dataclasses.replace(TIMES, prepare=20.0), always, everything)
    assert slow.seconds == 20.5  # preparing takes longest
    assert slow.hidden < 0
    assert slow.speedup == pytest.approx(17 / 20.5)
    miss = predict(dataclasses.replace(TIMES, prepare=0.0), always, none)
    assert miss.seconds == miss.in_turn == TIMES.in_turn == 10 + 0.5 + 0.5 + 6
    assert (miss.hidden, miss.speedup, miss.ready) == (0, 1, 0)


def test_outcomes_from_counts():
    found = Outcomes.counted(np.array([[4, 2, 1], [2, 0, 1]]))
    np.testing.assert_allclose(found.accept_lengths, [0.7, 0.3])
    assert found.tokens_per_step == pytest.approx(1.3)
    assert found.hit_rate(FanOut((1, 0))) == pytest.approx(0.4)
    assert found.best(1) == FanOut((1, 0))
    assert found.best(100) == FanOut((2, 1))


def test_outcomes_under_the_power_law():
    """Tokens per step as in Leviathan et al.; the power law gives the miss rate."""
    found = Outcomes.power_law(4, 0.8, exponent=1.0, ranks=200)
    assert found.tokens_per_step == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert found.hit_rate(FanOut((3,) * 5)) == pytest.approx(1 - 1 / 4)
    assert Outcomes.power_law(2, 0.6, exponent=0.7).exponent == pytest.approx(0.7)
    assert Outcomes(np.array([[0.5], [0.5]]), np.zeros(2)).exponent == float("inf")


def test_the_best_fan_out():
    """Add outcomes until preparing takes longer than verifying."""
    found = Outcomes.power_law(4, 0.8)
    speed = best(lambda total: dataclasses.replace(TIMES, prepare=0.5 * total), found, range(0, 60))
    assert speed.fan_out.total == 21  # 10.5 seconds, as long as verifying and two transfers
    assert speed.hidden == pytest.approx(speed.hit_rate)
    cheap = best(lambda total: TIMES if total else Times(10.0, 6.0), found, (0, 4, 64, 80), within=0.01)
    assert cheap.fan_out.total == 64  # the last sixteen hardly raise the hit rate
    idle = best(lambda total: dataclasses.replace(TIMES, prepare=30.0 if total else 0.0), found, (0, 8))
    assert idle.fan_out.total == 0


def test_refusals():
    one = np.array([[0.5]]), np.zeros(1)
    assert_refused(Outcomes, (*one, "outcomes: got a sum of 0.5, expected probabilities that sum to 1"))
    assert_refused(Outcomes.counted, (np.zeros((2, 3)), "outcomes: got no counts"))
    assert_refused(SOME.hit_rate, (FanOut((0,) * 5), "fan_out: got a chain of 4, expected 2"))
