"""Reasoning: the part of an answer that a model writes before its content, between two marks of its format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hydrajax.decoding.constraints import GrammarLike
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.after_reasoning import AfterMark, single_token
from hydrajax.serve.tool_calls import CallReader, Reading

HARMONY = "openai_gptoss"
# By the names of vLLM's parsers: the marks, and a label after the first one.
MARKS = dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45"), ("<think>", "</think>", "")) | {
    "gemma4": ("<|channel>", "<channel|>", "thought\n"),
    "mistral": ("[THINK]", "[/THINK]", ""),
    "seed_oss": ("<seed:think>", "</seed:think>", ""),
}
PARSERS = ("auto", "none", *MARKS, HARMONY)
BEGIN, END = "\ufdd0", "\ufdd1"  # stand for the marks in texts: noncharacters of Unicode, which no other tokens spell


@dataclass(frozen=True)
class Thinking(CallReader):
    """Reads an answer with a reasoning, and its content by another reader. The reasoning has no calls.

    Attributes:
        begin, end: the marks, which are one token each.
        label: a text after ``begin`` that is no reasoning.
        ids: the marks' tokens.
        hidden: texts do not have the marks, which are special tokens.
        opened: the answer begins within the reasoning. Otherwise it has one if it begins with the mark.
        calls: reads the content, None for text.
    """

    begin: str
    end: str
    label: str
    ids: tuple[int, int]
    hidden: bool
    opened: bool
    calls: CallReader | None = None

    @staticmethod
    def of(name: str, template: str, tokenizer: Any) -> Thinking | None:
        """Return the format of a name in `PARSERS`, for ``auto`` the one whose marks a chat template has, if any."""
        of_template = (marks for marks in MARKS.values() if name == "auto" and marks[1] in template)
        if (found := MARKS.get(name, next(of_template, None))) is None:
            return None
        begin, end = (single_token(mark, tokenizer) for mark in found[:2])
        if begin is not None and end is not None:
            return Thinking(*found, (begin, end), end in tokenizer.all_special_ids, opened=name == "deepseek_r1")
        if name == "auto":
            return None
        raise HydrajaxError(f"reasoning_parser: got {name}, but {found[1]} is not one token of the base")

    def after(self, header: str) -> Thinking | None:
        """Return the format of an answer that follows a text of the prompt; None if the text ends the reasoning."""
        begin, end = header.rfind(self.begin), header.rfind(self.end)
        return None if end > begin else replace(self, opened=self.opened or begin >= 0)

    def grammar(self, grammar: GrammarLike) -> AfterMark:
        """Return the grammar of answers whose content follows a grammar."""
        return AfterMark(grammar, self.ids[1], None if self.opened else self.ids[0])

    @property
    def special(self):
        return {**(self.calls.special if self.calls else {}), **dict(zip(self.ids, (BEGIN, END), strict=True))}

    def new_id(self):
        return super().new_id() if self.calls is None else self.calls.new_id()

    def read(self, text, ended):
        start = text.lstrip()
        if not (start or ended):
            return Reading("", [])
        if start.startswith(BEGIN):
            text = start[1:]
        elif not self.opened:
            return self._content(text, ended)
        thought, closed, content = text.partition(END)
        thought = "" if self.label.startswith(thought) else thought.removeprefix(self.label)
        reading = self._content(content.lstrip("\n"), ended) if closed else Reading("", [])
        return reading._replace(reasoning=self._plain(thought).strip("\n"))

    def reasoning_tokens(self, ids):
        begin, end = self.ids
        before = ids[: ids.index(end)] if end in ids else ids
        start = ids.index(begin) + 1 if begin in ids[:2] else 0  # GLM writes a line break first
        return len(before) - start if start or self.opened else 0

    def _content(self, text: str, ended: bool) -> Reading:
        text = self._plain(text)
        return Reading(text, []) if self.calls is None else self.calls.read(text, ended)

    def _plain(self, text: str) -> str:
        """Return a text with further marks as they are written."""
        names = ("", "") if self.hidden else (self.begin, self.end)
        return text.replace(BEGIN, names[0]).replace(END, names[1])
