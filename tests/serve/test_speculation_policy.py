"""Speculative or plain steps: the kind with more tokens per second, for each batch size."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.serve.speculation_policy import FEWEST_STEPS, SpeculationPolicy


def simulated(seconds, tokens, turns: int, policy: SpeculationPolicy | None = None):
    """The choices for random batch sizes. seconds: of a step by (batch size, kind). tokens: per speculative step."""
    random, policy, chosen = np.random.default_rng(0), policy or SpeculationPolicy(), []
    for _ in range(turns):
        batch = int(random.choice([batch for batch, speculative in seconds if speculative]))
        speculative, steps = policy.next_burst(batch, 8.0)
        chosen.append((batch, speculative))
        took = steps * seconds[batch, speculative] * random.uniform(0.9, 1.1)
        emitted = round(batch * steps * (tokens * random.uniform(0.8, 1.2) if speculative else 1))
        policy.record(batch, speculative, steps, took, batch * steps, emitted)
    return chosen, policy


def shares(chosen) -> dict[int, float]:
    """The share of speculative steps in the later half, by batch size."""
    late = chosen[len(chosen) // 2 :]
    return {
        batch: float(np.mean([speculative for found, speculative in late if found == batch]))
        for batch in sorted({batch for batch, _ in late})
    }


# A speculative step costs 1.5 times a plain one at batch size 1 and 3 times at batch size 8.
SECONDS = {(1, True): 1.5, (1, False): 1.0, (2, True): 2.6, (2, False): 1.3, (8, True): 6.0, (8, False): 2.0}


@pytest.mark.parametrize(("tokens", "worth"), [(1.2, ()), (1.75, (1,)), (2.4, (1, 2)), (3.5, (1, 2, 8))])
def test_the_kind_of_step_with_more_tokens_per_second_is_chosen(tokens, worth):
    chosen, _ = simulated(SECONDS, tokens, 2000)
    for batch, share in shares(chosen).items():
        tried = 2 / 40
        assert share == pytest.approx(1.0 if batch in worth else 0.0, abs=tried)
        assert 0 < share < 1  # the other kind is probed now and then


def test_the_policy_follows_changing_acceptance():
    chosen, policy = simulated(SECONDS, 3.5, 300)
    assert shares(chosen)[8] > 0.9
    chosen, policy = simulated(SECONDS, 1.2, 4000, policy)
    assert shares(chosen)[8] < 0.1
    chosen, _ = simulated(SECONDS, 3.5, 8000, policy)
    assert shares(chosen)[8] > 0.9


def test_the_time_of_a_compilation_is_left_out():
    policy = SpeculationPolicy()
    for seconds in (100.0, 1.0):
        assert policy.is_worth_it(4)
        policy.record(4, True, 1, seconds, 4, 12)
    for seconds in (100.0, 2.0):
        assert not policy.is_worth_it(4)
        policy.record(4, False, 1, seconds, 4, 4)
    assert policy.is_worth_it(4)


def test_each_batch_size_has_its_own_tokens():
    """Larger batches have smaller trees."""
    policy = SpeculationPolicy()
    for batch, tokens in ((1, 3.0), (8, 1.5)):
        for speculative, seconds in ((True, 2.0), (False, 1.0)):
            for _ in range(2):
                policy.record(batch, speculative, 1, seconds, 10, round(10 * tokens))
    assert policy.is_worth_it(1)
    assert not policy.is_worth_it(8)


def test_bursts_of_both_kinds_take_as_long():
    policy = SpeculationPolicy()
    assert policy.next_burst(2, 1.0) == (True, FEWEST_STEPS)
    for speculative, seconds in ((True, 0.2), (False, 0.1)):
        for _ in range(2):
            policy.record(2, speculative, 1, seconds, 2, 8)
    bursts = {policy.next_burst(2, 1.0) for _ in range(100)}
    assert bursts == {(True, 5), (False, 10)}  # also a probe
    assert policy.next_burst(2, 1.0, can_be_plain=False) == (True, 5)


def test_steps_under_grammars_have_a_time_of_their_own():
    policy = SpeculationPolicy()
    for seconds in (100.0, 0.5):  # the first may include a compilation
        assert policy.constrained_steps(2, 2.0) == FEWEST_STEPS
        policy.record_constrained(2, 1, seconds)
    assert policy.constrained_steps(2, 2.0) == 4
    assert policy.next_burst(2, 2.0) == (True, FEWEST_STEPS)
