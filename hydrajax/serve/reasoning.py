"""Reasoning: the part of an answer that a model writes before its content, between two marks of its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydrajax.decoding.constraints import GrammarLike
from hydrajax.grammar.after_reasoning import AfterMark, single_token
from hydrajax.serve.tool_calls import CallReader, Reading, without_begin
from hydrajax.text.continuation import TokenBytes

HARMONY = "openai_gptoss"
# By vLLM's names: the marks, and a label after the first one.
MARKS = {
    "qwen3": ("<think>", "</think>", ""),
    "deepseek_r1": ("<think>", "</think>", ""),
    "gemma4": ("<|channel>", "<channel|>", "thought\n"),
    "mistral": ("[THINK]", "[/THINK]", ""),
    "seed_oss": ("<seed:think>", "</seed:think>", ""),
}
PARSERS = ("auto", "none", *MARKS, HARMONY)
# Stand for marks that are one token in an answer's text: no other tokens spell these noncharacters of Unicode.
BEGIN, END = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Thinking:
    """A format of reasoning, and how the answer to a prompt begins.

    Attributes:
        begin, end: the marks.
        label: a text after ``begin`` that is no reasoning.
        tokenizer: the base's.
        opened: the answer begins within the reasoning. Otherwise it has a reasoning if it begins with the mark.
    """

    begin: str
    end: str
    label: str
    tokenizer: Any
    opened: bool = False

    @staticmethod
    def of(name: str, template: str, tokenizer: Any) -> Thinking | None:
        """Return the format of a name in `PARSERS`, for ``auto`` the one whose marks a chat template has, if any."""
        names = [one for one in MARKS if name in (one, "auto")]
        found = next((MARKS[one] for one in names if name != "auto" or MARKS[one][1] in template), None)
        return None if found is None else Thinking(*found, tokenizer, opened=name == "deepseek_r1")

    def after(self, header: str) -> Thinking | None:
        """Return the format of an answer that follows a text of the prompt; None if the text ends the reasoning."""
        begin, end = header.rfind(self.begin), header.rfind(self.end)
        return None if end > begin else replace(self, opened=self.opened or begin >= 0)

    def grammar(self, grammar: GrammarLike) -> AfterMark:
        """Return the grammar of answers whose content follows a grammar."""
        return AfterMark(grammar, self.end, None if self.opened else self.begin)

    def reader(self, calls: CallReader | None) -> ThinkingReader:
        """Return the reader of answers whose content has tool calls, or none."""
        return ThinkingReader(self, calls)


class ThinkingReader(CallReader):
    """Reads the reasoning, and the content by another reader. Calls within the reasoning are no calls."""

    def __init__(self, thinking: Thinking, calls: CallReader | None):
        self._thinking, self._calls = thinking, calls
        self._ids = tuple(single_token(mark, thinking.tokenizer) for mark in (thinking.begin, thinking.end))
        self._marks, inner = [thinking.begin, thinking.end], {} if calls is None else calls.special
        self._written, marks = {}, {}  # the marks' own texts, and their stand-ins
        for number, (token, mark) in enumerate(zip(self._ids, (BEGIN, END), strict=True)):
            if token is not None:
                skipped = token in thinking.tokenizer.all_special_ids
                self._written[mark] = inner.get(token, "" if skipped else self._marks[number])
                self._marks[number], marks[token] = mark, mark
        self.special: Mapping[int, str] = {**inner, **marks}
        if calls is not None:
            self.new_id = calls.new_id  # type: ignore[method-assign]

    def read(self, text, ended):
        begin, end = self._marks
        start, label, opened = text.lstrip(), self._thinking.label, self._thinking.opened
        if start.startswith(begin):
            text = start[len(begin) :]
        elif not ended and begin.startswith(start):
            return Reading("", [])
        elif not opened:
            return self._content(text, ended)
        thought, closed, rest = text.partition(end)
        if not closed and not ended:
            thought = without_begin(end, thought)
        thought = "" if label.startswith(thought) else thought.removeprefix(label)
        reading = self._content(rest.lstrip("\n"), ended) if closed else Reading("", [])
        return reading._replace(reasoning=self._plain(thought).strip("\n"))

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """Count the tokens between the marks."""
        (begin, end), thinking = self._ids, self._thinking
        if end is None:
            return self._spelled_tokens(ids)
        ids = list(ids)
        before = ids[: ids.index(end)] if end in ids else ids
        begun = before[:1] == [begin]
        return len(before) - begun if begun or thinking.opened else 0

    def _spelled_tokens(self, ids: Sequence[int]) -> int:
        """Count the tokens up to the end of a mark of several tokens."""
        known, text, end = TokenBytes(self._thinking.tokenizer), b"", self._thinking.end.encode()
        if not self.read(b"".join(known[token] for token in ids).decode(errors="replace"), True).reasoning:
            return 0
        for number, token in enumerate(ids, start=1):
            text += known[token]
            if end in text:
                return number
        return len(ids)

    def _content(self, text: str, ended: bool) -> Reading:
        text = self._plain(text)
        return Reading(text, []) if self._calls is None else self._calls.read(text, ended)

    def _plain(self, text: str) -> str:
        """Return a text with further marks as they are written."""
        for mark, written in self._written.items():
            text = text.replace(mark, written)
        return text
