"""The OpenAI-compatible API over HTTP."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from hydrajax.decoding.request import SEED_BITS
from hydrajax.errors import HydrajaxError
from hydrajax.machine import own_version
from hydrajax.serve.api_errors import error_response
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.openapi import document
from hydrajax.serve.options import ServerOptions
from hydrajax.serve.prometheus import ServerMetrics
from hydrajax.serve.prompt_scores import PromptScorer
from hydrajax.serve.protocol import (
    MOST_CHOICES,
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    RequestBody,
    TokenizeBody,
    Tool,
    parse_body,
)
from hydrajax.serve.replies import ReplyChoice, ReplyFormat, usage
from hydrajax.serve.reply import Reply, ending_in_errors
from hydrajax.serve.request_encoder import RequestEncoder
from hydrajax.serve.requests import RequestHandle, Submission
from hydrajax.serve.response_store import ResponseStore
from hydrajax.serve.responses import ResponsesFormat
from hydrajax.serve.responses_body import ResponsesBody, renamed
from hydrajax.serve.served_models import ServedModel, total
from hydrajax.serve.stats import Stats
from hydrajax.serve.stream import EventStream
from hydrajax.serve.structured import FREE, Structure, structure_of
from hydrajax.serve.warm_up import WarmUp
from hydrajax.text.templates import text_of

# Texts of more characters, or prompts of more ids, take long to encode, and a hundred times their size in memory.
LONG_CONTENT, LONG_CONTENTS = 1 << 16, 2
SHORT_CONTENT = 1 << 11  # bytes, characters or ids that take no longer than to hand them to a thread
PAGE = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/docs": "docs.html", "/docs.js": "docs.js"}
# The page loads nothing from other hosts, and no other page may embed it.
POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Api:
    """The routes. Errors are one line in OpenAI's format."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        encoder: RequestEncoder,
        options: ServerOptions,
        hosts: tuple[str, ...] | None = None,
        warm_up: WarmUp | None = None,
    ):
        """``hosts``: host names under which clients may connect, None for any."""
        self._hosts, self._warm_up = hosts, warm_up
        self._models, self._encoder, self._options = {model.name: model for model in models}, encoder, options
        self._by_name = {alias: model for model in models for alias in model.aliases} | self._models
        self._metrics = ServerMetrics(self._stats, {name: model.batcher for name, model in self._models.items()})
        self._long_contents = CapacityLimiter(LONG_CONTENTS)
        self._scorer = PromptScorer(models[0].batcher.executor)  # all models have the same base
        self._stored = ResponseStore(options.stored_responses, options.stored_memory * 1_000_000)

    def _stats(self) -> Stats:
        return total([model.batcher for model in self._models.values()])

    def app(self) -> Starlette:
        hosts, origins = self._hosts, self._options.cors
        every = {"allow_methods": ["*"], "allow_headers": ["*"]}
        middleware = [Middleware(CORSMiddleware, allow_origins=origins, **every)] if origins else []
        if hosts:  # against DNS rebinding: a web page could otherwise reach this server under a host name of its own
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)))
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/responses/{name}", self.response, methods=["GET", "DELETE"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/version", self.version),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/openapi.json", self.openapi),
                *(Route(path, _page(name)) for path, name in PAGE.items()),
            ],
            middleware=middleware,
            exception_handlers=dict.fromkeys((HTTPException, HydrajaxError, Exception), error_response),
        )

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        name = request.path_params.get("name")
        if name is not None:
            return JSONResponse(_listed(self._model(name)))
        return JSONResponse({"object": "list", "data": [_listed(model) for model in self._models.values()]})

    async def health(self, request: Request) -> Response:
        failed, warm_up = self._stats().failed, self._warm_up
        status = {"status": "failed" if failed else "ok"}
        if warm_up is not None:  # requests are answered from the start, but slowly while programs are missing
            status |= {"compiled": warm_up.compiled, "programs": warm_up.total}
        return JSONResponse(status, status_code=503 if failed else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(self._options.key is not None, self._encoder.vocab_size))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": own_version()})

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        model = self._served(body.model)
        if body.messages is None:
            special = body.add_special_tokens is not False
            ids = await self._on_thread(lambda: self._encoder.prompt(body.prompt, special), [body.prompt])
        else:
            plain = _plain(body.messages)
            ids, _ = await self._on_thread(lambda: self._encoder.conversation(plain, fields=body), _texts(plain))
        texts = list(map(self._encoder.after(None).name, ids.tolist())) if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": model.batcher.context, "tokens": ids.tolist()}
        return JSONResponse(found | {"token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        self._served(body.model)
        return JSONResponse({"prompt": await self._on_thread(lambda: self._encoder.text(body.tokens), [body.tokens])})

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        structure, wanted = FREE, body.wanted()
        if wanted is not None:
            encoder = self._encoder
            structure = await self._on_thread(
                lambda: structure_of(body, encoder.call_format, added=encoder.added_tokens), [str(wanted.value)]
            )
        return await self._answer(request, body, await self._prompts(body.prompts()), False, structure)

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, await self._body(request, ChatBody))

    async def responses(self, request: Request) -> Response:
        body = await self._body(request, ResponsesBody)
        items = self._stored.conversation(body.previous_response_id, body.items())
        store = partial(self._stored.put, items=items) if body.store else lambda response: None
        form = ResponsesFormat(self._served(body.model).name, body, self._options.temperature, store)
        try:
            return await self._chat(request, body.chat(items), form)
        except HydrajaxError as error:
            raise renamed(error) from None

    async def response(self, request: Request) -> Response:
        self._check_key(request)
        stored = self._stored.get(name := request.path_params["name"], "id")
        if request.method != "DELETE":
            return Response(stored.response, media_type="application/json")
        self._stored.delete(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _chat(self, request: Request, body: ChatBody, form: ResponsesFormat | None = None) -> Response:
        plain, tools = _plain(body.messages), _plain(body.callable_tools())

        def encoded() -> tuple[np.ndarray, Structure]:
            encoder = self._encoder
            ids, thinking = encoder.conversation(plain, tools, body)
            found = structure_of(body, encoder.call_format, encoder.harmony, encoder.added_tokens)
            return ids, found.after(thinking)

        ids, structure = await self._on_thread(encoded, [str(tools), *_texts(plain)])
        return await self._answer(request, body, [ids], True, structure, form)

    # --- prompts ----------------------------------------------------------------------------------------------

    async def _prompts(self, contents: Sequence[str | list[int]]) -> list[np.ndarray]:
        def encoded() -> list[np.ndarray]:
            return [self._encoder.prompt(content) for content in contents]

        short = sum(map(len, contents)) <= SHORT_CONTENT
        return encoded() if short else await self._on_thread(encoded, contents)

    async def _on_thread(self, encode: Callable[[], Any], contents: Sequence[str | list[int]]) -> Any:
        """Encode contents on a thread. Short ones never wait for long ones, which have their own threads."""
        limiter = self._long_contents if sum(map(len, contents)) > LONG_CONTENT else None
        return await to_thread.run_sync(encode, limiter=limiter)

    # --- a request --------------------------------------------------------------------------------------------

    def _model(self, name: str) -> ServedModel:
        if name not in self._by_name:
            raise HTTPException(404, f"model: got '{name}', expected one of: {', '.join(self._models)}")
        return self._by_name[name]

    def _served(self, name: str) -> ServedModel:
        """Return the model of a request, the first one for a request that names none."""
        if not name or (self._options.any_model and name not in self._by_name):
            return next(iter(self._models.values()))
        return self._model(name)

    def _check_key(self, request: Request) -> None:
        if (key := self._options.key) is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = secrets.compare_digest(given.strip().encode("latin-1"), key.encode())  # the header's bytes
        if not same or scheme.lower() != "bearer":
            raise HTTPException(
                401,
                "the API key is missing or wrong, expected the header 'Authorization: Bearer KEY'",
                {"www-authenticate": "Bearer"},
            )

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        self._check_key(request)
        # Browsers let pages of other origins send other content types without a preflight request.
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            raise HTTPException(415, f"the content type must be application/json, got '{content_type}'")
        body, most, seconds = bytearray(), self._options.max_body, self._options.body_timeout
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise HTTPException(413, f"the body has more than {most} bytes, the limit of --max-body")
        except ClientDisconnect:
            raise HTTPException(400, "the client has disconnected") from None
        except TimeoutError:
            raise HTTPException(408, f"the body was not received within {seconds} seconds") from None
        short = len(body) <= SHORT_CONTENT
        return parse_body(kind, bytes(body)) if short else await run_in_threadpool(parse_body, kind, bytes(body))

    async def _answer(
        self,
        request: Request,
        body: RequestBody,
        prompts: list,
        chat: bool,
        structure: Structure = FREE,
        form: ReplyFormat | ResponsesFormat | None = None,
    ) -> Response:
        model = self._served(body.model)
        batcher, wanted = model.batcher, body.stream_options
        continuous = wanted.include_usage and wanted.continuous_usage_stats
        form = form or ReplyFormat(model.name, chat, continuous, body.prompt_logprobs)
        form.reasoning = not chat or body.include_reasoning is not False
        n, limit = body.n or 1, self._options.max_new_tokens if body.limit() is None else body.limit()
        if len(prompts) * n > MOST_CHOICES:
            raise HydrajaxError(f"n: got {len(prompts)} prompts x {n} choices, expected at most {MOST_CHOICES} in all")
        echo_top, whole_echo = body.scored(), body.scored() is not None and not body.stream
        if (top := body.top_logprobs_count()) > batcher.top_logprobs and not whole_echo:
            raise HydrajaxError(
                f"{body.TOP_LOGPROBS}: got {top}, expected at most {batcher.top_logprobs}; "
                "start the server with a larger --top-logprobs"
            )
        requests = await self._requests(batcher, body, prompts, structure, max(limit, 1))
        echoed: list[str | None] = [None] * len(prompts)
        if not chat and body.echo:
            echoed = [await run_in_threadpool(self._encoder.text, content) for content in body.prompts()]
        reply = Reply(batcher, partial(self._metrics.ended, model.name), request, self._options.timeout)
        streams = False
        try:
            if limit:
                handles = batcher.submit(requests, reply.changed)
            else:
                handles = list(map(RequestHandle.without_answer, requests))
            options = (self._encoder.after, body.wants_logprobs(), top, wanted.include_drafts)
            reply.choices = [
                ReplyChoice(index, handle, *options, echoed[index // n], structure.calls)
                for index, handle in enumerate(handles)
            ]
            if not body.stream:
                await reply.wait()
            if tops := [k for k in (echo_top, body.prompt_logprobs) if k is not None]:
                await reply.score(self._scorer, max(tops), whole_echo)
            if streams := bool(body.stream):
                events = reply.events(form, n if wanted.include_usage else None)
                return EventStream(ending_in_errors(events, form), self._options.write_timeout, reply.close)
            return JSONResponse(form.whole(reply.choices, usage(reply.choices, n)))
        finally:
            if not streams:
                reply.close()

    async def _requests(
        self, batcher: Batcher, body: RequestBody, prompts: Sequence[np.ndarray], structure: Structure, limit: int
    ) -> list[Submission]:
        """Return the sequences of all choices, each prompt's together."""
        fields = {"max_new_tokens": limit, "stop": body.stops(), "stop_token_ids": body.stop_token_ids or ()}
        fields |= {"ignore_eos": bool(body.ignore_eos), "min_tokens": body.min_tokens or 0}
        fields |= {"remembered": body.corpus is not False, "grammar": structure.grammar}
        fields["include_stop_str_in_output"] = bool(body.include_stop_str_in_output)
        fields["seed"] = secrets.randbits(SEED_BITS) if body.seed is None else body.seed  # one for all choices
        if body.bad_words:
            fields["bad_words"] = await self._on_thread(lambda: self._encoder.words(body.bad_words), body.bad_words)
        sampling = body.sampling()
        if sampling["temperature"] is None and self._options.temperature:
            sampling["temperature"] = self._options.temperature

        def made() -> list[Submission]:
            firsts = [batcher.request(ids, **fields, **sampling) for ids in prompts]
            return [first.numbered(number) for first in firsts for number in range(body.n or 1)]

        if structure.grammar is None:
            return made()
        try:
            return await self._on_thread(made, [structure.grammar.text])  # compiles the grammar
        except HydrajaxError as error:
            raise structure.named(error) from None


def _listed(model: ServedModel) -> dict[str, Any]:
    """An entry of ``/v1/models``."""
    entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "hydrajax", "root": model.root}
    return entry | {"parent": None, "max_model_len": model.batcher.context, "hydrajax": dict(model.about)}


def _plain(items: Sequence[ChatMessage] | Sequence[Tool]) -> list[dict[str, Any]]:
    """Return messages or tools for chat templates."""
    return [item.plain() for item in items]


def _texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [text_of(message["content"]) for message in messages]


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a file of the chat page."""

    async def answer(request: Request) -> Response:
        return FileResponse(Path(__file__).with_name("page") / name, headers={"content-security-policy": POLICY})

    return answer
