"""Compare the greedy tokens of decoders: those that must be equal, and where others differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hydrajax.decoding.prompt_batch import common_length

TIE = 2e-3  # logits; float32 sums in another order differ by up to 1e-3 of them


@dataclass(frozen=True)
class Run:
    """A decoder of the comparison.

    Attributes:
        name: the program with its type, a comma, and the draft.
        like: the decoder with whose tokens these are compared.
        must: how they must agree: "equal"; "tie", where they may part at tokens of equal logits; "" if they need not.
        decode: the greedy ids after prompt ids.
    """

    name: str
    like: str
    must: str
    decode: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that differs.

    Attributes:
        name, like: the two decoders.
        prompt, at: the prompt's number, and the token's.
        got, expected: both tokens.
        gap: the expected token's logit minus the other's, in float32.
        allowed: the tokens need not be equal, or the logits are.
    """

    name: str
    like: str
    prompt: int
    at: int
    got: int
    expected: int
    gap: float
    allowed: bool

    def __str__(self) -> str:
        what = f"{self.name}: prompt {self.prompt}, token {self.at}: got {self.got}, expected {self.expected} as"
        tie = " (a tie)" if self.allowed else ", WRONG"
        return f"{what} {self.like}; their logits differ by {self.gap:.1e}{tie}"

    def as_dict(self) -> dict:
        return asdict(self)


def differences(
    runs: Mapping[str, Run],
    outputs: Mapping[str, Sequence[np.ndarray]],
    prompts: Sequence[np.ndarray],
    logits_after: Callable[[np.ndarray], np.ndarray],
) -> list[Difference]:
    """Return the first difference of each decoder and prompt whose tokens must agree.

    Args:
        runs: by name.
        outputs: the tokens of each decoder for each prompt.
        logits_after: returns the float32 logits after ids.
    """
    found = []
    for name, run in runs.items():
        if not run.must or run.like not in outputs:
            continue
        for i, (prompt, got, expected) in enumerate(zip(prompts, outputs[name], outputs[run.like], strict=True)):
            at = first_difference(got, expected)
            if at is None:
                continue
            logits = logits_after(np.concatenate([prompt, expected[:at]]))
            pair = [int(tokens[at]) if at < len(tokens) else -1 for tokens in (got, expected)]
            gap = float(logits[pair[1]] - logits[pair[0]]) if min(pair) >= 0 else float("inf")
            allowed = run.must == "tie" and abs(gap) <= TIE
            found.append(Difference(name, run.like, i, at, *pair, gap, allowed))
    return found


def first_difference(got: np.ndarray, expected: np.ndarray) -> int | None:
    """Return the number of the first token that differs or is missing; None for equal ids."""
    at = common_length(got, expected)
    return None if at == len(got) == len(expected) else at
