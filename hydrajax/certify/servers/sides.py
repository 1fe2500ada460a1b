"""The server that is checked and its reference, asked the same questions."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hydrajax.certify.servers import comparison
from hydrajax.certify.servers.answers import Answer, Token
from hydrajax.certify.servers.client import Client, NoAnswer, Refused, Reply
from hydrajax.certify.servers.comparison import FAULT, UNJUDGED, Finding, Gap, common_length, shown
from hydrajax.certify.servers.questions import Question
from hydrajax.errors import HydrajaxError

Outcome = Reply | Refused | NoAnswer
Item, Result = TypeVar("Item"), TypeVar("Result")
LEAST_MIXED = 12  # characters: shorter texts may be equal by chance


@dataclass(frozen=True)
class Settings:
    """Settings of a certificate.

    Attributes:
        tolerance: gaps and differences of log-probabilities up to this many nats are rounding.
        max_tokens: limit of new tokens of the longest answers.
        seed: first seed of sampling; it also makes the long prompts different from those of another seed.
    """

    tolerance: float = 0.05
    max_tokens: int = 64
    requests: int = 32
    concurrency: tuple[int, ...] = (1, 8, 32)
    seed: int = 0


class Reference:
    """Answers without speculation: those of another server, or of the same one with another model."""

    shares_grammars = True  # its structured output is written by the same grammars as the server's

    def __init__(self, client: Client):
        self.client = client

    def __str__(self) -> str:
        return str(self.client)

    def ask(self, question: Question) -> Reply:
        """Return the answers, greedy ones with log-probabilities if there are any. Raises as `Client.ask`."""
        if question.temperature == 0 and question.logprobs is None and "tools" not in question.more:
            most = self.client.most_logprobs(question.but(more={}))
            try:
                return self.client.ask(question.but(logprobs=most))
            except Refused:  # structured output may exclude log-probabilities
                if most is None or not question.more:
                    raise
        return self.client.ask(question)

    def tokens_near(self, question: Question, answer: Answer, at: int) -> Sequence[Token]:
        """Return the answer's tokens around a character, with the most likely tokens at their positions."""
        return answer.tokens or ()

    def prepare(self, questions: Sequence[Question]) -> None:
        """Answer questions together, if that is faster."""


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Return ``function(item)`` of all items, at most ``workers`` at once; raise the first error.

    The threads are daemons: after an error or Ctrl-C the program ends without waiting for open requests.

    Args:
        function: called on threads, with one worker on the calling thread.
        on_done: called on the calling thread after each result.
    """
    if workers == 1:
        found = []
        for item in items:
            found.append(function(item))
            on_done()
        return found
    waiting, stopped = iter(range(len(items))), threading.Event()
    done: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        for number in waiting:
            if stopped.is_set():
                return
            try:
                done.put((number, function(items[number]), None))
            except BaseException as error:  # raised on the calling thread
                done.put((number, None, error))
                return

    for _ in range(min(workers, len(items))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Result] = {}
    try:
        for _ in items:
            number, result, error = done.get()
            if error is not None:
                raise error
            results[number] = result  # type: ignore[assignment]
            on_done()
    finally:
        stopped.set()
    return [results[number] for number in range(len(items))]


class Sides:
    """Ask both sides. Answers of the reference are kept, as many checks ask the same question."""

    def __init__(
        self, server: Client, reference: Reference, settings: Settings, on_answer: Callable[[], None] = lambda: None
    ):
        self.server, self.reference, self.settings = server, reference, settings
        self.requests = 0  # to the server
        self._on_answer = on_answer
        self._expected: dict[Question, Outcome] = {}

    def served(
        self, questions: Sequence[Question], workers: int = 1, ask: Callable[[Question], Any] | None = None
    ) -> list[Any]:
        """Return the server's answers, or the exceptions in their place. ask: `Client.ask` by default."""
        self.requests += len(questions)
        ask = ask or self.server.ask
        return in_parallel(lambda question: _outcome(ask, question), questions, workers, self._on_answer)

    def expected(self, questions: Sequence[Question]) -> list[Outcome]:
        """Return the reference's answers. Raises `HydrajaxError` if it fails."""
        questions = [question.but(stream=False) for question in questions]
        self.reference.prepare([question for question in questions if question not in self._expected])
        for question in questions:
            if question in self._expected:
                continue
            outcome = _outcome(self.reference.ask, question)
            if isinstance(outcome, NoAnswer):
                raise HydrajaxError(f"reference: {self.reference} failed: {outcome}")
            self._expected[question] = outcome
            self._on_answer()
        return [self._expected[question] for question in questions]

    # --- comparison -------------------------------------------------------------------------------------------

    def compare(self, questions: Sequence[Question], workers: int, setting: str) -> Compared:
        """Ask both sides greedy questions and compare texts, finish reasons and tool calls."""
        expected = self.expected(questions)
        found = Compared()
        for number, (question, served) in enumerate(zip(questions, self.served(questions, workers), strict=True)):
            found.add(self, question, served, expected, number, setting)
        return found

    def differences(self, question: Question, answer: Answer, expected: Answer, setting: str) -> list[Finding]:
        """Return how an answer differs from the reference's; an empty list if it does not."""
        if answer.text != expected.text:
            return [self.text_difference(question, answer, expected, setting)]
        if answer.calls != expected.calls:
            message = f"tool calls: expected {shown(str(expected.calls), 80)}, found {shown(str(answer.calls), 80)}"
            return [Finding("tool calls", FAULT, setting, question, message)]
        if answer.finish_reason != expected.finish_reason:
            message = f"expected finish_reason {expected.finish_reason}, found {answer.finish_reason}"
            return [Finding("finish reason", FAULT, setting, question, message)]
        return []

    def text_difference(self, question: Question, answer: Answer, expected: Answer, setting: str) -> Finding:
        """Judge two texts that differ: by the reference, else by the server's own log-probabilities."""
        asked, at = question.but(stream=False), common_length(answer.text, expected.text)
        gap, judge = comparison.gap_of(self.reference.tokens_near(asked, expected, at), answer, at), "the reference"
        if gap.value is None and (own := self._own_gap(asked, answer, expected, at)).value is not None:
            gap, judge = own, "the server"
        found = comparison.text_finding(question, answer, expected, gap, judge, self.settings.tolerance, setting)
        if gap.value is None and question.more and self._gives(asked, expected.text):
            return dataclasses.replace(found, verdict=UNJUDGED)
        return found

    def _gives(self, question: Question, text: str) -> bool:
        again = _outcome(self.server.ask, question)
        return isinstance(again, tuple) and again[0].text == text

    def _own_gap(self, question: Question, answer: Answer, expected: Answer, at: int) -> Gap:
        """Ask the server again with log-probabilities, which are of use if its text is the same."""
        most = self.server.most_logprobs(question.but(more={}))
        if question.temperature == 0 and most is not None:
            again = _outcome(self.server.ask, question.but(logprobs=most))
            if isinstance(again, tuple) and again[0].text == answer.text:
                gap = comparison.gap_of(again[0].tokens or (), expected, at)
                return (
                    gap
                    if gap.value is not None
                    else comparison.gap_of_chosen(expected.tokens or (), again[0].tokens or (), at)
                )
        return Gap(None, False, "", "")


class Compared:
    """The findings of greedy questions, and how many were compared."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.compared = 0
        self.refusals: list[str] = []

    def reply(self, question: Question, served: Any, setting: str) -> Any | None:
        """Return the answers, or None after recording a refusal or a failure of the server."""
        if isinstance(served, NoAnswer):
            self.findings.append(Finding("no answer", FAULT, setting, question, str(served)))
        elif isinstance(served, Refused):
            self.refusals.append(str(served))
        else:
            return served
        return None

    def add(
        self, sides: Sides, question: Question, served: Outcome, expected: Sequence[Outcome], number: int, setting: str
    ) -> None:
        """Compare an answer with the expected one of this number; the others tell texts of other requests."""
        wanted = expected[number]
        reply = self.reply(question, served, setting)
        if isinstance(served, Refused) and not isinstance(wanted, Refused):
            message = f"refused, but not by the reference: {served}"
            self.findings.append(Finding("refusal", FAULT, setting, question, message))
        elif reply is not None and isinstance(wanted, Refused):
            self.refusals.append(str(wanted))
        elif reply is not None:
            self.compared += 1
            found = sides.differences(question, served[0], wanted[0], setting)
            if question.stream and not served[0].ended:
                found.append(Finding("stream", FAULT, setting, question, "the stream ends without [DONE]"))
            self.findings += [_mixed(each, served[0], wanted[0], expected) for each in found]


def _mixed(finding: Finding, answer: Answer, wanted: Answer, expected: Sequence[Outcome]) -> Finding:
    """Name a text that is another request's."""
    is_text = "position" in finding.details and not finding.question.more  # texts under one schema are alike
    if not is_text or finding.verdict != FAULT or len(answer.text) < LEAST_MIXED:
        return finding
    rest = answer.text[finding.details["position"] :]
    others = [outcome[0].text for outcome in expected if isinstance(outcome, tuple) and outcome[0].text != wanted.text]
    if any(answer.text == text or (len(rest) >= LEAST_MIXED and rest in text) for text in others):
        message = f"{finding.message}; this is the text of another request"
        return Finding("another request's text", FAULT, finding.setting, finding.question, message, finding.details)
    return finding


def _outcome(ask: Callable[[Question], Reply], question: Question) -> Outcome:
    try:
        return ask(question)
    except (Refused, NoAnswer) as error:
        return error
