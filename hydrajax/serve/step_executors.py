"""The executors of the ways to take a step, by batch size (`hydrajax.scheduling`)."""

from __future__ import annotations

import time
from collections.abc import Mapping

import jax
import numpy as np

from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.engine import true_float32
from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.scheduling.choices import CATCH_UP, NONE, StepChoice, smaller
from hydrajax.scheduling.deferred import Deferred
from hydrajax.scheduling.step_costs import StepCosts
from hydrajax.sharding import jit_on
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree


class StepExecutors:
    """The executors of all choices, which share one kind of state.

    Attributes:
        choices: the ways to take a step.
        offered: by batch size, the indices of its choices: the wanted tree, a smaller one, none.
        costs: the measured seconds of steps.
        waiting_costs: those of `catch_up`.
        warming_up: choices other than the wanted tree wait until their programs are compiled.
    """

    def __init__(self, executor: Executor, spec: DecodeSpec, trees: Mapping[int, CandidateTree], chooses: bool):
        """Build the executors.

        Args:
            executor: base and draft.
            spec: how to decode, apart from the tree.
            trees: the wanted tree by batch size.
            chooses: also offer a smaller tree, and none.

        Raises:
            HydrajaxError: for a tree that does not suit the drafter.
        """
        drafter = spec.drafter
        self.chooses = chooses and drafter.spec.depth > 0
        offered = {batch: [tree] for batch, tree in trees.items()}
        if self.chooses:
            for batch, tree in trees.items():
                # With a branch next to the tree, the root alone is a small tree.
                small = presets.root() if drafter.spec.branch_nodes else smaller(tree)
                offered[batch] += [] if small is None or small == tree else [small]
        made = list(dict.fromkeys(tree for each in offered.values() for tree in each))
        specs = [spec.replace(tree=tree) for tree in made]
        for each in specs:
            each.check(executor.model.config)
        choices = [StepChoice.of(drafter.spec, tree) for tree in made]
        self.offered = {batch: [made.index(tree) for tree in each] for batch, each in offered.items()}
        if self.chooses:
            # The draft observes nothing in steps without it, and catches up before the next ones with it.
            self._deferred = Deferred(drafter, executor.model)
            specs = [each.replace(drafter=self._deferred) for each in specs]
            specs.append(spec.replace(drafter=self._deferred.missing(), tree=presets.root()))
            for each in self.offered.values():
                each.append(len(choices))
            choices.append(NONE)
            self._catch_up = jit_on(executor.mesh, self._caught_up, donate_argnums=1)
        self.choices, self.costs, self.waiting_costs = tuple(choices), StepCosts(), StepCosts()
        self._executors = [executor.with_spec(each) for each in specs]
        self._stepped: set[tuple[int, int, int]] = set()  # shapes and choices of steps that have run
        self._caught: set[tuple[int, int]] = set()  # shapes in which the draft has caught up
        self.warming_up = False

    def __iter__(self):
        return iter(self._executors)

    def wanted(self, batch: int) -> Executor:
        """Return the executor of the wanted tree."""
        return self._executors[self.offered[batch][0]]

    def is_compiled(self, batch: int, cache_len: int, choice: int) -> bool:
        """Return whether steps of this choice and shape have run before."""
        return (batch, cache_len, choice) in self._stepped

    def available(self, batch: int, cache_len: int) -> list[int]:
        """Return the choices for steps of this shape, the wanted tree first."""
        first, *others = self.offered[batch]
        return [first, *(one for one in others if not self.warming_up or self.is_compiled(batch, cache_len, one))]

    def advance(
        self, state: State, cache_len: int, stopped: np.ndarray, steps: int, choice: int
    ) -> tuple[State, Snapshot]:
        """Take at most ``steps`` steps. After steps without a draft, `catch_up` must come before others."""
        found = self._executors[choice].advance(state, stopped, steps)
        self._stepped.add((len(stopped), cache_len, choice))
        return found

    def catch_up(self, state: State, cache_len: int) -> State:
        """Let the draft read the tokens of steps without it; ``state`` is donated."""
        began = time.perf_counter()
        found = jax.block_until_ready(self._catch_up(self._executors[0].params, state))
        shape = len(found.target.root), cache_len
        if shape in self._caught:  # otherwise this was a compilation
            self.waiting_costs.record(shape, CATCH_UP, time.perf_counter() - began)
        self._caught.add(shape)
        return found

    def compile(self, state: State, cache_len: int, batch: int, choice: int) -> State:
        """Compile steps of this choice, and `catch_up` with those without a draft.

        If there are several choices, two steps are timed, with which the costs of the shape begin. All sequences of
        ``state`` must be able to take steps.
        """
        running, seconds = np.zeros(batch, bool), []
        if not self.chooses:
            return self.advance(state, cache_len, ~running, 1, choice)[0]
        for _ in range(3):  # the first one compiles
            began = time.perf_counter()
            state, snapshot = self.advance(state, cache_len, running, 1, choice)
            seconds.append(time.perf_counter() - began)
        if not snapshot.done.any():
            self.costs.record((batch, cache_len), self.choices[choice], min(seconds))
        if not self.choices[choice].drafts:
            for _ in range(2):  # the first one compiles
                state = self.catch_up(state, cache_len)
        return state

    def _caught_up(self, params: Params, state: DecodeState) -> DecodeState:
        engine = self._executors[0].engine
        with true_float32(engine.model.dtype):
            draft = self._deferred.catch_up(params.draft, state.draft, state.target.root, engine.bind(params))
        return state._replace(draft=draft)
