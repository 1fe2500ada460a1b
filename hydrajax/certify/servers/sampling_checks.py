"""Checks of sampling: seeds and several choices. Other draws than the reference's are allowed."""

from collections.abc import Sequence

from hydrajax.certify.servers.comparison import FAULT, Finding, common_length, shown
from hydrajax.certify.servers.questions import Question
from hydrajax.certify.servers.sides import Compared, Sides

MOST_TOKENS = 16  # of a sample: longer ones would part at rounding sooner or later
CHOICES = 4


def seeds(sides: Sides, questions: Sequence[Question]) -> Compared:
    """Ask each question three times with one seed.

    The first answer fills caches, and the other two must be equal. A server whose draft depends on earlier requests may
    round differently, so the check fails only if more than a quarter of the pairs differ.
    """
    found, different = Compared(), []
    for number, question in enumerate(questions):
        most = min(MOST_TOKENS, question.max_tokens)
        asked = question.but(temperature=1.0, seed=sides.settings.seed + number + 1, max_tokens=most)
        outcomes = sides.served([asked] * 3)
        failed = next((outcome for outcome in outcomes if not isinstance(outcome, tuple)), None)
        if failed is not None:
            found.reply(asked, failed, "seeded")
        else:
            found.compared += 1
            (one,), (other,) = outcomes[1][:1], outcomes[2][:1]  # type: ignore[index]
            if one.text != other.text:
                at = common_length(one.text, other.text)
                message = (
                    f"seed {asked.seed} twice: {shown(one.text[at:])} and {shown(other.text[at:])} at character {at}"
                )
                different.append(Finding("seed", FAULT, "seeded", asked, message))
    if 4 * len(different) > found.compared:
        found.findings += different
    return found


def several_choices(sides: Sides, questions: Sequence[Question]) -> Compared:
    """Draw several choices: there are ``n``, and no copies where the reference's all differ."""
    found = Compared()
    for number, question in enumerate(questions[: len(questions) // 2 or 1]):
        most = max(MOST_TOKENS, question.max_tokens)
        seed = sides.settings.seed + number + 1
        asked = question.but(temperature=1.0, n=CHOICES, seed=seed, max_tokens=most)
        (outcome,) = sides.served([asked])
        if (served := found.reply(asked, outcome, f"n={CHOICES}")) is None:
            continue
        found.compared += 1
        (wanted,) = sides.expected([asked])
        texts = [answer.text for answer in served]
        expected = [answer.text for answer in wanted] if isinstance(wanted, tuple) else []
        message = ""
        if [answer.index for answer in served] != list(range(CHOICES)):
            message = f"expected choices 0 to {CHOICES - 1}, found {[answer.index for answer in served]}"
        elif len(set(expected)) == CHOICES and len(set(texts)) <= CHOICES // 2:
            message = f"{CHOICES} choices have {len(set(texts))} texts, the reference's {CHOICES}: {shown(texts[0])}"
        if message:
            found.findings.append(Finding("choices", FAULT, f"n={CHOICES}", asked, message))
    return found
