"""Calls of Hermes and Qwen."""

from collections.abc import Mapping

from hydrajax.serve.tool_calls import (
    HEAD,
    CallFormat,
    Reading,
    before_any,
    bodies,
    call_in,
    json_rule,
    lark,
    literal,
    with_tokens,
)


class TaggedCalls(CallFormat):
    """Calls of Hermes and Qwen: ``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``."""

    TAG, END = "<tool_call>", "</tool_call>"

    def __init__(self, added: Mapping[str, int]):
        """``added``: ids of the added tokens, in which a tag may be a single token."""
        self._tag, self._end = (literal(tag, added) for tag in (self.TAG, self.END))
        self._is_token = self.TAG in added
        self._others = [token for text, token in added.items() if text not in (self.TAG, self.END)]

    def grammar(self, tools, *, text=False, several=False, answer=None):
        rules = [f'call: "\\n" body "\\n" {self._end}', *bodies(tools, "arguments")]
        calls = "call" + (f' ("\\n" {self._tag} call)*' if several else "")
        if answer is not None:
            return lark(f"{self._tag} {calls} | {json_rule(answer)}", rules)
        if not text:
            return lark(f"{self._tag} {calls}", rules)
        rules.append(f"text: {with_tokens('TEXT?', '(', self._others, ' TEXT?)*')}")
        if self._is_token:  # no text may spell it with other tokens
            rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{self.TAG}(.|\\n)*/")
            return lark(f"text | text {self._tag} {calls}", rules)
        # The first tag in a text begins a call.
        rules.append("TEXT: /(.|\\n)+/")
        rules += [f"begun[lazy]: /(.|\\n)*{self.TAG}/", f"before: {with_tokens('', '(TEXT? ', self._others, ')*')}"]
        return lark(f"text | before begun {calls}", rules)

    def heads(self, tools):
        return dict.fromkeys(tools, self.TAG)

    def read(self, text, ended):
        at, calls = text.find(self.TAG), []
        if at < 0:
            return Reading(text if ended else before_any(self.TAG, text), [])
        content = text[:at].rstrip()
        while at >= 0 and (head := HEAD.match(text, at + len(self.TAG))):
            call, end = call_in(head[1], text, head.end())
            if ended and not call.complete:
                call = call._replace(arguments=call.arguments.partition(self.END)[0])
            calls.append(call)
            at = text.find(self.TAG, end) if call.complete else -1
        unreadable = ended and not calls and self.END in text[at:]
        return Reading(text if unreadable else content, calls)
