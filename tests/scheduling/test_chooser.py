"""The choice of steps by measured cost and counted acceptance, on simulated devices and texts."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.scheduling.acceptance import Acceptance
from hydrajax.scheduling.choices import NONE, StepChoice, smaller
from hydrajax.scheduling.chooser import PROBE_SHARE, Chooser
from hydrajax.scheduling.step_costs import OUTLIER, StepCosts
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, DynamicTree

LARGE, SMALL = StepChoice("10 nodes", 10, 4), StepChoice("4 nodes", 4, 3)
CHOICES = LARGE, SMALL, NONE


class Device:
    """Steps of random texts. rates: of a draft token, by request; the wider tree accepts more of them."""

    def __init__(self, seed: int = 0, base: float = 1.0, per_node: float = 0.1, draft: float = 0.3):
        self.random = np.random.default_rng(seed)
        self.base, self.per_node, self.draft = base, per_node, draft

    def seconds(self, batch: int, choice: StepChoice) -> float:
        return self.base + self.per_node * batch * choice.nodes + self.draft * choice.drafts

    def rate(self, choice: StepChoice, rate: float) -> float:
        return min(rate * (1.15 if choice is LARGE else 1.0), 1.0)

    def best(self, batch: int, rates) -> float:
        """The tokens per second of the best fixed choice."""
        return max(
            sum(sum(self.rate(choice, rate) ** d for d in range(choice.depth + 1)) for rate in rates)
            / self.seconds(batch, choice)
            for choice in CHOICES
        )

    def run(self, chooser: Chooser, rates, bursts: int, sequences=None) -> tuple[float, np.ndarray]:
        """Return the tokens per second of the later half, and the bursts of each choice there."""
        batch, tokens, time, used = len(rates), 0, 0.0, np.zeros(len(CHOICES), int)
        sequences = sequences or [chooser.acceptance.sequence() for _ in rates]
        for number in range(bursts):
            chosen = chooser.choose((batch, 256), sequences, range(len(CHOICES)))
            choice = CHOICES[chosen.choice]
            steps = min(8, chosen.most_steps or 8)
            own = np.array([self.rate(choice, rate) for rate in rates])[:, None, None]
            hits = self.random.random((batch, steps, max(choice.depth, 1))) < own
            accepted = np.cumprod(hits, axis=2).sum(axis=2) * choice.drafts
            seconds = steps * self.seconds(batch, choice) * self.random.uniform(0.9, 1.2)
            emitted = int(accepted.sum()) + batch * steps
            chooser.record(chosen, (batch, 256), seconds, steps, sequences, accepted, emitted)
            if number >= bursts // 2:
                tokens, time = tokens + emitted, time + seconds
                used[chosen.choice] += 1
        return tokens / time, used


def made(device: Device, batches=(1, 2, 8, 32)) -> Chooser:
    """A chooser whose costs were measured at a warm-up."""
    costs = StepCosts()
    for batch in batches:
        for choice in CHOICES:
            costs.record((batch, 256), choice, device.seconds(batch, choice))
    return Chooser(CHOICES, costs)


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.95])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_throughput_is_near_that_of_the_best_fixed_choice(batch, rate):
    device = Device()
    chooser = made(device)
    found, _ = device.run(chooser, [rate] * batch, 600)
    # The simulated seconds are 1.05 times the device's on average.
    assert found >= 0.97 * device.best(batch, [rate] * batch) / 1.05
    assert chooser.lost <= 1.2 * PROBE_SHARE * chooser.seconds


def test_trees_shrink_with_the_batch_and_grow_with_acceptance():
    device = Device(per_node=0.05)
    wanted = {(1, 0.95): 0, (8, 0.6): 1, (32, 0.3): 2}
    for (batch, rate), choice in wanted.items():
        _, used = device.run(made(device), [rate] * batch, 300)
        assert np.argmax(used) == choice, (batch, rate, used)


def test_other_choices_are_probed_rarely_and_changes_are_found():
    """First nothing is accepted, then nearly everything; a new request of the second kind is drafted soon."""
    device = Device()
    chooser = made(device)
    _, used = device.run(chooser, [0.02] * 8, 1000)
    assert used[2] > 0.95 * used.sum()
    assert chooser.probes > 5
    _, used = device.run(chooser, [0.97] * 8, 3000)
    assert used[2] < 0.1 * used.sum()


def test_a_sequence_that_accepts_more_than_others_gets_a_tree_for_itself():
    device = Device()
    chooser = made(device)
    device.run(chooser, [0.1, 0.1], 400)
    sequence = chooser.acceptance.sequence()
    sequence.add(np.full(4, 20.0), np.full(4, 2.0))
    assert chooser.choose((1, 256), [sequence], range(3)).choice != 2
    assert chooser.choose((1, 256), [chooser.acceptance.sequence()], range(3)).choice == 2


def test_a_single_available_choice_is_taken_and_the_wanted_one_before_any_measurement():
    chooser = Chooser(CHOICES, StepCosts())
    sequences = [chooser.acceptance.sequence()]
    assert chooser.choose((1, 256), sequences, [1]).choice == 1
    assert chooser.choose((1, 256), sequences, [0, 1, 2]).choice == 0


def test_costs_are_means_that_outliers_hardly_move():
    costs, shape = StepCosts(), (4, 256)
    costs.record(shape, LARGE, 50.0)  # at a warm-up, on a busy machine
    for _ in range(60):
        costs.record(shape, LARGE, 1.0)
    assert costs.measured(shape, LARGE) == pytest.approx(1.0, rel=0.2)
    before = costs.measured(shape, LARGE)
    costs.record(shape, LARGE, 1000.0)
    assert costs.measured(shape, LARGE) <= before * (1 + (OUTLIER - 1) / 10) * 1.001


def test_a_cost_that_was_not_used_for_long_is_replaced_quickly():
    """Such as one that was measured while other programs ran: few probes must correct it."""
    costs, shape = StepCosts(), (4, 256)
    for _ in range(20):
        costs.record(shape, LARGE, 10.0)
    for _ in range(4):
        for _ in range(60):
            costs.record(shape, NONE, 1.0)
        costs.record(shape, LARGE, 2.0)
    assert costs.measured(shape, LARGE) < 3.0
    assert costs.measured(shape, NONE) == pytest.approx(1.0)


def test_unseen_shapes_are_interpolated():
    costs = StepCosts()
    assert costs.seconds((1, 256), NONE) is None

    def true(batch, choice):
        return 2.0 + 0.1 * batch + 0.05 * batch * choice.nodes + choice.drafts * (0.5 + 0.02 * batch)

    for batch in (1, 4, 32):
        for choice in CHOICES:
            costs.record((batch, 256), choice, true(batch, choice))
    for batch in (2, 8, 16):
        for choice in (*CHOICES, StepChoice("6 nodes", 6, 3)):
            assert costs.seconds((batch, 256), choice) == pytest.approx(true(batch, choice), rel=0.1)
    # Between those with less and with more of everything, whatever the fit says.
    only = StepCosts()
    only.record((1, 256), NONE, 1.0)
    only.record((8, 1024), LARGE, 1.5)
    assert 1.0 <= only.seconds((2, 512), SMALL) <= 1.5


def test_expected_tokens_are_those_of_the_counted_rates():
    acceptance = Acceptance(CHOICES)
    random, rates = np.random.default_rng(1), np.array([0.8, 0.5, 0.3, 0.2])
    sequences = [acceptance.sequence() for _ in range(2)]
    total = []
    for _ in range(300):
        accepted = np.cumprod(random.random((2, 8, 4)) < rates, axis=2).sum(axis=2)
        total.append(accepted.mean() + 1)
        acceptance.record(0, sequences, accepted)
    np.testing.assert_allclose(acceptance.rates()[0], rates, atol=0.05)
    found = acceptance.expected_tokens([acceptance.sequence()])
    assert found[0] == pytest.approx(np.mean(total), rel=0.03)
    assert found[2] == 1
    assert 1 < found[1] < found[0]  # never run: from the same rates, and less deep
    # Steps that are not counted change nothing.
    before = acceptance.expected_tokens(sequences)
    acceptance.record(0, sequences, np.full((2, 3), -1))
    np.testing.assert_array_equal(acceptance.expected_tokens(sequences), before)


def test_smaller_trees_keep_the_likeliest_nodes_of_the_wanted_one():
    tree = presets.by_name("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0]]")
    found = smaller(tree)
    assert found.choices == ((0,), (0, 0), (0, 0, 0))
    assert smaller(presets.chain(5)).choices == ((0,), (0, 0))
    for name in ("mc_sim_7b_63", "cartesian-4x2x2"):
        whole = presets.by_name(name)
        assert set(smaller(whole).choices) < set(whole.choices)
    assert smaller(DynamicTree(60, 7, 10)).size == 20
    assert smaller(BestFirstTree(16)) == BestFirstTree(6)
    assert smaller(presets.chain(2)) is None
    assert smaller(presets.root()) is None
    for size, expansions, top_k in ((8, 5, 3), (8, 2, 4), (8, 3, 4), (5, 1, 2)):
        assert smaller(DynamicTree(size, expansions, top_k)).size == 3
