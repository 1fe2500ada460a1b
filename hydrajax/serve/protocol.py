"""The bodies of requests, in the words of OpenAI's interface.

What would change an answer and is not done here is refused, so that nobody is left to think that it was.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StrictStr

from hydrajax.errors import HydrajaxError
from hydrajax.generation import SEED_BITS

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_ALTERNATIVES = 128, 16, 128, 20
Text = Annotated[StrictStr, Field(min_length=1)]


class StreamOptions(BaseModel):
    """``include_obfuscation`` pads OpenAI's own streams; there is nothing to hide here. ``include_drafts``, beyond
    OpenAI's, tells of every piece which of its tokens were drafted.
    """

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_drafts: bool = False
    include_obfuscation: bool = False


class Common(BaseModel):
    """What both kinds of requests have. None is the server's default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Of no effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def limit(self) -> int | None:
        """Most new tokens."""
        return self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def numbers(self) -> dict[str, Any]:
        """The numbers of rule and processors. A penalty of no effect is none, and so is a top-k of -1 or 0, as in
        vLLM."""
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        found = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p", *neutral)}
        found |= {name: None for name, value in neutral.items() if found[name] == value}
        return found | {"top_k": self.top_k if self.top_k and self.top_k > 0 else None, "logit_bias": self.logit_bias}

    ALTERNATIVES: ClassVar[str]  # the field that asks for the likeliest tokens beside each

    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    def alternatives(self) -> int:
        """How many of the likeliest tokens are to be shown beside each."""
        return getattr(self, self.ALTERNATIVES) or 0

    @property
    def includes_drafts(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_drafts

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Common):
    """``POST /v1/completions``."""

    ALTERNATIVES = "logprobs"

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: int | None = None

    @pydantic.field_validator("prompt")
    @classmethod
    def _is_prompt(cls, value: Any) -> Any:
        several = isinstance(value, list) and not _is_ids(value) and len(value) <= MOST_PROMPTS
        if not any(all(map(kind, value if several else [value])) for kind in (_is_text, _is_ids)) or value == []:
            raise ValueError(f"must be a text, a list of token ids, or a list of up to {MOST_PROMPTS} of either")
        return value

    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if _is_text(self.prompt) or _is_ids(self.prompt) else list(self.prompt)

    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @pydantic.model_validator(mode="after")
    def _best_is_all(self):
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: only as many as n can be had")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """As templates take it; what OpenAI calls a developer they know as the system."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ChatBody(Common):
    """``POST /v1/chat/completions``."""

    ALTERNATIVES = "top_logprobs"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @pydantic.model_validator(mode="after")
    def _alternatives_are_of_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self


def parsed(kind: type[Common], body: bytes) -> Common:
    """A request's body. Raises `HydrajaxError` naming the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise HydrajaxError(_said(error.errors(include_url=False, include_context=False)[0])) from None


def _said(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not JSON ({error['msg'].removeprefix('Invalid JSON: ')})"
    # Where a field may be of several kinds, pydantic adds which of them it tried.
    place = ".".join(str(part) for part in error["loc"] if _is_field(part))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "is not known here"
    return f"{place}: {message}" if place else message


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(item) is int for item in value)


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "bool", "constrained"))
