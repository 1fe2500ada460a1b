"""Request bodies of the OpenAI-compatible API.

Fields that would change the answer and are not supported are refused, so that no client assumes they took effect.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from hydrajax.errors import HydrajaxError
from hydrajax.generation import SEED_BITS

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_ALTERNATIVES = 128, 16, 128, 20
Body = TypeVar("Body", bound=BaseModel)
Text = Annotated[StrictStr, Field(min_length=1)]
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]
Several = Field(min_length=1, max_length=MOST_PROMPTS)
FunctionName = Annotated[StrictStr, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NUMBERS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
KINDS = {  # of pydantic's errors
    "int_type": "an integer", "int_parsing": "an integer", "int_from_float": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object", "none_required": "null",
    "string_pattern_mismatch": "1 to 64 letters, digits, _ and -",
}  # fmt: skip
UNIONS = {
    "prompt": f"a text, a list of token ids, or a list of up to {MOST_PROMPTS} of either",
    "stop": f"a text or a list of up to {MOST_STOPS} texts",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
    "functions": "none; use tools, which replace it",
    "function_call": "none; use tool_choice, which replaces it",
    "suffix": "none, as this server only continues prompts",
}


class StreamOptions(BaseModel):
    """``include_drafts`` is an extension that marks drafted tokens. ``include_obfuscation`` has no effect."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_drafts: bool = False
    include_obfuscation: bool = False


class RequestBody(BaseModel):
    """The common fields. None means the server's default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    TOP_LOGPROBS: ClassVar[str]  # the field with the number of most likely tokens

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=0, lt=2**SEED_BITS)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    corpus: bool | None = None  # false: later answers are not drafted from this one
    stream: bool | None = None
    stream_options: StreamOptions = StreamOptions()
    # Without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @pydantic.field_validator("stream_options", mode="before")
    @classmethod
    def _default_stream_options(cls, value: Any) -> Any:
        return {} if value is None else value

    def limit(self) -> int | None:
        """Return the limit of new tokens."""
        return self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> dict[str, Any]:
        """Return the parameters of rule and processors. Neutral penalties and a top-k of -1 or 0 become None."""
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        found = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p", *neutral)}
        found |= {name: None for name, value in neutral.items() if found[name] == value}
        return found | {"top_k": self.top_k if self.top_k and self.top_k > 0 else None, "logit_bias": self.logit_bias}

    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False  # a number in completions, a flag in chats

    def top_logprobs_count(self) -> int:
        return getattr(self, self.TOP_LOGPROBS) or 0


class CompletionBody(RequestBody):
    """``POST /v1/completions``."""

    TOP_LOGPROBS = "logprobs"

    prompt: Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    suffix: None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt

    @pydantic.model_validator(mode="after")
    def _echo_has_no_logprobs(self):
        if self.echo and self.wants_logprobs():
            raise ValueError("echo: got true with logprobs, which a prompt does not have here; leave one of them out")
        return self

    @pydantic.model_validator(mode="after")
    def _best_of_is_n(self):
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: got {self.best_of}, expected n")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: StrictStr


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: FunctionName
    arguments: StrictStr
    parsed_arguments: Any = None  # without effect: OpenAI's client adds it

    @pydantic.field_validator("arguments")
    @classmethod
    def _arguments_are_an_object(cls, value: str) -> str:
        try:
            valid = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise ValueError(f"got {reprlib.repr(value)}, expected a JSON object as text")
        return value


class ToolCall(BaseModel):
    """A call in an assistant message of the conversation."""

    model_config = ConfigDict(extra="forbid")
    id: StrictStr
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # without effect, from a stream

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates, which write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # without effect: OpenAI's client adds it
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: StrictStr | None = None

    @pydantic.model_validator(mode="after")
    def _fields_of_the_role(self):
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls: got a list, expected none in a message of role {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError(f"tool_call_id: {'is missing' if self.role == 'tool' else 'requires role tool'}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content: is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates, which call OpenAI's developer the system."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls is not None:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            found |= {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})
        return found


class JsonSchema(BaseModel):
    """``strict`` has no effect: every answer is valid under the schema."""

    model_config = ConfigDict(extra="forbid")
    name: StrictStr
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _schema_if_named(self):
        if (self.json_schema is not None) != (self.type == "json_schema"):
            missing = self.json_schema is None
            raise ValueError(f"json_schema: {'is missing' if missing else 'requires response_format.type=json_schema'}")
        return self


class FunctionDefinition(BaseModel):
    """``strict`` has no effect: all arguments are valid under ``parameters``."""

    model_config = ConfigDict(extra="forbid")
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionReference(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: StrictStr


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionReference


class ChatBody(RequestBody):
    """``POST /v1/chat/completions``."""

    TOP_LOGPROBS = "top_logprobs"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    functions: None = None
    function_call: None = None
    modalities: list[Literal["text"]] | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @pydantic.model_validator(mode="after")
    def _top_logprobs_need_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: requires logprobs=true")
        return self

    @pydantic.model_validator(mode="after")
    def _tool_choice_names_a_tool(self):
        names = [tool.function.name for tool in self.tools or ()]
        if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
            raise ValueError(f"tools: got {repeated[0]} twice, expected different names")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice: requires tools")
        if isinstance(self.tool_choice, NamedTool) and (name := self.tool_choice.function.name) not in names:
            raise ValueError(f"tool_choice.function.name: got {name!r}, expected one of: {', '.join(names)}")
        return self

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call; they are part of the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeBody(BaseModel):
    """``POST /tokenize``, vLLM's: of a text or of messages."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None

    @pydantic.model_validator(mode="after")
    def _one_text(self):
        if (self.prompt is None) == (self.messages is None):
            found = "neither prompt nor messages" if self.prompt is None else "prompt and messages"
            raise ValueError(f"prompt: got {found}, expected one of them")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: got true, expected false: the chat template writes special tokens")
        return self


class DetokenizeBody(BaseModel):
    """``POST /detokenize``, vLLM's."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    tokens: list[StrictInt]


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse a request body. Raises `HydrajaxError` that names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise HydrajaxError(_message(error.errors(include_url=False)[0])) from None


def _message(error: dict[str, Any]) -> str:
    message, found = error["msg"].removeprefix("Value error, "), reprlib.repr(error["input"])
    if error["type"] == "json_invalid":
        return f"the body is not JSON ({message.removeprefix('Invalid JSON: ')})"
    # In a union, pydantic appends the type that it tried.
    field = ".".join(str(part) for part in error["loc"] if _is_field(part)) or "the body"
    if error["type"] == "value_error":  # of a validator that names the field itself, or of the field's own
        return message if not error["loc"] else f"{field}{': ' if message.startswith('got ') else '.'}{message}"
    if error["type"] == "missing":
        return f"{field}: is missing"
    if error["type"] == "extra_forbidden":
        return f"{field}: this field is not supported"
    if field.split(".")[0] in UNIONS:  # pydantic names the type that it tried first
        return f"{field}: got {found}, expected {UNIONS[field.split('.')[0]]}"
    return f"{field}: got {found}, expected {_expected(error['type'], message, error.get('ctx', {}))}"


def _expected(kind: str, message: str, numbers: dict[str, Any]) -> str:
    """Return the allowed values of a field in our words; ``numbers`` are the limits that pydantic names."""
    if kind in ("too_long", "too_short", "string_too_long", "string_too_short"):
        number = numbers.get("max_length", numbers.get("min_length"))
        unit = "character" if kind.startswith("string") else "item"
        return f"at {'most' if kind.endswith('long') else 'least'} {number} {unit}{'s' * (number != 1)}"
    for name, words in NUMBERS.items():
        if name in numbers:
            number = numbers[name]
            return f"{words} {number:g}" if isinstance(number, float) else f"{words} {number}"
    if kind in KINDS:
        return KINDS[kind]
    if kind.startswith("string_"):
        return "a text"
    return message.removeprefix("Input should be ").replace("True", "true")


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "bool", "constrained"))
