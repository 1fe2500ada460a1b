"""Request bodies of the OpenAI-compatible API.

Fields that would change the answer and are not supported are refused, so that no client assumes they took effect. A
field that is null or has a neutral value changes nothing and counts as absent.
"""

import dataclasses
import functools
import json
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from hydrajax.decoding.keywords import RULES
from hydrajax.decoding.processing import PROCESSORS
from hydrajax.decoding.request import SEED_BITS
from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import shown

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_ALTERNATIVES = 128, 16, 128, 20
Body = TypeVar("Body", bound=BaseModel)

Text = Annotated[StrictStr, Field(min_length=1)]
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]
Several = Field(min_length=1, max_length=MOST_PROMPTS)
FunctionName = Annotated[StrictStr, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NUMBERS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
KINDS = {  # of pydantic's errors
    "int_type": "an integer", "int_parsing_size": "a smaller integer", "float_type": "a finite number",
    "bool_type": "true or false", "bool_parsing": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object",
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
IGNORED = object()  # stands for any value in the tables of what changes nothing
TEMPLATE_DEFAULTS = {
    "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}, "media_io_kwargs": {},
    "mm_processor_kwargs": {}, "documents": [],
}  # fmt: skip
REQUEST_DEFAULTS = {  # of OpenAI and vLLM
    "use_beam_search": False, "length_penalty": 1, "watermarking": False, "repetition_detection": {},
    "stop_token_ids": [], "bad_words": [], "logits_processors": [], "include_stop_str_in_output": False,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "priority": 0, "thinking_token_budget": -1,
    "vllm_xargs": {}, "kv_transfer_params": {}, "ec_transfer_params": {}, "return_tokens_as_token_ids": False,
    "return_token_ids": False, "return_token_offsets": False, "return_prompt_text": False, "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0, "stream_interval": 1,
} | dict.fromkeys((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "request_id", "session_id",
), IGNORED)  # fmt: skip
CHAT_DEFAULTS = REQUEST_DEFAULTS | TEMPLATE_DEFAULTS | {
    "add_special_tokens": False, "echo": False, "include_reasoning": True, "verbosity": "medium",
    "function_call": "none", "prediction": IGNORED,
}  # fmt: skip
COMPLETION_DEFAULTS = REQUEST_DEFAULTS | {"add_special_tokens": True, "response_format": {"type": "text"}, "suffix": ""}


class JsonObject(BaseModel):
    """An object of a request, without unknown fields. Null and the values of ``NEUTRAL`` count as absent."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    NEUTRAL: ClassVar[dict[str, Any]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if not cls._is_neutral(name, value)}

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        neutral = cls.NEUTRAL.get(name)
        same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)  # False == 0
        return value is None or neutral is IGNORED or same


class StreamOptions(JsonObject):
    """``include_drafts`` is an extension that marks drafted tokens."""

    NEUTRAL = {"continuous_usage_stats": False, "include_obfuscation": IGNORED}
    include_usage: bool = False
    include_drafts: bool = False


class RequestBody(JsonObject):
    """The common fields, to which `parse_body` adds `sampling_fields`. None means the server's default."""

    TOP_LOGPROBS: ClassVar[str]  # the field with the number of most likely tokens

    model: str = ""
    max_tokens: StrictInt | None = Field(None, ge=1)
    seed: StrictInt | None = Field(None, ge=0, lt=2**SEED_BITS)
    n: StrictInt | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: StrictInt | None = Field(None, ge=0)
    corpus: bool | None = None  # false: later answers are not drafted from this one
    stream: bool | None = None
    stream_options: StreamOptions = StreamOptions()

    def limit(self) -> int | None:
        """Return the limit of new tokens."""
        return self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> dict[str, Any]:
        """Return the parameters of rule and processors, None for absent ones and for values without effect."""
        given = {name: (getattr(self, name), nothing) for name, (_, nothing) in sampling_fields().items()}
        return {name: None if value in nothing else value for name, (value, nothing) in given.items()}

    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False  # a number in completions, a flag in chats

    def top_logprobs_count(self) -> int:
        return getattr(self, self.TOP_LOGPROBS) or 0


class CompletionBody(RequestBody):
    """``POST /v1/completions``."""

    NEUTRAL, TOP_LOGPROBS = COMPLETION_DEFAULTS, "logprobs"

    prompt: Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
    logprobs: StrictInt | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    best_of: StrictInt | None = None

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


class TextPart(JsonObject):
    type: Literal["text"]
    text: StrictStr


class CalledFunction(JsonObject):
    NEUTRAL = {"parsed_arguments": IGNORED}  # OpenAI's client adds it
    name: FunctionName
    arguments: StrictStr

    @pydantic.field_validator("arguments")
    @classmethod
    def _arguments_are_an_object(cls, value: str) -> str:
        try:
            valid = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise ValueError(f"got {_shown(value)}, expected a JSON object as text")
        return value


class ToolCall(JsonObject):
    """A call in an assistant message of the conversation."""

    NEUTRAL = {"index": IGNORED}  # from a stream
    id: StrictStr
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates, which write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(JsonObject):
    NEUTRAL = {"annotations": [], "tool_calls": [], "parsed": IGNORED}  # OpenAI's client adds parsed
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None

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
        content = self.content or ""
        if not isinstance(content, str):
            content = [part.model_dump() for part in content]
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls is not None:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content and self.role == "assistant":  # as Qwen's templates name it, and gpt-oss's
            found["reasoning_content"] = self.reasoning_content
            found |= {} if content else {"thinking": self.reasoning_content}
        if self.role == "tool":
            found |= {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})
        return found


class JsonSchema(JsonObject):
    NEUTRAL = {"strict": IGNORED}  # every answer is valid under the schema
    name: StrictStr
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None


class ResponseFormat(JsonObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _schema_if_named(self):
        if (self.json_schema is not None) != (self.type == "json_schema"):
            missing = self.json_schema is None
            raise ValueError(f"json_schema: {'is missing' if missing else 'requires response_format.type=json_schema'}")
        return self


class FunctionDefinition(JsonObject):
    NEUTRAL = {"strict": IGNORED}  # all arguments are valid under the schema
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(JsonObject):
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        return self.model_dump(exclude_unset=True)


class FunctionReference(JsonObject):
    name: StrictStr


class NamedTool(JsonObject):
    type: Literal["function"]
    function: FunctionReference


class ChatBody(RequestBody):
    """``POST /v1/chat/completions``."""

    NEUTRAL, TOP_LOGPROBS = CHAT_DEFAULTS, "top_logprobs"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @pydantic.model_validator(mode="after")
    def _top_logprobs_need_logprobs(self):
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: requires logprobs=true")
        return self

    @pydantic.model_validator(mode="after")
    def _tool_choice_names_a_tool(self):
        names = [tool.function.name for tool in self.tools or ()]
        distinct("tools", names)
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice: requires tools")
        if isinstance(self.tool_choice, NamedTool) and (name := self.tool_choice.function.name) not in names:
            raise ValueError(f"tool_choice.function.name: got '{name}', expected one of: {', '.join(names)}")
        return self

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call; they are part of the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeBody(JsonObject):
    """``POST /tokenize``, vLLM's: of a text or of messages."""

    NEUTRAL = TEMPLATE_DEFAULTS | {"tools": []}
    model: str = ""
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None

    @pydantic.model_validator(mode="after")
    def _one_text(self):
        if (self.prompt is None) == (self.messages is None):
            found = "neither prompt nor messages" if self.prompt is None else "prompt and messages"
            raise ValueError(f"prompt: got {found}, expected one of them")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: got true, expected false: the chat template writes special tokens")
        return self


class DetokenizeBody(JsonObject):
    """``POST /detokenize``, vLLM's."""

    model: str = ""
    tokens: list[StrictInt]


def sampling_fields() -> dict[str, tuple[Any, tuple]]:
    """Return the parameters of all rules and processors: their types in JSON, and their values without effect.

    Their classes say both: a field's annotation, or metadata ``json``, ``json_range`` and ``none``, and ``NEUTRAL``.
    """
    found: dict[str, tuple[Any, tuple]] = {}
    for kind in (*RULES.values(), *PROCESSORS.values()):
        hints, neutral = get_type_hints(kind), getattr(kind, "NEUTRAL", {})
        for each in dataclasses.fields(kind):
            own = _strict(each.metadata.get("json", hints[each.name]), *each.metadata.get("json_range", ()))
            nothing = (*each.metadata.get("none", ()), *([neutral[each.name]] if each.name in neutral else []))
            found.setdefault(each.name, (own, nothing))
    return found


def _strict(kind: Any, least: float | None = None, most: float | None = None) -> Any:
    """Return the type of JSON for an annotation, with bounds and without conversions between texts and numbers."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    if get_origin(kind) is dict:
        return dict[str, _strict(kinds[-1], least, most)]  # type: ignore[misc]
    strict = {float: StrictFloat, int: StrictInt, bool: StrictBool, str: StrictStr}.get(kinds[0], kinds[0])
    return strict if least is None else Annotated[strict, Field(ge=least, le=most)]


@functools.lru_cache
def _with_fields(kind: type[Body], fields: tuple[tuple[str, Any], ...]) -> type[Body]:
    """Return a class of bodies with more fields, all of which may be absent."""
    optional: dict[str, Any] = {name: (own | None, None) for name, own in fields}
    return pydantic.create_model(kind.__name__, __base__=kind, **optional)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse a request body. Raises `HydrajaxError` that names the first wrong field."""
    if issubclass(kind, RequestBody):
        kind = _with_fields(kind, tuple((name, own) for name, (own, _) in sampling_fields().items()))
    with naming_fields():
        return kind.model_validate_json(body)


@contextmanager
def naming_fields() -> Iterator[None]:
    """Raise pydantic's errors as a `HydrajaxError` that names the first wrong field."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise HydrajaxError(_message(error.errors(include_url=False)[0])) from None


def distinct(field: str, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name is repeated."""
    if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ValueError(f"{field}: got {repeated[0]} twice, expected different names")


def _message(error: dict[str, Any]) -> str:
    message, found = error["msg"].removeprefix("Value error, "), _shown(error["input"])
    if error["type"] == "json_invalid":
        return f"the body is not JSON ({message.removeprefix('Invalid JSON: ')})"
    # In a union, pydantic appends the type that it tried.
    field = ".".join(str(part) for part in error["loc"] if _is_field(part)) or "the body"
    if error["type"] == "value_error":  # of a validator that names the field itself, or of the field's own
        return message if not error["loc"] else f"{field}{': ' if message.startswith('got ') else '.'}{message}"
    if error["type"] == "missing":
        return f"{field}: is missing"
    if error["type"] == "extra_forbidden" and field not in UNIONS:
        return f"{field}: this field is not supported"
    if field.split(".")[0] in UNIONS:  # pydantic names the type that it tried first
        return f"{field}: got {found}, expected {UNIONS[field.split('.')[0]]}"
    return f"{field}: got {found}, expected {_expected(error['type'], message, error.get('ctx', {}))}"


def _shown(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, str) else shown(value)


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
    return message.removeprefix("Input should be ")


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "bool", "constrained"))
