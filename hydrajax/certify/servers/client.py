"""A client of OpenAI-compatible servers on the standard library: no retries, a time limit, one-line errors."""

import http.client
import json
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from hydrajax.certify.servers.answers import Answer, Malformed, streamed_answers, whole_answers
from hydrajax.certify.servers.questions import Question
from hydrajax.errors import HydrajaxError, one_line

NOT_OFFERED = (400, 404, 405, 415, 422, 501)
MOST_LOGPROBS = (5, 1, 0)  # tried in this order
Reply = tuple[Answer, ...]


class Refused(Exception):
    """The server does not offer what the question asks for: a status such as 400, with its message."""


class NoAnswer(Exception):
    """The server failed: a status such as 500, a lost connection, the time limit, or a malformed response."""


class Client:
    """A server, whose ``url`` ends with ``/v1``, and one of its models."""

    def __init__(
        self, field: str, url: str, *, api_key: str | None = None, model: str | None = None, timeout: float = 300.0
    ):
        """Connect to a server, which may be silent for ``timeout`` seconds, and choose its model, by default the first.

        Raises:
            HydrajaxError: the server cannot be reached, refuses the key, is not an OpenAI-compatible one, or has no
                model, or none of this name.
        """
        self.field, self._timeout, self._key = field, timeout, api_key
        self.url, self._secure, self._host, self._port, self._prefix = _parsed(field, url)
        self.model = self._chosen(model)
        self._most_logprobs: dict[bool, int | None] = {}

    def __str__(self) -> str:
        return f"{self.model} at {self.url}"

    def ask(self, question: Question) -> Reply:
        """Return the answers to a question; see `described`."""
        return self.described(question)[0]

    def described(self, question: Question) -> tuple[Reply, dict[str, Any], dict[str, Any] | None]:
        """Return the answers to a question, their token counts, and vLLM's counts of speculation or None.

        Raises:
            Refused: the server does not offer it.
            NoAnswer: the server failed.
            HydrajaxError: the key is refused, or the server is busy.
        """
        body = json.dumps({"model": self.model} | question.body()).encode()
        connection = None
        try:
            connection, response = self._send("POST", question.path, body)
            if response.status != 200:
                self._refuse(response.status, response.read())
            if question.stream:
                return _streamed(response)
            whole = json.loads(response.read())
            return whole_answers(whole), *_counts([whole])
        except TimeoutError:
            raise NoAnswer(f"silent for {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            is_lost = connection is not None or not isinstance(error, OSError)
            what = "the connection was lost" if is_lost else "no connection"
            raise NoAnswer(f"{what}: {_reason(error)}") from None
        except Malformed as error:
            raise NoAnswer(f"malformed response: {one_line(error)}") from None
        except ValueError as error:
            if isinstance(error, HydrajaxError):
                raise
            raise NoAnswer("malformed response: not JSON") from None
        finally:
            if connection is not None:
                connection.close()

    def most_logprobs(self, question: Question) -> int | None:
        """Return how many top log-probabilities the server offers, up to 5; None if it offers none at all."""
        if question.chat not in self._most_logprobs:
            offered = (number for number in MOST_LOGPROBS if self._gives(question, number))
            self._most_logprobs[question.chat] = next(offered, None)
        return self._most_logprobs[question.chat]

    def _gives(self, question: Question, number: int) -> bool:
        try:
            answers = self.ask(question.but(max_tokens=2, logprobs=number, stream=False, n=1, stop=()))
        except (Refused, NoAnswer):
            return False
        return bool(answers[0].tokens) and answers[0].tokens[0].logprob is not None

    # --- HTTP -------------------------------------------------------------------------------------------------

    def _send(self, method: str, path: str, body: bytes | None = None, prefix: str | None = None):
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, (self._prefix if prefix is None else prefix) + path, body, headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _refuse(self, status: int, content: bytes) -> None:
        said = _message(content)
        if status in (401, 403):
            raise HydrajaxError(
                f"{self.field}: {self.url} refuses the API key ({status}: {said}); give --api-key or set OPENAI_API_KEY"
            )
        if status in (429, 503):
            raise HydrajaxError(
                f"{self.field}: {self.url} is busy or not ready ({status}: {said}); wait, let it queue more requests, "
                "or lower --concurrency"
            )
        # Servers on FastAPI with their own error handler, such as llama-cpp-python's, answer wrong fields with 500.
        if status in NOT_OFFERED or (status == 500 and "validation error" in said):
            raise Refused(f"{status}: {said}")
        raise NoAnswer(f"{status}: {said}")

    def _got(self, path: str, prefix: str | None = None) -> tuple[int, bytes]:
        """Return status and content of a GET request. Raises `HydrajaxError` if the server cannot be reached."""
        try:
            connection, response = self._send("GET", path, prefix=prefix)
            try:
                return response.status, response.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise HydrajaxError(f"{self.field}: cannot reach {self.url}: {_reason(error)}") from None

    def counters(self) -> dict[str, float]:
        """Return vLLM's values in ``/metrics``, added up over labels; none if the server has no such route."""
        status, content = self._got("/metrics", self._prefix.removesuffix("/v1"))
        found = re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", content.decode(errors="replace"), re.MULTILINE)
        values: dict[str, float] = {}
        for name, value in found if status == 200 else ():
            values[name] = values.get(name, 0.0) + float(value)
        return values

    def _knows(self, name: str) -> bool:
        """Return whether the server has a model of this name, which it may not list."""
        status, content = self._got(f"/models/{quote(name)}")
        with suppress(ValueError):
            return status == 200 and "id" in json.loads(content)
        return False

    def _chosen(self, wanted: str | None) -> str:
        status, content = self._got("/models")
        if status in (401, 403, 429, 503):
            self._refuse(status, content)
        try:
            names = [model["id"] for model in json.loads(content)["data"]]
        except (ValueError, TypeError, KeyError):
            names = None
        if status != 200 or names is None:
            raise HydrajaxError(
                f"{self.field}: {self.url}/models answered with status {status} and no list of models, expected an "
                "OpenAI-compatible server"
            )
        if not names:
            raise HydrajaxError(f"{self.field}: {self.url} lists no models; load one")
        if wanted is not None and wanted not in names and not self._knows(wanted):
            flag = "model" if self.field == "server" else f"{self.field}_model"
            raise HydrajaxError(f"{flag}: got '{wanted}', expected one of: {', '.join(map(str, names))}")
        return wanted or names[0]


def _parsed(field: str, url: str) -> tuple[str, bool, str, int | None, str]:
    """Return the URL that ends with /v1, and its parts. Raises `HydrajaxError`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise HydrajaxError(f"{field}: got '{one_line(url, 80)}', expected a URL such as http://127.0.0.1:8000")
    prefix = parts.path.rstrip("/")
    prefix = prefix if prefix.endswith("/v1") else f"{prefix}/v1"
    shown = f"[{host}]" if ":" in host else host
    shown += "" if port is None else f":{port}"
    return f"{parts.scheme}://{shown}{prefix}", parts.scheme == "https", host, port, prefix


def _counts(events: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the last token counts and counts of speculation."""
    usage, metrics = ([event.get(name) or {} for event in events] for name in ("usage", "metrics"))
    speculation = [each.get("speculative_decoding") for each in metrics if isinstance(each, dict)]
    return next(filter(None, reversed(usage)), {}), next(filter(None, reversed(speculation)), None)


def _streamed(response: http.client.HTTPResponse) -> tuple[Reply, dict[str, Any], dict[str, Any] | None]:
    events: list[Any] = []
    ended = False
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if ended := data == b"[DONE]":
                break
            events.append(json.loads(data))
    return streamed_answers(events, ended), *_counts(events)


def _message(content: bytes) -> str:
    """Return the message of an error response, cut to one line."""
    try:
        found = json.loads(content)
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = content.decode(errors="replace")
    return one_line(found or "no message", 160)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({one_line(error.reason or error, 80)})"
    return one_line(getattr(error, "strerror", None) or error or type(error).__name__, 120)
