"""An OpenAI-compatible server without a model, whose speculation can have a planted fault.

The next token is a function of the prompt and the tokens before it. A step "accepts" the tokens at positions that are
no multiple of `STEP`.
"""

import itertools
import json
import random
import threading
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STEP = 3
LOGPROBS = (-0.3, -1.8, -3.0, -4.0, -5.0)
TIED = (-0.9, -0.91, -3.0, -4.0, -5.0)
TIE_AT = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "</s>"
VALID = {"city": "Lima", "weather": "rainy", "degrees": 20, "windy": True}


def accepted(position: int) -> bool:
    return position % STEP != 0


def top_of(prompt: str, before: list[str]) -> list[tuple[str, float]]:
    """Return the five most likely next tokens, of three letters and a space, with their log-probabilities."""
    draw = random.Random(zlib.crc32(f"{prompt}|{''.join(before)}".encode()))
    words: list[str] = []
    while len(words) < len(LOGPROBS):
        if (word := " " + "".join(draw.choices(LETTERS, k=3))) not in words:
            words.append(word)
    if len(before) > 8 and draw.random() < 0.05:
        words[0] = END
    return list(zip(words, TIED if len(before) == TIE_AT else LOGPROBS, strict=True))


class FakeModel:
    """Answers of the server. ``fault`` is the name of the planted one, "" for none."""

    def __init__(self, fault: str = ""):
        self.fault, self.calls, self.running = fault, itertools.count(), 0
        self.heads: set[str] = set()
        self.last, self.totals = "", Counter()
        self.lock = threading.Lock()

    def choices(self, body: dict, prompt: str) -> list[dict]:
        with self.lock:
            self.running += 1
        try:
            if self.fault in ("mixes requests", "invalid JSON under load", "spaced JSON under load"):
                time.sleep(0.004)
            n, found = body.get("n", 1), []
            for index in range(n):
                number = 0 if self.fault == "copies" else index
                found.append(self._choice(body, prompt, number) | {"index": index})
            return found
        finally:
            with self.lock:
                self.running -= 1

    def _choice(self, body: dict, prompt: str, number: int) -> dict:
        if "response_format" in body:
            return {"text": self._json(), "finish_reason": "stop", "tokens": []}
        if "tools" in body:
            return self._call(body)
        tokens, ended = self._tokens(body, self._seen(prompt), number)
        text = "".join(token for token, _, _ in tokens)
        reason = "stop" if ended else "length"
        for stop in body.get("stop") or ():
            if stop in text:
                end = text.index(stop)
                if self.fault == "stop string leaks":
                    end = min(len(text), end + len(stop) + 2)
                text, reason = text[:end], "stop"
        if self.fault == "wrong finish reason" and reason == "length":
            reason = "stop"
        with self.lock:
            own, self.last = text, text
            if self.fault == "mixes requests" and self.running > 1 and body["temperature"] == 0:
                text = self._other or own
            self._other = own
        return {"text": text, "finish_reason": reason, "tokens": tokens}

    _other = ""

    def _seen(self, prompt: str) -> str:
        """Return the prompt as the cache has it."""
        head = prompt[:100]
        hit = len(prompt) > 100 and head in self.heads
        self.heads.add(head)
        return prompt[1:] if hit and self.fault == "prefix cache" else prompt

    def _tokens(self, body: dict, prompt: str, number: int) -> tuple[list[tuple], bool]:
        seed = next(self.calls) if self.fault == "ignores seeds" else body.get("seed")
        draw = random.Random(f"{seed} {number}")
        found, limit, before = [], body["max_tokens"], []
        if self.fault == "exceeds the limit":
            limit = -(-limit // STEP) * STEP + 1
        while len(found) < limit:
            top = top_of(prompt, before)
            at = len(before)
            chosen = top[0]
            if body["temperature"]:
                chosen = draw.choice(top)
            elif self.fault == "accepts a wrong token" and at == 5:
                chosen = top[2]
            elif self.fault == "tie" and at == TIE_AT:
                chosen = top[1]
            if chosen[0] == END or (self.fault == "ends early" and at == 7):
                return found, True
            logprob = chosen[1] - 0.5 * (self.fault == "draft's log-probabilities" and accepted(at))
            found.append((chosen[0], logprob, top))
            before.append(chosen[0])
        return found, False

    def counts(self, tokens: int, prompt: str, streamed: bool) -> dict:
        """Return token counts and vLLM's counts of steps of `STEP` tokens, and add them to the totals."""
        steps, rest = divmod(tokens, STEP)
        histogram = [int(rest == 1), int(rest == 2), steps]
        steps, accepted = sum(histogram), tokens - sum(histogram)
        drafted, spec = steps * (STEP - 1), "vllm:spec_decode_num_"
        moves = {"drafts": steps, "draft_tokens": drafted, "accepted_tokens": accepted}
        if not (streamed and self.fault == "streams are not counted"):
            self.totals.update({f"{spec}{name}_total": moved for name, moved in moves.items()})
            for at in (0, 1):
                self.totals[f'{spec}accepted_tokens_per_pos_total{{position="{at}"}}'] += sum(histogram[at + 1 :])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        self.totals.update({"vllm:prompt_tokens_total": len(prompt), "vllm:generation_tokens_total": tokens})
        self.totals["vllm:request_success_total"] += 1
        if self.fault == "counts the drafted":
            usage["completion_tokens"] += drafted - accepted
        found = {
            "mean_acceptance_length": 1 + accepted / steps - (self.fault == "mean without the root"),
            "draft_acceptance_rate": accepted / drafted, "acceptance_histogram": histogram, "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted, "num_spec_tokens": STEP - 1,
        }  # fmt: skip
        return {"usage": usage, "metrics": {"speculative_decoding": found}}

    def _json(self) -> str:
        text = json.dumps(VALID)
        if self.fault == "invalid JSON" or (self.fault == "invalid JSON under load" and self.running > 1):
            return text.replace("{", "{{")
        if self.fault == "other JSON" or (self.fault == "spaced JSON under load" and self.running > 1):
            return json.dumps(VALID, indent=1)
        return json.dumps(VALID | {"degrees": 7}) if self.fault == "JSON beside the schema" else text

    def _call(self, body: dict) -> dict:
        arguments = json.dumps({"city": "Oslo"})
        if self.fault == "loses tool calls":
            return {"text": 'get_weather({"city": "Oslo"})', "finish_reason": "stop", "tokens": []}
        if self.fault == "streamed arguments" and body.get("stream"):
            arguments = ""
        return {"text": "", "finish_reason": "tool_calls", "tokens": [], "call": arguments}


class Handler(BaseHTTPRequestHandler):
    """HTTP around a `FakeModel`.

    ``server.options``: key, models, refuses (fields), refusal (status and message), html, status.
    """

    def log_message(self, *_):
        pass

    def do_GET(self):
        options = self.server.options
        if options.get("html"):
            self._send(200, b"<html>hello</html>", "text/html")
        elif self.path == "/metrics" and options.get("counts", True):
            text = "".join(f"{name} {value}\n" for name, value in self.server.model.totals.items())
            self._send(200, text.encode(), "text/plain")
        elif self._allowed():
            models = [{"id": name} for name in options.get("models", ["fake"])]
            self._json(200, {"object": "list", "data": models})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        options, model, chat = self.server.options, self.server.model, "messages" in body
        if not self._allowed():
            return
        if refused := [name for name in options.get("refuses", ()) if name in body]:
            status, said = options.get("refusal", (400, "this field is not supported"))
            self._json(status, {"error": {"message": f"{refused[0]}: {said}"}})
        elif options.get("status") or (model.fault == "crashes on JSON" and "response_format" in body):
            self._json(options.get("status", 500), {"error": {"message": "internal\nerror"}})
        else:
            prompt = json.dumps(body["messages"]) if chat else str(body["prompt"])
            choices, counts = model.choices(body, prompt), {}
            if options.get("counts", True) and (tokens := len(choices[0]["tokens"])):
                counts = model.counts(tokens, prompt, "stream" in body)
            if body.get("stream"):
                self._stream(choices, chat, counts)
            else:
                self._json(200, {"choices": [self._whole(choice, chat, body) for choice in choices]} | counts)

    def _allowed(self) -> bool:
        key = self.server.options.get("key")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._json(401, {"error": {"message": "no such key"}})
            return False
        return True

    def _whole(self, choice: dict, chat: bool, body: dict) -> dict:
        found = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        if body.get("logprobs") is not None and body.get("logprobs") is not False:
            found["logprobs"] = _logprobs(choice["tokens"], chat, body.get("top_logprobs" if chat else "logprobs", 0))
        if not chat:
            return found | {"text": choice["text"]}
        message = {"role": "assistant", "content": choice["text"] or None}
        if "call" in choice:
            function = {"name": "get_weather", "arguments": choice["call"]}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        return found | {"message": message}

    def _stream(self, choices: list[dict], chat: bool, counts: dict) -> None:
        fault, events = self.server.model.fault, []
        for choice in choices:
            text, index = choice["text"], choice["index"]
            pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
            if fault == "stream drops the last token":
                pieces = pieces[:-1]
            for piece in pieces:
                part = {"delta": {"content": piece}} if chat else {"text": piece}
                events.append({"choices": [{"index": index, "finish_reason": None, **part}]})
            last = {"index": index, "finish_reason": choice["finish_reason"]} | (
                {"delta": {}} if chat else {"text": ""}
            )
            if "call" in choice:
                function = {"name": "get_weather", "arguments": choice["call"]}
                last["delta"] = {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": function}]}
            events.append({"choices": [last]})
        events.append({"choices": []} | counts)
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        end = "" if fault == "stream without an end" else "data: [DONE]\n\n"
        self._send(200, ("".join(lines) + end).encode(), "text/event-stream")

    def _json(self, status: int, content: dict) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _logprobs(tokens: list[tuple], chat: bool, most: int) -> dict:
    if not chat:
        tops = [dict(top[:most]) for _, _, top in tokens] if most else None
        texts, values = ([each[place] for each in tokens] for place in (0, 1))
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops}
    content = []
    for token, logprob, top in tokens:
        others = [{"token": text, "logprob": value} for text, value in top[:most]]
        content.append({"token": token, "logprob": logprob, "top_logprobs": others})
    return {"content": content}


@contextmanager
def fake_server(fault: str = "", **options):
    """Yield the URL of a fake server in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.model, server.options = FakeModel(fault), options
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
