"""OpenAI's interface over HTTP, in front of a batcher."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from hydrajax.errors import HydrajaxError
from hydrajax.serve.batcher import Batcher, Stats
from hydrajax.serve.prometheus import Metrics
from hydrajax.serve.protocol import MOST_CHOICES, ChatBody, Common, CompletionBody, parsed
from hydrajax.serve.replies import ChatCompletion, Choice, Completion, Form, usage
from hydrajax.serve.request_encoder import Encoder
from hydrajax.serve.requests import Closed, QueueFull
from hydrajax.serve.served import Served, check_names, together
from hydrajax.serve.stream import EventStream

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


PAGE = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
# Nothing from elsewhere is loaded, and no other page may show this one.
POLICY = "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Settings:
    """Of the interface.

    max_new_tokens, temperature: of requests that do not say. api_key: asked for below
    /v1 where it is given. max_body: bytes. body_timeout, timeout, write_timeout: seconds for a body to come, for an
    answer to be made and for one piece of it to be taken. hosts: names by which clients may call it, None for any.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    api_key: str | None = None
    max_body: int = 4 << 20
    body_timeout: float = 30.0
    timeout: float = 600.0
    write_timeout: float = 60.0
    hosts: tuple[str, ...] | None = None


class Interface:
    """The routes. Requests that cannot be answered get a status and one line in OpenAI's form.

    served: what clients choose from by the name of the model. Where there is only one, it answers to any name.
    """

    def __init__(self, served: Sequence[Served], encoder: Encoder, settings: Settings):
        check_names([one.name for one in served])
        self._served, self._encoder, self._settings = {one.name: one for one in served}, encoder, settings
        self._metrics = Metrics(self._stats)

    def _stats(self) -> Stats:
        return together([one.batcher.stats() for one in self._served.values()])

    def app(self) -> Starlette:
        hosts = self._settings.hosts
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                *(Route(path, _page(name)) for path, name in PAGE.items()),
            ],
            # A page from elsewhere, in a browser on this machine, could otherwise call it by a name of its own.
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))] if hosts else [],
            exception_handlers={HTTPException: _refusal, HydrajaxError: _refusal},
        )

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        name = request.path_params.get("name")
        if name is not None:
            return JSONResponse(_listed(self._named(name)))
        return JSONResponse({"object": "list", "data": [_listed(one) for one in self._served.values()]})

    def _named(self, name: str) -> Served:
        if name not in self._served:
            raise HTTPException(404, f"model: found '{name}', there is {', '.join(self._served)}")
        return self._served[name]

    def _chosen(self, name: str) -> Served:
        """By the ``model`` of a request."""
        if len(self._served) == 1 or not name:
            return next(iter(self._served.values()))
        return self._named(name)

    async def health(self, request: Request) -> Response:
        failed = self._stats().failed
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        prompts = await run_in_threadpool(lambda: [self._encoder.prompt(content) for content in body.prompts()])
        return await self._answer(request, body, prompts, Completion)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        messages = [message.plain() for message in body.messages]
        prompts = [await run_in_threadpool(self._encoder.conversation, messages)]
        return await self._answer(request, body, prompts, ChatCompletion)

    # --- a request --------------------------------------------------------------------------------------------

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not secrets.compare_digest(given.encode(), key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    async def _body(self, request: Request, kind: type[Common]) -> Any:
        self._check_key(request)
        # Pages from elsewhere can make a browser send other types without asking first.
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be of type application/json")
        body, most = bytearray(), self._settings.max_body
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise HTTPException(413, f"the body has more than {most} bytes")
        except ClientDisconnect:
            raise HTTPException(400, "the client has gone away") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._settings.body_timeout} seconds") from None
        return await run_in_threadpool(parsed, kind, bytes(body))

    async def _answer(self, request: Request, body: Common, prompts: list, kind: type[Form]) -> Response:
        chosen = self._chosen(body.model)
        batcher, form = chosen.batcher, kind(chosen.name)
        n, numbers = body.n or 1, body.numbers()
        if numbers["temperature"] is None:
            numbers["temperature"] = self._settings.temperature
        settings = {
            "max_new_tokens": body.limit() or self._settings.max_new_tokens,
            "stop": body.stops(),
            "seed": body.seed,
            **numbers,
        }
        if numbers["temperature"] and body.seed is None:
            settings["seed"] = secrets.randbits(32)  # one for all choices, which are numbered
        if len(prompts) * n > MOST_CHOICES:
            raise HydrajaxError(
                f"n: at most {MOST_CHOICES} answers can be had at once, found {len(prompts)} prompts x {n}"
            )
        if (asked := body.alternatives()) > (kept := batcher.alternatives):
            raise HydrajaxError(f"{body.ALTERNATIVES}: found {asked}, this server keeps {kept} (--top-logprobs)")
        requests = [batcher.request(ids, number=number, **settings) for ids in prompts for number in range(n)]
        answer = _Answer(batcher, self._metrics, request, self._settings.timeout)
        try:
            tickets = batcher.submit(requests, answer.changed)
            shown = {"token_text": self._encoder.token_text, "logprobs": body.wants_logprobs()}
            shown |= {"alternatives": asked, "drafts": body.includes_drafts}
            answer.choices = [Choice(index, ticket, **shown) for index, ticket in enumerate(tickets)]
            if body.stream:
                events = answer.events(form, n if body.includes_usage else None)
                return EventStream(events, self._settings.write_timeout, answer.close)
            await answer.whole()
            return JSONResponse(form.whole(answer.choices, usage(answer.choices, n)))
        finally:
            if not body.stream or not answer.choices:
                answer.close()


def _listed(served: Served) -> dict[str, Any]:
    """As the list of models shows it."""
    shown = {"id": served.name, "object": "model", "created": 0, "owned_by": "hydrajax"}
    return shown | {"hydrajax": dict(served.about)}


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """A file of the chat page."""

    async def answer(request: Request) -> Response:
        return FileResponse(Path(__file__).with_name("page") / name, headers={"content-security-policy": POLICY})

    return answer


class _Answer:
    """The choices of one request while they are made. A client that goes away, or too much time, breaks them off.

    `close` must follow, whatever happens.
    """

    def __init__(self, batcher: Batcher, metrics: Metrics, request: Request, timeout: float):
        self._batcher, self._metrics, self._request = batcher, metrics, request
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self.choices: list[Choice] = []
        self._gone = asyncio.create_task(self._until_gone())
        self._late = self._loop.call_later(timeout, self._break_off)

    def changed(self) -> None:
        """On the batcher's thread: there is something new."""
        with suppress(RuntimeError):  # the loop is closed: the server is gone, and nobody waits
            self._loop.call_soon_threadsafe(self._news.set)

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._break_off()

    def _break_off(self) -> None:
        for choice in self.choices:
            if not choice.ticket.done:
                self._batcher.cancel(choice.ticket)

    def close(self) -> None:
        """Nobody asks for more."""
        self._gone.cancel()
        self._late.cancel()
        self._break_off()
        for choice in self.choices:
            self._metrics.ended(choice.ticket)

    async def _change(self) -> None:
        await self._news.wait()
        self._news.clear()

    async def whole(self) -> None:
        """Until all choices are over. Raises the error of one that has failed."""
        while not all(choice.ticket.done for choice in self.choices):
            await self._change()
        for choice in self.choices:
            if choice.ticket.error is not None:
                raise choice.ticket.error

    async def events(self, form: Form, usage_for: int | None) -> AsyncGenerator[str, None]:
        """Server-sent events. usage_for: choices for each prompt, where the counts are wanted."""
        choices = self.choices
        for event in form.opening(choices):
            yield _event(event)
        while True:
            for choice in choices:
                if choice.ticket.error is not None:
                    yield _event(_error(str(choice.ticket.error), 503))
                    return
                for event in form.pieces(choice):
                    yield _event(event)
            if all(choice.ended for choice in choices):
                break
            await self._change()
        if usage_for is not None:
            yield _event(form.closing(choices, usage(choices, usage_for)))
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(message: str, status: int) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": HydrajaxError(message).field, "code": None}}


async def _refusal(request: Request, error: Exception) -> Response:
    """One line in OpenAI's form. Clients try again after 429 and 503."""
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    else:
        status = 429 if isinstance(error, QueueFull) else 503 if isinstance(error, Closed) else 400
        message, headers = str(error), {"retry-after": "1"} if status == 429 else None
    return JSONResponse(_error(message, status), status_code=status, headers=headers)
