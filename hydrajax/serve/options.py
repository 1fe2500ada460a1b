"""The options of a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from hydrajax.decoding.keywords import make_rule
from hydrajax.serve.protocol import MOST_ALTERNATIVES, distinct, naming_fields
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

KEY = "HYDRAJAX_API_KEY"
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class ServerOptions(BaseModel):
    """The options of `hydrajax.serve.Server`, which are those of ``hydrajax serve``.

    Attributes:
        name: of the model for clients.
        also: further models, which share the base. A list of ``"DRAFT[@TREE]"`` names them ``NAME:DRAFT[@TREE]``; the
            values of a mapping from names are such texts, or models made by `hydrajax.LanguageModel.with_draft`.
        template: chat template, as in `hydrajax.LanguageModel.chat`.
        host, port: address to listen on; port 0 takes a free one.
        api_key: required below ``/v1``; by default ``$HYDRAJAX_API_KEY``, or none.
        cors: origins of web pages that browsers let ask the server, ``"*"`` for all.
        any_model: answer requests for unknown models with the first one.
        max_new_tokens, temperature: defaults of requests.
        rule: name of the acceptance rule of all requests, whose parameters are fields of requests.
        slots: sequences that run at once, of each model.
        queue: requests that may wait, of each model.
        chunk: prompt tokens per prefill chunk.
        max_prompt: longest prompt in tokens, None for the context.
        cache_memory: megabytes of the KV caches of all models together, prefix cache included; by default enough for
            all slots with the full context, and as much again for the prefix cache.
        prefix_reuse: keep a prefix cache.
        penalties: support penalties and ``min_tokens``, for 5 bytes per sequence and token of the vocabulary.
        top_logprobs: support log-probabilities of this number of most likely tokens.
        warm_up: compile all programs while the server answers; otherwise each at its first use.
        timeout, body_timeout, write_timeout: seconds to answer, to receive a body, and to send one event.
        grace: seconds to finish answers at the end.
        max_body: bytes of a request body.
        max_connections: open connections, at most half of the free file descriptors.
        quiet: log warnings only, not each request (logger ``uvicorn.access``). The command's default is False.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: str = "hydrajax"
    also: list[str] | dict[str, Any] = []
    template: str = "auto"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: str | None = None
    cors: list[str] = []
    any_model: bool = False
    max_new_tokens: Positive = 256
    temperature: float = Field(0.0, ge=0)
    rule: str = "exact"
    slots: Positive = 8
    queue: int = Field(64, ge=0)
    chunk: Positive = 256
    max_prompt: Positive | None = None
    cache_memory: Positive | None = None
    prefix_reuse: bool = True
    penalties: bool = True
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    warm_up: bool = True
    timeout: Seconds = 600.0
    body_timeout: Seconds = 30.0
    write_timeout: Seconds = 60.0
    grace: float = Field(30.0, ge=0)
    max_body: Positive = 4 << 20
    max_connections: Positive = 1000
    quiet: bool = True

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> ServerOptions:
        """Return the options; raise `HydrajaxError` for the first wrong one."""
        with naming_fields():
            return cls(**options)

    @property
    def others(self) -> dict[str, Any]:
        """The further models by name: ``DRAFT[@TREE]``, or a model."""
        return self.also if isinstance(self.also, dict) else {f"{self.name}:{text}": text for text in self.also}

    @property
    def key(self) -> str | None:
        """The API key, None without one."""
        return os.environ.get(KEY) if self.api_key is None else self.api_key

    @pydantic.model_validator(mode="after")
    def _check_texts(self):
        names = [
            self.name,
            *(self.also if isinstance(self.also, dict) else [f"{self.name}:{one}" for one in self.also]),
        ]
        distinct("name", names)
        make_rule(self.rule, **{"temperature": self.temperature} if self.temperature else {})
        address = "an address; 127.0.0.1 is reached from this machine only, 0.0.0.0 from all"
        for field, text, expected in (
            ("host", self.host, address),
            *(("name", name, "printable characters without outer spaces") for name in names),
        ):
            if not _is_plain(text):
                raise ValueError(f"{field}: got {text!r}, expected {expected}")
        for text in self.others.values():
            if isinstance(text, str):
                draft_and_tree(text)
        field = KEY if self.api_key is None else "api_key"
        if self.key == "":
            raise ValueError(f"{field}: got an empty key; to serve without a key, leave it out and unset {KEY}")
        if self.key is not None and not _is_plain(self.key):
            raise ValueError(
                f"{field}: got a key that no header can hold, expected printable characters, no outer spaces"
            )
        return self


def draft_and_tree(text: str) -> tuple[str, str | None, CandidateTree | None]:
    """Parse ``DRAFT[@TREE]``: the draft, and the tree's name and the tree, None for the draft's own."""
    draft, at, name = text.rpartition("@") if "@" in text else (text, "", "")
    return draft, name or None, presets.by_name(name) if at else None


def _is_plain(text: str) -> bool:
    """Return whether headers and JSON can hold a text: bytes that are not UTF-8, among others, are not printable."""
    return text != "" and text.isprintable() and text == text.strip()
