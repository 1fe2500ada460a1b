"""The options of a server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from hydrajax.decoding.keywords import make_rule
from hydrajax.errors import not_allowed
from hydrajax.serve.call_formats import NAMES
from hydrajax.serve.json_objects import MOST_ALTERNATIVES, distinct, naming_fields, quoted
from hydrajax.serve.reasoning import PARSERS
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

KEY = "HYDRAJAX_API_KEY"
DEFAULT_NAME = "hydrajax"  # of a model whose base has no name; the first model always answers to it
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class ServerOptions(BaseModel):
    """The options of `hydrajax.serve.Server`, which are those of ``hydrajax serve``; their texts are its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Listen on this address."""
    port: int = Field(8000, ge=0, le=65535)
    """Listen on this port, 0 for a free one."""
    api_key: str | None = None
    """Require this key below /v1 (default: $HYDRAJAX_API_KEY, or no key)."""
    cors: list[str] = []
    """Let web pages of this origin ask the server, such as https://example.org, or * for all; repeatable."""
    name: str | None = None
    """Name the model for clients (default: the name of the base, or of its directory)."""
    also: list[str] | dict[str, Any] = []
    """Also serve the base with another draft, or with none, as model NAME:DRAFT[@TREE]; repeatable. In Python also a
    mapping from names to such texts, or to models made by `hydrajax.LanguageModel.with_draft`."""
    any_model: bool = False
    """Answer requests for unknown models with the first one (default: 404)."""
    timeout: Seconds = 600.0
    """Cut answers off after this many seconds."""
    body_timeout: Seconds = 30.0
    """Wait this many seconds for a request's body."""
    write_timeout: Seconds = 60.0
    """Wait this many seconds for a client to take one event."""
    grace: float = Field(30.0, ge=0)
    """Finish answers for this many seconds at shutdown."""
    max_body: Positive = 4 << 20
    """Limit request bodies to this many bytes."""
    max_connections: Positive = 1000
    """Keep at most this many connections open, and at most half of the free file descriptors."""
    quiet: bool = True
    """Log warnings only, not each request (logger ``uvicorn.access``). The command's default is False."""
    template: str = "auto"
    """Use a chat template: that of the tokenizer (auto), vicuna, plain, raw, or a file in Jinja."""
    tool_parser: str = "auto"
    """Read and constrain tool calls in the format of this parser of vLLM: hermes, qwen3_coder, llama3_json,
    llama4_pythonic, mistral, gemma4, functiongemma or openai; auto: the one that the chat template describes."""
    chat_template_kwargs: dict[str, Any] = {}
    """Set these variables of the chat template, unless a request does, such as '{"enable_thinking": false}'."""
    reasoning_parser: str = "auto"
    """Read the reasoning of answers in the format of this parser of vLLM: qwen3, deepseek_r1, deepseek_v3, glm45,
    gemma4, mistral, seed_oss or openai_gptoss; auto: the one whose marks the chat template has; none: no reasoning."""
    max_new_tokens: Positive = 256
    """Generate at most this many tokens, unless a request has a limit."""
    temperature: float = Field(0.0, ge=0)
    """Sample at this temperature, unless a request has one; 0 is greedy."""
    rule: str = "exact"
    """Accept drafts by this rule, whose parameters are fields of requests."""
    slots: Positive = 8
    """Run up to this many sequences of a model at once."""
    queue: int = Field(64, ge=0)
    """Let up to this many requests of a model wait."""
    chunk: Positive = 256
    """Prefill prompts in chunks of this many tokens."""
    max_prompt: Positive | None = None
    """Limit prompts to this many tokens (default: the context)."""
    cache_memory: Positive | None = None
    """Limit the KV caches of all models together to this many megabytes, prefix cache included (default: all slots with
    full context, and as much for the prefix cache)."""
    prefix_reuse: bool = True
    """Keep a prefix cache."""
    penalties: bool = True
    """Support penalties and min_tokens, for 5 bytes per sequence and token of the vocabulary."""
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    """Support log-probabilities of this many most likely tokens, up to 20."""
    stored_responses: int = Field(1000, ge=0)
    """Keep the latest responses of /v1/responses in memory for requests that continue them, at most this many."""
    stored_memory: Positive = 64
    """Limit the stored responses and their conversations to this many megabytes."""
    warm_up: bool = True
    """Compile all programs while the server answers; otherwise each at its first use."""

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> ServerOptions:
        """Return the options; raise `HydrajaxError` for the first wrong one."""
        with naming_fields():
            return cls(**options)

    @property
    def others(self) -> dict[str, Any]:
        """The further models by name: ``DRAFT[@TREE]``, or a model."""
        return self.also if isinstance(self.also, dict) else {f"{self.first}:{text}": text for text in self.also}

    @property
    def first(self) -> str:
        """The name of the first model."""
        return DEFAULT_NAME if self.name is None else self.name

    @property
    def key(self) -> str | None:
        """The API key, None without one."""
        return os.environ.get(KEY) if self.api_key is None else self.api_key

    @pydantic.field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            raise ValueError(f"got {quoted(value)}, expected a JSON object") from None

    @pydantic.model_validator(mode="after")
    def _check_texts(self):
        names = [
            self.first,
            *(self.also if isinstance(self.also, dict) else [f"{self.first}:{one}" for one in self.also]),
        ]
        distinct("name", names)
        for field, allowed in (("tool_parser", ("auto", *NAMES)), ("reasoning_parser", PARSERS)):
            if (name := getattr(self, field)) not in allowed:
                raise not_allowed(field, name, allowed)
        make_rule(self.rule, **{"temperature": self.temperature} if self.temperature else {})
        address = "an address; 127.0.0.1 is reached from this machine only, 0.0.0.0 from all"
        for field, text, expected in (
            ("host", self.host, address),
            *(("name", name, "printable characters without outer spaces") for name in names),
        ):
            if not is_plain(text):
                raise ValueError(f"{field}: got {text!r}, expected {expected}")
        for text in self.others.values():
            if isinstance(text, str):
                draft_and_tree(text)
        field = KEY if self.api_key is None else "api_key"
        if self.key == "":
            raise ValueError(f"{field}: got an empty key; to serve without a key, leave it out and unset {KEY}")
        if self.key is not None and not is_plain(self.key):
            raise ValueError(
                f"{field}: got a key that no header can hold, expected printable characters, no outer spaces"
            )
        return self


def draft_and_tree(text: str) -> tuple[str, str | None, CandidateTree | None]:
    """Parse ``DRAFT[@TREE]``: the draft, and the tree's name and the tree, None for the draft's own."""
    draft, at, name = text.rpartition("@") if "@" in text else (text, "", "")
    return draft, name or None, presets.by_name(name) if at else None


def is_plain(text: str) -> bool:
    """Return whether headers and JSON can hold a text: bytes that are not UTF-8, among others, are not printable."""
    return text != "" and text.isprintable() and text == text.strip()
