"""Formats of tool calls: the grammar of a call as a model writes it, and the calls in an answer's text."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hydrajax.errors import HydrajaxError
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
    """Finds the calls in an answer."""

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


class TaggedCalls:
    """Calls of Hermes and Qwen: ``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``."""

    TAG, END = "<tool_call>", "</tool_call>"

    def __init__(self, added: Mapping[str, int]):
        """``added``: ids of the added tokens, in which a tag may be a single token."""
        self._tag, self._end = (_literal(tag, added) for tag in (self.TAG, self.END))
        self._is_token = self.TAG in added
        self._others = [token for text, token in added.items() if text not in (self.TAG, self.END)]

    def grammar(self, tools, *, text=False, several=False, answer=None):
        rules = [f'call: "\\n" body "\\n" {self._end}', *_bodies(tools, "arguments")]
        calls = "call" + (f' ("\\n" {self._tag} call)*' if several else "")
        if answer is not None:
            return lark(f"{self._tag} {calls} | {json_rule(answer)}", rules)
        if not text:
            return lark(f"{self._tag} {calls}", rules)
        rules.append(f"text: {_with_tokens('TEXT?', '(', self._others, ' TEXT?)*')}")
        if self._is_token:  # no text may spell it with other tokens
            rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{self.TAG}(.|\\n)*/")
            return lark(f"text | text {self._tag} {calls}", rules)
        # The first tag in a text begins a call.
        rules.append("TEXT: /(.|\\n)+/")
        rules += [f"begun[lazy]: /(.|\\n)*{self.TAG}/", f"before: {_with_tokens('', '(TEXT? ', self._others, ')*')}"]
        return lark(f"text | before begun {calls}", rules)

    def heads(self, tools):
        return dict.fromkeys(tools, self.TAG)

    def read(self, text, ended):
        at, calls = text.find(self.TAG), []
        if at < 0:
            return Reading(text if ended else _before_any(self.TAG, text), [])
        content = text[:at].rstrip()
        while at >= 0 and (head := HEAD.match(text, at + len(self.TAG))):
            call, end = call_in(head[1], text, head.end())
            if ended and not call.complete:
                call = call._replace(arguments=call.arguments.partition(self.END)[0])
            calls.append(call)
            at = text.find(self.TAG, end) if call.complete else -1
        unreadable = ended and not calls and self.END in text[at:]
        return Reading(text if unreadable else content, calls)


class PlainCalls:
    """Calls of Llama 3: a JSON object with ``name`` and ``parameters`` in place of any text; one per answer."""

    MARK = "<|python_tag|>"  # a special token, which is not part of an answer's text

    def __init__(self, added: Mapping[str, int]):
        """``added``: ids of the added tokens."""
        self._mark = f"<[{added[self.MARK]}]>? " if self.MARK in added else ""
        self._others = [token for text, token in added.items() if text != self.MARK]

    def grammar(self, tools, *, text=False, several=False, answer=None):
        start, rules = f"{self._mark}body", _bodies(tools, "parameters")
        if answer is not None:
            start += f" | {json_rule(answer)}"
        elif text:  # it cannot begin as a call does
            start += " | text"
            rules += ["FIRST: /\\s*[^{\\s](.|\\n)*/", "TEXT: /(.|\\n)+/"]
            rules += [f"text: {_with_tokens('FIRST?', '(', self._others, ' TEXT?)*')}"]
        return lark(start, rules)

    def heads(self, tools):
        return {name: "".join(_head(name, "parameters")) for name in tools}

    def read(self, text, ended):
        if not text.startswith("{"):
            return Reading(text, [])
        if head := HEAD.match(text):
            return Reading("", [call_in(head[1], text, head.end())[0]])
        return Reading(text if ended else "", [])


class CallsOrAnswer:
    """Answers that are either calls or a text without calls, by how they begin."""

    def __init__(self, calls: CallReader, heads: Iterable[str]):
        """``heads``: the beginnings of answers with calls (`CallFormat.heads`)."""
        self._calls, self._heads = calls, tuple(heads)

    def read(self, text, ended):
        if text.startswith(self._heads):
            return self._calls.read(text, ended)
        undecided = not ended and any(head.startswith(text) for head in self._heads)
        return Reading("" if undecided else text, [])


def call_format(template: str, tokenizer: Any) -> CallFormat:
    """Return the format of calls that a chat template describes.

    Args:
        template: Jinja text.
        tokenizer: of transformers.

    Raises:
        HydrajaxError: for an unknown format, and for tags that decoding leaves out.
    """
    # llguidance regards added tokens of this form as special, so that no text contains them.
    added = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if re.fullmatch("<.+>", token.content) and (not token.special or token.content == PlainCalls.MARK)
    }
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if TaggedCalls.TAG in template and not re.search("<function=|<arg_key>", template):
        if found := special & {TaggedCalls.TAG, TaggedCalls.END}:
            raise HydrajaxError(f"tools: {min(found)} is a special token of the base, expected one that stays in texts")
        return TaggedCalls(added)
    if re.search(r'"name\\?": [^,{}]+, \\?"parameters\\?":', template):
        return PlainCalls(added)
    raise HydrajaxError(
        "tools: the chat template describes calls in an unknown format, expected <tool_call> with JSON (Hermes, Qwen) "
        'or {"name": ..., "parameters": ...} (Llama 3)'
    )


class CallDeltas:
    """The parts of an answer with tool calls that have not been sent."""

    def __init__(self, form: CallReader):
        self._form, self._ids = form, []
        self._content, self._reasoning, self._arguments = 0, 0, []  # characters sent
        self.complete = False  # all calls are
        self.reasoning = ""  # what is new of it

    def new(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the new content, and OpenAI's deltas of the calls. The arguments are those of `CallFormat.read`."""
        content, calls, reasoning = self._form.read(text, ended)
        content, self._content = content[self._content :], max(len(content), self._content)
        self.reasoning, self._reasoning = reasoning[self._reasoning :], len(reasoning)
        deltas = []
        for index, call in enumerate(calls):
            if index == len(self._ids):
                self._ids.append(f"call_{uuid.uuid4().hex}")
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


def _before_any(tag: str, text: str) -> str:
    """Return the text without what may belong to a call: the begin of a tag at its end, and white space before it."""
    begun = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return text[: len(text) - begun].rstrip()


def lark(start: str, rules: Sequence[str]) -> Grammar:
    return Grammar.lark("\n".join([f"start: {start}", *rules]))


def _bodies(tools: Mapping[str, Schema], key: str) -> list[str]:
    """Return the rule of a call's JSON object. Each schema is one of its own, as it may refer to its root."""
    bodies = [
        " ".join([*map(json.dumps, _head(name, key)), json_rule(schema), '"}"']) for name, schema in tools.items()
    ]
    return [f"body: {' | '.join(bodies)}"]


def _head(name: str, key: str) -> tuple[str, ...]:
    """Return the tokens of a call's JSON before its arguments. llguidance finds no other JSON that begins with the same
    characters unless they are split as it splits JSON.
    """
    return "{", '"name"', ": ", json.dumps(name), ", ", json.dumps(key), ": "


def json_rule(schema: Schema) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': FIXED_WHITESPACE})}"


def _literal(tag: str, added: Mapping[str, int]) -> str:
    return f"<[{added[tag]}]>" if tag in added else json.dumps(tag)


def _with_tokens(first: str, begin: str, tokens: Sequence[int], end: str) -> str:
    """Return a rule's ``first`` and, if there are such tokens, a group of one of them."""
    return f"{first} {begin}<[{','.join(map(str, tokens))}]>{end}".strip() if tokens else first
