"""The checks of a server's certificate: each compares answers of the two sides, or answers of the server alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hydrajax.certify.servers.answers import Answer, Token
from hydrajax.certify.servers.cases import long_texts, questions_of
from hydrajax.certify.servers.client import Refused
from hydrajax.certify.servers.comparison import FAULT, TIE, Finding, common_length, shown
from hydrajax.certify.servers.questions import Content, Question
from hydrajax.certify.servers.sides import Compared, Sides
from hydrajax.certify.servers.statistics_checks import statistics
from hydrajax.certify.servers.structured_checks import structured_output, tool_calls
from hydrajax.errors import HydrajaxError

FEW = 8  # questions of the checks that need not repeat all of them
LONG, SHORTEST = 1600, 200  # characters of a shared prefix; halved until the server's context has room
LEAST_STOPPED = 8  # characters of a text in which a stop string is looked for
STOP_LENGTH = 5
MOST_TOKENS = 16  # of a sample: longer ones would part at rounding sooner or later
CHOICES = 4


@dataclass(frozen=True)
class ServerCheck:
    """One guarantee and its outcome.

    Attributes:
        holds: True, False, or None if the server does not offer it.
    """

    name: str
    holds: bool | None
    summary: str
    findings: list[Finding] = field(default_factory=list)


def certify_server(
    sides: Sides, contents: Sequence[tuple[Content, bool]], on_status: Callable[[str], None] = lambda status: None
) -> Iterator[ServerCheck]:
    """Yield every check as soon as it is complete.

    - Greedy text and finish reasons of completions and chats of mixed lengths, at each concurrency.
    - Log-probabilities of the greedy tokens; each token is the most likely one of its own position.
    - Streams, stop strings, and prompts with a shared prefix (prefix caches), greedy.
    - Sampling: a seed repeats its text, and ``n`` choices are drawn separately.
    - Statistics: counts of speculation in responses and in ``/metrics``, if the server has vLLM's.
    - Structured output and tool calls are valid and equal the reference's.

    A server that refuses a request with a status such as 400 does not offer it: the check is skipped.

    Args:
        contents: texts or token ids of prompts, each with whether it is a user's message.

    Raises:
        HydrajaxError: the server answers neither completions nor chats, or the reference fails.
    """
    settings = sides.settings
    completions, chats = _offered(sides, contents)
    questions = questions_of(contents, settings.requests, settings.max_tokens, chats, completions)
    if not questions:
        raise HydrajaxError("prompts: got none that the server accepts, expected texts")
    for level in settings.concurrency:
        name = f"greedy text, {level} at once"
        on_status(f"{name} ({len(questions)} requests)")
        yield _check(name, sides.compare(questions, level, f"{level} at once"))
    few = questions[:FEW]
    rest: list[tuple[str, Callable[[], Compared]]] = [
        ("log-probabilities", lambda: logprobs(sides, few)),
        ("streams", lambda: sides.compare([each.but(stream=True) for each in few], 1, "streamed")),
        ("stop strings", lambda: stop_strings(sides, few)),
        ("prefix cache", lambda: prefix_cache(sides, chat=not completions)),
        ("seeds", lambda: seeds(sides, few)),
        ("several choices", lambda: several_choices(sides, few)),
        ("statistics", lambda: statistics(sides, few)),
    ]
    if chats:
        rest += [("structured output", lambda: structured_output(sides)), ("tool calls", lambda: tool_calls(sides))]
    for name, check in rest:
        on_status(name)
        yield _check(name, check())


def _offered(sides: Sides, contents: Sequence[tuple[Content, bool]]) -> tuple[bool, bool]:
    text = next((content for content, _ in contents if isinstance(content, str)), "Hello")
    outcomes = sides.served([Question(text, chat, 4) for chat in (False, True)])
    if not any(isinstance(outcome, tuple) for outcome in outcomes):
        raise HydrajaxError(f"server: {sides.server} answers neither completions nor chats: {outcomes[0]}")
    completions, chats = (not isinstance(outcome, Refused) for outcome in outcomes)
    return completions, chats


def _check(name: str, found: Compared) -> ServerCheck:
    """Return the outcome; without any answer that could be compared the check is skipped."""
    faults = [each for each in found.findings if each.verdict == FAULT]
    ties = sum(each.verdict == TIE for each in found.findings)
    parts = [f"{found.compared} compared, {len(faults)} faults, {ties} ties"]
    if unjudged := len(found.findings) - len(faults) - ties:
        parts.append(f"{unjudged} unjudged")
    if found.refusals:
        parts.append(f"{len(found.refusals)} skipped ({found.refusals[0]})")
    holds = False if faults else True if found.compared else None
    return ServerCheck(name, holds, "; ".join(parts), found.findings)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def logprobs(sides: Sides, questions: Sequence[Question]) -> Compared:
    """Compare the log-probability of each token up to the first different text, and ask for an argmax."""
    firsts = {each.chat: each for each in reversed(questions)}
    most = {chat: sides.server.most_logprobs(first) for chat, first in firsts.items()}
    offered = [each.but(logprobs=most[each.chat]) for each in questions if most[each.chat] is not None]
    found = Compared()
    if not offered:
        found.refusals.append("the server offers no log-probabilities")
        return found
    expected = sides.expected([each.but(logprobs=None) for each in offered])
    for number, (question, served) in enumerate(zip(offered, sides.served(offered), strict=True)):
        setting = "with logprobs"
        found.add(sides, question.but(logprobs=None), served, expected, number, setting)
        wanted = expected[number]
        if isinstance(served, tuple) and isinstance(wanted, tuple):
            found.findings += _wrong_logprobs(sides, question, served[0], wanted[0], setting)
    return found


def _wrong_logprobs(sides: Sides, question: Question, answer: Answer, wanted: Answer, setting: str) -> list[Finding]:
    """Return the first wrong log-probability of an answer, if there is one."""
    tolerance, theirs = sides.settings.tolerance, {token.start: token for token in wanted.tokens or ()}
    for number, token in enumerate(answer.tokens or ()):
        if answer.text[: token.start] != wanted.text[: token.start]:
            return []
        if token.logprob is None:
            return [_logprob_fault(question, setting, number, token, "none", "the server gives no log-probability")]
        if (best := max(token.top.values(), default=token.logprob)) - token.logprob > tolerance:
            message = f"{best - token.logprob:.3g} nats below the most likely token, but temperature is 0"
            return [_logprob_fault(question, setting, number, token, f"{best:.4g}", message)]
        other = theirs.get(token.start)
        if other is None or other.logprob is None or other.text != token.text or not token.text:
            continue
        if abs(other.logprob - token.logprob) > tolerance:
            message = f"expected log-probability {other.logprob:.4g}, found {token.logprob:.4g}"
            return [_logprob_fault(question, setting, number, token, f"{other.logprob:.4g}", message)]
    return []


def _logprob_fault(question: Question, setting: str, number: int, token: Token, expected: str, message: str) -> Finding:
    details = {"token": number, "text": token.text, "expected": expected, "found": token.logprob}
    return Finding(
        "log-probability", FAULT, setting, question, f"token {number} {shown(token.text)}: {message}", details
    )


# --- stop strings ---------------------------------------------------------------------------------------------------


def stop_strings(sides: Sides, questions: Sequence[Question]) -> Compared:
    """Stop at strings from the middle of the server's own texts, which accepted drafts may contain."""
    found, whole = Compared(), sides.served(questions)
    for question, outcome in zip(questions, whole, strict=True):
        if not isinstance(outcome, tuple) or len(text := outcome[0].text) < LEAST_STOPPED:
            continue
        at = len(text) * 3 // 5
        stop = text[at : at + STOP_LENGTH]
        if "\ufffd" in stop or not stop.strip():
            continue
        asked = question.but(stop=(stop,))
        (served,) = sides.served([asked])
        if (stopped := found.reply(asked, served, "stopped")) is not None:
            found.compared += 1
            found.findings += _stop_findings(sides, asked, stopped[0], text, stop)
    return found


def _stop_findings(sides: Sides, question: Question, answer: Answer, text: str, stop: str) -> list[Finding]:
    expected = text.partition(stop)[0]
    message = ""
    if stop in answer.text:
        message = f"the text contains the stop string {shown(stop)}: ... {shown(answer.text[-24:])}"
    elif answer.text != expected and answer.text.startswith(expected):
        message = f"the text ends with a part of the stop string {shown(stop)}: ... {shown(answer.text[-24:])}"
    elif answer.text != expected and expected.startswith(answer.text):
        message = f"the text ends {len(expected) - len(answer.text)} characters before the stop string {shown(stop)}"
    if message:
        return [Finding("stop string", FAULT, "stopped", question, message)]
    if answer.text != expected:  # another text from before the stop string
        (wanted,) = sides.expected([question.but(stop=())])
        if isinstance(wanted, tuple):
            return [sides.text_difference(question.but(stop=()), answer, wanted[0], "stopped")]
        return [Finding("text", FAULT, "stopped", question, "another text than without a stop string")]
    if answer.finish_reason != "stop":
        message = f"expected finish_reason stop, found {answer.finish_reason}"
        return [Finding("finish reason", FAULT, "stopped", question, message)]
    return []


# --- prefix caches --------------------------------------------------------------------------------------------------


def prefix_cache(sides: Sides, chat: bool) -> Compared:
    """Ask a long prompt twice, then prompts that begin with it, one after the other and together."""
    settings, size = sides.settings, LONG
    while True:
        head, longer = long_texts(settings.seed, size)
        first = Question(head, chat, max(4, settings.max_tokens // 2))
        longest = max(longer, key=len)
        (outcome,) = sides.served([first.but(content=longest, max_tokens=1)])
        if not isinstance(outcome, Refused) or size <= SHORTEST:
            break
        size //= 2
    found = Compared()
    others = [first.but(content=text) for text in longer]
    together = max(settings.concurrency)
    for questions, workers, setting in (
        ([first], 1, "long prompt"),
        ([first], 1, "long prompt again"),
        (others[:2], 1, "shared prefix"),
        (others, together, f"shared prefix, {together} at once"),
    ):
        one = sides.compare(questions, workers, setting)
        found.findings += one.findings
        found.compared += one.compared
        found.refusals += one.refusals
    return found


# --- sampling: other draws than the reference's are allowed ----------------------------------------------------------


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
