"""Compare two answers, and tell a tie of two tokens from a fault by their log-probabilities."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.certify.servers.answers import Answer, Token
from hydrajax.certify.servers.questions import Question
from hydrajax.text.continuation import INCOMPLETE

TIE, FAULT = "tie", "fault"
UNJUDGED = "unjudged"  # valid structured output of which the gap is unknown; asked again, the server gives the other
END = re.compile(r"<[^\s<>]*>|\[[A-Z]+\]|")  # tokens that end a text: servers write them as nothing or as such names
# Two tokenisations of one text differ before the texts do.
NEAR_TOKENS = 3
MASKED = 1e-3  # nats
CONTEXT = 60  # characters


@dataclass(frozen=True)
class Finding:
    """A difference or a mistake in one answer.

    Attributes:
        kind: such as "text", "finish reason" or "stop string".
        verdict: `TIE`, `FAULT` or `UNJUDGED`.
        setting: how the question was asked, such as "8 at once".
        details: for a different text: ``position`` (characters), ``context`` (the end of the common text), ``expected``
            and ``found`` (tokens or texts there), ``gap`` (nats, None if unknown), ``at_least`` (the gap is a lower
            bound), ``judged_by``.
    """

    kind: str
    verdict: str
    setting: str
    question: Question
    message: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """The log-probability of the chosen token less that of the other side's token, at their first difference.

    Attributes:
        value: in nats, None if it is unknown.
        at_least: the other token is not among the most likely ones, and the value is a lower bound.
    """

    value: float | None
    at_least: bool
    chosen: str
    other: str


def common_length(one: str, other: str) -> int:
    """Return the number of characters after which two texts differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def gap_of(tokens: Sequence[Token], other: Answer, common: int) -> Gap:
    """Return the gap at the first difference, by the log-probabilities of one side.

    Args:
        tokens: of the side that judges, with offsets in its text.
        common: characters in which the two texts agree.
    """
    near = [token for token in tokens if token.start <= common][-NEAR_TOKENS:]
    if not near:
        return Gap(None, False, "", "")
    found = [gap for token in near if (gap := _gap_at(token, other)) is not None]
    if found:
        return min(found, key=lambda gap: gap.value)
    last = near[-1]
    rest = other.text[last.start : last.start + len(last.text) + 8]
    masked = last.logprob is not None and last.logprob + MASKED < max(last.top.values(), default=-math.inf)
    if masked:  # a grammar forbids the most likely tokens, so they bound nothing
        return Gap(None, False, last.text, rest)
    if last.logprob is None or not last.top:
        return Gap(None, False, last.text, rest)
    least = min(last.top.values())
    left = 1 - sum(map(math.exp, last.top.values()))  # probability of all other tokens
    if left > 1e-6:
        least = min(least, math.log(left))
    return Gap(max(0.0, last.logprob - least), True, last.text, rest)


def _gap_at(token: Token, other: Answer) -> Gap | None:
    """Return the gap between a token and the likeliest other one that continues the other text; None without one."""
    rest = other.text[token.start :]
    ends = not rest and other.finish_reason != "length"
    candidates = [
        (logprob, text)
        for text, logprob in token.top.items()
        if text != token.text and (END.fullmatch(text) if ends else text and _continues(rest, text))
    ]
    if token.logprob is None or not candidates:
        return None
    logprob, text = max(candidates)
    return Gap(max(0.0, token.logprob - logprob), False, token.text, text)


def gap_of_chosen(tokens: Sequence[Token], others: Sequence[Token], common: int) -> Gap:
    """Return the gap between the tokens that the two sides chose after the same text, each by its own side.

    It needs no most likely tokens, but trusts both sides.
    """
    one, other = (next((t for t in reversed(side) if t.start <= common), None) for side in (tokens, others))
    if one is None or other is None or one.start != other.start or one.logprob is None or other.logprob is None:
        return Gap(None, False, "", "")
    return Gap(abs(one.logprob - other.logprob), False, one.text, other.text)


def _continues(rest: str, token: str) -> bool:
    """Return whether a text begins with a token, which may end inside a character."""
    whole = token.rstrip(INCOMPLETE)
    return rest.startswith(whole) and (whole == token or rest[len(whole) : len(whole) + 1] > "\x7f")


def shown(text: str, most: int = 40) -> str:
    """Return the start of a text in quotes, on one line."""
    return repr(text if len(text) <= most else text[:most] + "...")


def text_finding(
    question: Question, found: Answer, expected: Answer, gap: Gap, judged_by: str, tolerance: float, setting: str
) -> Finding:
    """Describe two texts that differ, and decide whether the difference is a tie."""
    at = common_length(found.text, expected.text)
    tie = gap.value is not None and not gap.at_least and gap.value <= tolerance
    kind = "text"
    if not tie and at == len(found.text):
        kind = "text ends early"
    elif not tie and at == len(expected.text) and expected.finish_reason == "length":
        kind = "text runs past the limit"
    ours = shown(expected.text[at : at + 24]) if at < len(expected.text) else "the end"
    theirs = shown(found.text[at : at + 24]) if at < len(found.text) else "the end"
    size = "unknown" if gap.value is None else f"{'at least ' * gap.at_least}{gap.value:.3g} nats"
    details = {
        "position": at,
        "context": expected.text[max(0, at - CONTEXT) : at],
        "expected": expected.text[at : at + CONTEXT],
        "found": found.text[at : at + CONTEXT],
        "tokens": {"chosen": gap.chosen, "other": gap.other},
        "gap": gap.value,
        "at_least": gap.at_least,
        "judged_by": judged_by,
    }
    message = f"character {at}: expected {ours}, found {theirs}; gap {size}"
    return Finding(kind, TIE if tie else FAULT, setting, question, message, details)
