"""Tool calls: the interface of their formats, which are in `hydrajax.serve.call_formats`, and calls in streams."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hydrajax.grammar.grammar import FIXED_WHITESPACE, Grammar

Schema = dict[str, Any]
# A call up to its arguments, which follow as a JSON object.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class Call(NamedTuple):
    """A call, with its arguments as JSON text, and whether they are complete."""

    name: str
    arguments: str
    complete: bool


class Reading(NamedTuple):
    """An answer's text before its calls, the calls, and its reasoning. As it grows, all are prefixes of later ones."""

    content: str
    calls: list[Call]
    reasoning: str = ""


class CallReader(Protocol):
    """Finds the calls in an answer. A reader that wraps another has its attributes and its ids.

    Attributes:
        special: special tokens that the text contains, by id; any other is left out.
    """

    special: Mapping[int, str] = {}

    def new_id(self) -> str:
        """Return the id of a call."""
        return f"call_{uuid.uuid4().hex}"

    def reasoning_tokens(self, ids: Sequence[int]) -> int:
        """Count the tokens of an answer that are reasoning."""
        return 0

    def read(self, text: str, ended: bool) -> Reading:
        """Return content and calls of an answer's text.

        Args:
            text: all of the answer so far.
            ended: no text will follow. Until then, text that may belong to a call is held back.
        """


class CallFormat(CallReader, Protocol):
    """A format in which models write calls."""

    def grammar(
        self, tools: Mapping[str, Schema], *, text: bool = False, several: bool = False, answer: Schema | None = None
    ) -> Grammar:
        """Return the grammar of answers that call tools.

        Args:
            tools: JSON schemas of the arguments by name.
            text: allow free text, before the calls or without any.
            several: allow several calls.
            answer: the JSON schema of answers without calls, in place of free text.
        """

    def heads(self, tools: Iterable[str]) -> dict[str, str]:
        """Return by tool the text that an answer without free text begins with if it calls this tool first."""

    def reader(self, tools: Mapping[str, Schema]) -> CallReader:
        """Return the reader of answers that call these tools."""
        return self


class CallsOrAnswer(CallReader):
    """Answers that are either calls or a text without calls, by how they begin."""

    def __init__(self, calls: CallReader, heads: Iterable[str]):
        """``heads``: the beginnings of answers with calls (`CallFormat.heads`)."""
        self._calls, self._heads = calls, tuple(heads)
        self.special, self.new_id = calls.special, calls.new_id

    def read(self, text, ended):
        if text.startswith(self._heads):
            return self._calls.read(text, ended)
        undecided = not ended and any(head.startswith(text) for head in self._heads)
        return Reading("" if undecided else text, [])


class CallDeltas:
    """The parts of an answer with tool calls that have not been sent."""

    def __init__(self, form: CallReader):
        self.form, self._ids = form, []
        self._content, self._reasoning, self._arguments = 0, 0, []  # characters sent
        self.complete = False  # all calls are
        self.reasoning = ""  # what is new of it

    def new(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the new content, and OpenAI's deltas of the calls. The arguments are those of `CallFormat.read`."""
        content, calls, reasoning = self.form.read(text, ended)
        content, self._content = content[self._content :], max(len(content), self._content)
        self.reasoning, self._reasoning = reasoning[self._reasoning :], len(reasoning)
        deltas = []
        for index, call in enumerate(calls):
            if index == len(self._ids):
                self._ids.append(self.form.new_id())
                self._arguments.append(0)
                piece = {"id": self._ids[index], "type": "function", "function": {"name": call.name, "arguments": ""}}
            else:
                piece = {"function": {"arguments": ""}}
            new, self._arguments[index] = call.arguments[self._arguments[index] :], len(call.arguments)
            piece["function"]["arguments"] = new
            if new or "id" in piece:
                deltas.append({"index": index, **piece})
        self.complete = bool(calls) and all(call.complete for call in calls)
        return content, deltas


def call_in(name: str, text: str, at: int) -> tuple[Call, int]:
    """Return the call whose arguments begin at this place, and their end."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return Call(name, text[at:], False), len(text)
    return Call(name, text[at:end], True), end


def without_begin(tag: str, text: str) -> str:
    """Return the text without the begin of a tag at its end."""
    begun = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return text[: len(text) - begun]


def lark(start: str, rules: Sequence[str]) -> Grammar:
    return Grammar.lark("\n".join([f"start: {start}", *rules]))


def escaped(pattern: str) -> str:
    """Return a regular expression as it stands between slashes in Lark."""
    escape = re.compile(r"\\.|/")
    return escape.sub(lambda one: one[0] if len(one[0]) > 1 else r"\/", pattern).replace("\n", r"\n")


def bodies(tools: Mapping[str, Schema], key: str) -> list[str]:
    """Return the rule of a call's JSON object. Each schema is one of its own, as it may refer to its root."""
    bodies = [
        " ".join([*map(json.dumps, json_head(name, key)), json_rule(schema), '"}"']) for name, schema in tools.items()
    ]
    return [f"body: {' | '.join(bodies)}"]


def json_head(name: str, key: str) -> tuple[str, ...]:
    """Return the tokens of a call's JSON before its arguments. llguidance finds no other JSON that begins with the same
    characters unless they are split as it splits JSON.
    """
    return "{", '"name"', ": ", json.dumps(name), ", ", json.dumps(key), ": "


def json_rule(schema: Schema) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': FIXED_WHITESPACE})}"


def literal(tag: str, added: Mapping[str, int]) -> str:
    return f"<[{added[tag]}]>" if tag in added else json.dumps(tag)


def with_tokens(first: str, begin: str, tokens: Sequence[int], end: str) -> str:
    """Return a rule's ``first`` and, if there are such tokens, a group of one of them."""
    return f"{first} {begin}<[{','.join(map(str, tokens))}]>{end}".strip() if tokens else first
