"""Tools for chat templates without tools: descriptions, calls and results as texts, in the form of Hermes."""

import json
from collections.abc import Sequence
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.text.templates import Messages, PromptEncoder, text_of

DESCRIPTION = """You can call the functions below, each described by a line of JSON.
<tools>
{}
</tools>
To call a function, write its name and its arguments as JSON between two tags:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": VALUE}}}}
</tool_call>
Its result follows between <tool_response> and </tool_response>."""


def prompt_with_tools(chat: PromptEncoder, messages: Messages, tools: Sequence[dict[str, Any]] | None) -> list[int]:
    """Return the token ids of a conversation whose template has no tools, see `PromptEncoder.prompt`.

    The tools are described in the system message, or in the first other one if the template has no system messages.
    """
    written = _written(messages)
    if not tools:
        return chat.prompt(written)
    description = DESCRIPTION.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system" or "system" not in chat.source:
        return chat.prompt(_described(written, description))
    try:
        return chat.prompt([{"role": "system", "content": description}, *written])
    except HydrajaxError:  # the template refuses system messages
        return chat.prompt(_described(written, description))


def _described(messages: Messages, description: str) -> Messages:
    text = text_of(messages[0]["content"])
    both = [text, description] if messages[0]["role"] == "system" else [description, text]
    return [messages[0] | {"content": "\n\n".join(both)}, *messages[1:]]


def _written(messages: Messages) -> Messages:
    """Return the messages with calls as text, and with results and what the user adds to them as a user's message."""
    found: Messages = []
    for message, before in zip(messages, [None, *messages], strict=False):
        if calls := message.get("tool_calls"):
            functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
            texts = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in functions]
            text = "\n".join(filter(None, [text_of(message["content"]), *texts]))
            message = {name: message[name] for name in message.keys() - {"tool_calls"}} | {"content": text}
        elif message["role"] == "tool":
            result = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
            message = {"role": "user", "content": result}
        if before is not None and before["role"] == "tool" and message["role"] == "user":
            message = message | {"content": f"{found.pop()['content']}\n{text_of(message['content'])}"}
        found.append(message)
    return found
