"""The body of ``POST /v1/responses``, and the conversation that its items make."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag, TypeAdapter

from hydrajax.errors import HydrajaxError
from hydrajax.serve.json_objects import IGNORED, MOST_ALTERNATIVES, JsonObject, naming_fields, quoted
from hydrajax.serve.messages import CalledFunction, FunctionDefinition, FunctionReference, TextOr, TextPart
from hydrajax.serve.protocol import REQUEST_DEFAULTS, TEMPLATE_DEFAULTS, ChatBody, Effort, RequestBody, complete

LOGPROBS = "message.output_text.logprobs"
ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "store")
RESPONSES_DEFAULTS = {
    name: value for name, value in (REQUEST_DEFAULTS | TEMPLATE_DEFAULTS).items() if name not in ECHOED
} | {"truncation": "disabled", "background": False, "max_tool_calls": IGNORED}
OF_OUTPUT: dict[str, Any] = {"id": IGNORED, "status": IGNORED}  # of items that are an earlier response's


class ContentPart(TextPart):
    """A part of a message, which may be an earlier response's."""

    NEUTRAL: ClassVar = {"annotations": [], "logprobs": IGNORED, "parsed": IGNORED, "prompt_cache_breakpoint": IGNORED}
    type: Literal["input_text", "output_text", "text"]


class MessageItem(JsonObject):
    NEUTRAL: ClassVar = OF_OUTPUT | {"phase": IGNORED}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[ContentPart]


class CallItem(CalledFunction):
    NEUTRAL: ClassVar = CalledFunction.NEUTRAL | OF_OUTPUT
    type: Literal["function_call"]
    call_id: StrictStr


class CallOutputItem(JsonObject):
    NEUTRAL: ClassVar = OF_OUTPUT
    type: Literal["function_call_output"]
    call_id: StrictStr
    output: TextOr[ContentPart]


class ReasoningPart(TextPart):
    type: Literal["reasoning_text", "summary_text"]


class ReasoningItem(JsonObject):
    NEUTRAL: ClassVar = OF_OUTPUT
    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field([])
    content: list[ReasoningPart] = Field([])


class ItemReference(JsonObject):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: StrictStr


def _tag(item: Any) -> str:
    """Return an item's type in brackets, which leave it out of the names of wrong fields."""
    found = item if isinstance(item, dict) else vars(item) if isinstance(item, JsonObject) else {"role": "user"}
    return f"[{found.get('type') or ('item_reference' if found.get('role') is None else 'message')}]"


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")],
    Discriminator(
        _tag,
        custom_error_type="item",
        custom_error_message="a message, function_call, function_call_output, reasoning or item_reference",
    ),
]
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


class OfFunction(JsonObject):
    type: Literal["function"]


class FunctionTool(FunctionDefinition, OfFunction):
    NEUTRAL: ClassVar = FunctionDefinition.NEUTRAL | {"async": False, "defer_loading": False}


class NamedFunction(FunctionReference, OfFunction):
    pass


class TextFormat(JsonObject):
    NEUTRAL: ClassVar = {"strict": IGNORED}  # every answer is valid under the schema
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: StrictStr | None = None

    @pydantic.model_validator(mode="after")
    def _schema_if_named(self):
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if (value is not None) != (self.type == "json_schema"):
                raise ValueError(f"{field}: {'is missing' if value is None else 'requires type json_schema'}")
        return self

    def for_chat(self) -> dict[str, Any]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": fields or None}


class TextConfig(JsonObject):
    NEUTRAL: ClassVar = {"verbosity": "medium"}
    format: TextFormat = TextFormat(type="text")


class Reasoning(JsonObject):
    """``summary`` returns the reasoning, all of it, as a summary; ``generate_summary`` is its older name."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(JsonObject):
    NEUTRAL: ClassVar = {"include_obfuscation": IGNORED}


class ResponsesBody(RequestBody):
    """``POST /v1/responses``."""

    NEUTRAL, TOP_LOGPROBS = RESPONSES_DEFAULTS, "top_logprobs"

    input: TextOr[Item]
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    store: StrictBool = True
    max_tokens: None = None
    n: None = None
    response_format: None = None
    prompt_logprobs: None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    tools: list[FunctionTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    include: list[StrictStr] = Field([])
    top_logprobs: StrictInt = Field(0, ge=0, le=MOST_ALTERNATIVES)  # only with `LOGPROBS` in `include`
    stream_options: ResponsesStreamOptions = ResponsesStreamOptions()
    metadata: dict[str, StrictStr] = Field({})
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None

    @pydantic.field_validator("tool_choice", mode="wrap")
    @classmethod
    def _naming_the_choices(cls, value: Any, check: Callable[[Any], Any]) -> Any:
        try:
            return check(value)
        except pydantic.ValidationError:
            choices = 'none, auto, required or {"type": "function", "name": ...}'
            raise ValueError(f"got {quoted(value)}, expected {choices}") from None

    def items(self) -> list[Any]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def chat(self, items: Sequence[Any]) -> ChatBody:
        """Return the chat request with the same answer; ``items`` are the conversation without references."""
        kind, scored = complete(ChatBody), LOGPROBS in self.include
        fields = {name: getattr(self, name) for name in self.model_fields_set & kind.model_fields.keys()}
        tools = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
        choice = self.tool_choice
        fields |= {
            "messages": messages_of(items, self.instructions),
            "max_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": {"type": "function", "function": choice} if isinstance(choice, NamedFunction) else choice,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "logprobs": scored,
            "top_logprobs": self.top_logprobs if scored else None,
            "stream_options": None,
        }
        with naming_fields():
            return kind.model_validate(fields)

    def echo(self, temperature: float) -> dict[str, Any]:
        """Return the fields that a response repeats; ``temperature`` is the server's default."""
        choice, form = self.tool_choice, self.text.format
        strict = {"strict": True} if form.type == "json_schema" else {}
        same = (*ECHOED, "instructions", "previous_response_id", "max_output_tokens", "top_logprobs")
        tools = [
            {"description": None, "parameters": None, **tool.model_dump(exclude_unset=True)} for tool in self.tools
        ]
        return {name: getattr(self, name) for name in same} | {
            "background": False,
            "temperature": temperature if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.summary()},
            "text": {"format": form.model_dump(exclude_none=True, by_alias=True) | strict, "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool | {"strict": True} for tool in tools],
            "truncation": "disabled",
        }

    def summary(self) -> str | None:
        return self.reasoning.summary or self.reasoning.generate_summary


def messages_of(items: Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return chat messages. Reasoning, text and calls that follow each other are one message of the assistant."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]

    def assistant(*unless: str) -> dict[str, Any]:
        if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in unless):
            found.append({"role": "assistant"})
        return found[-1]

    for item in items:
        if isinstance(item, ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary)
            assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif item.role == "assistant":
            assistant("content", "tool_calls")["content"] = _content(item.content)
        else:
            found.append({"role": item.role, "content": _content(item.content)})
    return [{"content": None if "tool_calls" in message else "", **message} for message in found]


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


NAMES = {  # of chat requests, and of these
    r"messages(\.\d+)*": "input", r"response_format\.json_schema": "text.format", "response_format": "text.format",
    r"(tools\.\d+)\.function": r"\1", r"tool_choice\.function": "tool_choice", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip


def renamed(error: HydrajaxError) -> HydrajaxError:
    """Return an error of the chat request with the field of the body."""
    for name, own in NAMES.items():
        message, changed = re.subn(rf"^{name}(?=[.:])", own, str(error))
        if changed:
            return HydrajaxError(message)
    return error
