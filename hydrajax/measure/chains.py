"""What a chain of a draft model should be worth here: Leviathan et al. 2023 (3.1 to 3.3) with measured numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydrajax.measure.benchmark import room_for, step_timer
from hydrajax.measure.timing import interleaved_ms
from hydrajax.measure.way import Way
from hydrajax.trees import presets
from hydrajax.trees.speculation import best_length, expected_tokens, improvement

ROUNDS = 5


@dataclass(frozen=True)
class ChainEstimate:
    """The best chain by the closed form.

    acceptance: α, the mean chance that a drafted token is accepted. draft_cost: c, the time of drafting one in steps
    without a draft. length: K. tokens_per_step and improvement are those of this K.
    """

    acceptance: float
    draft_cost: float
    length: int
    tokens_per_step: float
    improvement: float

    def __str__(self) -> str:
        found = f"α {self.acceptance:.2f}, c {self.draft_cost:.2f}"
        if not self.length:
            return f"{found}: no chain should pay (Leviathan et al. 3.3: only where α > c)"
        return (
            f"{found}: chain-{self.length} should be the best chain, {self.tokens_per_step:.2f} tokens per step and "
            f"{self.improvement:.2f} times as fast as none (Leviathan et al. 3.3)"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(acceptance: float, draft_cost: float, most: int) -> ChainEstimate:
    """For chains of at most ``most`` tokens."""
    k = best_length(acceptance, draft_cost, most)
    gains = expected_tokens(acceptance, k), improvement(acceptance, k, draft_cost)
    return ChainEstimate(acceptance, draft_cost, k, *gains)


def draft_cost(way: Way, batch_size: int, context: int) -> float:
    """c, measured: proposing one token in autoregressive steps, both at the end of so many tokens, interleaved.

    The context is made as long or as short as timing and the model need it.
    """
    one = way.with_tree(presets.chain(1), "chain-1")
    room = room_for([one.tree])
    context = max(room + 1, min(context, way.model.config.max_positions))
    timed = {"draft": step_timer(one, batch_size, context, room).propose()}
    timed["base"] = step_timer(way.autoregressive(), batch_size, context, room).step()
    found = interleaved_ms(timed, ROUNDS)
    return found["draft"] / found["base"]
