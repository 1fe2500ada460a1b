"""The host's part of constrained steps: parsers read emitted tokens, name forced ones and mask the nodes of a tree."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt32

from hydrajax.decoding.constraints import ALL, Constraint, words
from hydrajax.decoding.program import Program
from hydrajax.drafters.draft_lm_head import WORD

Constraints = Sequence[Constraint | None]  # of each sequence, None for none


class Plan(enum.Enum):
    """The nodes that a step verifies."""

    TREE = "the drafter's tree"
    JOINED = "the drafter's tree with a branch of forced tokens"
    FORCED = "forced tokens alone"


class HostWork:
    """The constraints of a batch during some steps.

    Attributes:
        ended: bool ``[B]`` sequences that take no further step.
        running: A step follows.
        plan: What it verifies.
        forced: int32 ``[B, n]`` tokens that must follow each root, then -1; n is at least 1.
    """

    def __init__(
        self,
        constraints: Constraints,
        stopped: Bool[np.ndarray, " B"],
        program: Program,
        vocab_size: int,
        steps: int,
        held_tokens: int = 0,
        until_one_ends: bool = False,
    ):
        """Prepare at most ``steps`` steps; `follow` must come first.

        Args:
            constraints: Of the sequences.
            stopped: Sequences that take no step.
            program: What is compiled.
            vocab_size: The base's.
            steps: Maximum number of steps.
            held_tokens: Forced tokens that the drafter's tree holds without a branch (`Program.held_tokens`).
            until_one_ends: No step follows the one in which a sequence ends.
        """
        self._constraints, self._stopped, self._vocab_size, self._steps = constraints, stopped, vocab_size, steps
        self._depth, self._forces = program.longest_path - program.forced_nodes, program.forced_nodes > 0
        self._held, self._until_one_ends = held_tokens, until_one_ends
        self._other = next(token for token in range(vocab_size - 1, -1, -1) if token not in program.eos_ids)
        self._ended_before: Bool[np.ndarray, " B"] | None = None  # the first step
        self.ended, self.running, self.plan = np.array(stopped), False, Plan.TREE
        self.forced = np.full((len(constraints), max(program.longest_path, 1)), -1, np.int32)

    def follow(
        self,
        done: Bool[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
        roots: Int[np.ndarray, " B"],
        tokens: Int[np.ndarray, "B room"],
    ) -> None:
        """Move the constraints to the next roots and plan the next step."""
        self.ended = done | self._stopped
        for row, constraint in enumerate(self._constraints):
            if constraint is not None and not self.ended[row]:
                constraint.follow([*tokens[row, : lengths[row]].tolist(), int(roots[row])])
                self.ended[row] = constraint.error is not None
        if self._ended_before is None:
            self._ended_before = self.ended
        one_ended = self._until_one_ends and (self.ended & ~self._ended_before).any()
        self.running = self._steps > 0 and not one_ended and not self.ended.all()
        self._steps -= 1
        if self.running and self._forces:
            self._force()

    def masks(self, tokens: Int[np.ndarray, "B N"], parents: Int[np.ndarray, "B N"]) -> UInt32[np.ndarray, "B N W"]:
        """Return which tokens may follow each node."""
        allowed = np.full((*tokens.shape, words(self._vocab_size)), ALL, np.uint32)
        for row, constraint in enumerate(self._constraints):
            if constraint is not None and not self.ended[row]:
                constraint.allow(tokens[row], parents[row], allowed[row])
        # Where no token is allowed, one is drawn nevertheless, and the next step ends the sequence. EOS would end it
        # as if the text were complete.
        allowed[~allowed.any(axis=2), self._other // WORD] = 1 << self._other % WORD
        return allowed

    def next_masks(self) -> UInt32[np.ndarray, "B 1 W"]:
        """Return which tokens may follow the texts."""
        nothing = np.full((len(self.ended), 1), -1, np.int32)
        return self.masks(nothing, nothing)

    def masks_after(self, paths: Int[np.ndarray, "B n d"]) -> UInt32[np.ndarray, "B n W"]:
        """Return which tokens may follow n paths of d tokens, the first of which is the root."""
        batch, n, d = paths.shape
        # A tree of n chains below the root; a path of the root alone is the root.
        tokens = np.concatenate([paths[:, 0, :1], paths[:, :, 1:].reshape(batch, -1)], axis=1)
        parents = np.arange(-1, tokens.shape[1] - 1, dtype=np.int32)
        parents[1 :: max(d - 1, 1)] = 0
        ends = np.arange(1, n + 1) * (d - 1)
        return self.masks(tokens, np.broadcast_to(parents, tokens.shape))[:, ends]

    def _force(self) -> None:
        """Fetch the forced tokens. If they are as many as the tree is deep, they replace it: it reaches no further. If
        it holds them by itself, they need no branch.
        """
        self.forced[:] = -1
        for row, constraint in enumerate(self._constraints):
            if constraint is not None and not self.ended[row]:
                found = constraint.forced(self.forced.shape[1])
                self.forced[row, : len(found)] = found
        none = (self.forced < 0).all()
        if not none and (self._depth == 0 or (self.forced[~self.ended, self._depth - 1] >= 0).all()):
            self.plan = Plan.FORCED
        elif none or (self._held and (self.forced[:, self._held :] < 0).all()):
            self.plan = Plan.TREE
        else:
            self.plan = Plan.JOINED


class AnyText:
    """A constraint that allows every token, and forces some, to compile with."""

    error = None

    def __init__(self, forced: list[int]):
        self._forced = forced

    def copy(self) -> AnyText:
        return self

    def follow(self, text):
        pass

    def forced(self, most):
        return self._forced[:most]

    def allow(self, tokens, parents, allowed):
        allowed[:] = ALL
