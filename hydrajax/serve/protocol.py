"""Request bodies of the OpenAI-compatible API.

Fields that would change the answer and are not supported are refused, so that no client assumes they took effect. A
field that is null or has a neutral value changes nothing and counts as absent.
"""

import dataclasses
import functools
from collections.abc import Collection
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import pydantic
from pydantic import BaseModel, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from hydrajax.decoding.keywords import RULES
from hydrajax.decoding.processing import PROCESSORS
from hydrajax.decoding.request import SEED_BITS
from hydrajax.errors import HydrajaxError
from hydrajax.serve.answer_formats import AnswerFormat
from hydrajax.serve.json_objects import (
    IGNORED,
    MOST_ALTERNATIVES,
    MOST_CHOICES,
    MOST_PROMPTS,
    MOST_STOPS,
    JsonObject,
    distinct,
    naming_fields,
)
from hydrajax.serve.messages import ChatMessage, NamedTool, Tool

Body = TypeVar("Body", bound=BaseModel)

Text = Annotated[StrictStr, Field(min_length=1)]
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]
Several = Field(min_length=1, max_length=MOST_PROMPTS)
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
    "prompt_cache_options", "request_id", "session_id", "guided_decoding_backend",
), IGNORED)  # fmt: skip
CHAT_DEFAULTS = REQUEST_DEFAULTS | TEMPLATE_DEFAULTS | {
    "add_special_tokens": False, "echo": False, "include_reasoning": True, "verbosity": "medium",
    "function_call": "none", "prediction": IGNORED,
}  # fmt: skip
COMPLETION_DEFAULTS = REQUEST_DEFAULTS | {"add_special_tokens": True, "suffix": ""}


class StreamOptions(JsonObject):
    """``include_drafts`` is an extension that marks drafted tokens; ``continuous_usage_stats`` is vLLM's."""

    NEUTRAL: ClassVar = {"include_obfuscation": IGNORED}
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # no effect without include_usage
    include_drafts: StrictBool = False


class RequestBody(AnswerFormat, JsonObject):
    """The common fields, to which `parse_body` adds `sampling_fields`. None means the server's default."""

    TOP_LOGPROBS: ClassVar[str]  # the field with the number of most likely tokens

    model: str = ""
    max_tokens: StrictInt | None = Field(None, ge=1)
    seed: StrictInt | None = Field(None, ge=0, lt=2**SEED_BITS)
    n: StrictInt | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool | None = None
    bad_words: list[Text] | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = Field(None, ge=0)
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    corpus: StrictBool | None = None  # false: later answers are not drafted from this one
    stream: StrictBool | None = None
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

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call; they are part of the prompt."""
        return []

    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False  # a number in completions, a flag in chats

    @pydantic.model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self):
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(f"prompt_logprobs: got {self.prompt_logprobs} with stream, expected none")
        return self

    def scored(self) -> int | None:
        """Return the most likely tokens at each position of an echo, None without log-probabilities of it."""
        return None

    def top_logprobs_count(self) -> int:
        return getattr(self, self.TOP_LOGPROBS) or 0


class CompletionBody(RequestBody):
    """``POST /v1/completions``."""

    NEUTRAL, TOP_LOGPROBS = COMPLETION_DEFAULTS, "logprobs"

    prompt: Text | TokenIds | Annotated[list[Text], Several] | Annotated[list[TokenIds], Several]
    max_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: StrictInt | None = Field(None, ge=0, le=5)
    echo: StrictBool | None = None
    best_of: StrictInt | None = None

    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt

    @pydantic.model_validator(mode="after")
    def _nothing_is_generated_for_an_echo(self):
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: got 0, expected at least 1 without echo")
        return self

    def scored(self):
        return self.logprobs if self.echo and self.wants_logprobs() else None

    @pydantic.model_validator(mode="after")
    def _best_of_is_n(self):
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: got {self.best_of}, expected n")
        return self


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateFields(BaseModel):
    """Fields for the chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    reasoning_effort: Effort | None = None

    @pydantic.model_validator(mode="after")
    def _continues_an_answer(self):
        if bool(self.continue_final_message) == (self.add_generation_prompt is not False):
            raise ValueError("continue_final_message: requires add_generation_prompt=false, which requires it")
        if self.continue_final_message and (not self.messages or self.messages[-1].role != "assistant"):
            raise ValueError("continue_final_message: requires a last message of role assistant")
        return self

    def variables(self, names: Collection[str]) -> dict[str, Any]:
        """Return the variables of a template that has these names. ``reasoning_effort`` sets those that vLLM sets."""
        effort, found = self.reasoning_effort, {}
        if effort is not None:
            found = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            if not (found := {name: value for name, value in found.items() if name in names}):
                raise HydrajaxError("reasoning_effort: got one, but it is no variable of the chat template")
        return found | (self.chat_template_kwargs or {})


class ChatBody(TemplateFields, RequestBody):
    """``POST /v1/chat/completions``."""

    NEUTRAL, TOP_LOGPROBS = CHAT_DEFAULTS, "top_logprobs"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    include_reasoning: StrictBool | None = None
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
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
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeBody(TemplateFields, JsonObject):
    """``POST /tokenize``, vLLM's: of a text or of messages."""

    NEUTRAL = TEMPLATE_DEFAULTS | {"tools": []}
    model: str = ""
    prompt: Text | None = None
    return_token_strs: StrictBool | None = None
    add_special_tokens: StrictBool | None = None

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
    return _fields_of((*RULES.values(), *PROCESSORS.values()))  # to which plugins may add


@functools.lru_cache
def _fields_of(kinds: tuple[type, ...]) -> dict[str, tuple[Any, tuple]]:
    found: dict[str, tuple[Any, tuple]] = {}
    for kind in kinds:
        hints, neutral = get_type_hints(kind), getattr(kind, "NEUTRAL", {})
        for each in dataclasses.fields(kind):
            own = _strict(each.metadata.get("json", hints[each.name]), *each.metadata.get("json_range", ()))
            nothing = (*each.metadata.get("none", ()), *([neutral[each.name]] if each.name in neutral else []))
            found.setdefault(each.name, (own, nothing))
    return found


def _strict(kind: Any, least: float | None = None, most: float | None = None) -> Any:
    """Return the type of JSON for an annotation, with bounds and without conversions between texts and numbers."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    if get_origin(kind) is list:
        return list[_strict(kinds[0])]  # type: ignore[misc]
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
    with naming_fields():
        return complete(kind).model_validate_json(body)


def complete(kind: type[Body]) -> type[Body]:
    """Return a class of bodies with the sampling parameters."""
    if not issubclass(kind, RequestBody):
        return kind
    return _with_fields(kind, tuple((name, own) for name, (own, _) in sampling_fields().items()))
