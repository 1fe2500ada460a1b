"""The response of ``/v1/responses``, whole or as a stream of events."""

import copy
import itertools
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hydrajax.serve.replies import Delta, ReplyChoice, statistics, usage
from hydrajax.serve.responses_body import ResponsesBody


class TextKind(NamedTuple):
    """A kind of text: its item, the item's field with the parts, the type of a part, and the names of the events."""

    item: dict[str, Any]
    prefix: str
    field: str
    part: dict[str, Any]
    part_index: str
    part_events: str
    text_events: str


MESSAGE = TextKind(
    {"type": "message", "role": "assistant", "content": []}, "msg", "content",
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "content_index", "response.content_part", "response.output_text",
)  # fmt: skip
REASONING = TextKind(
    {"type": "reasoning", "summary": [], "content": []}, "rs", "content", {"type": "reasoning_text", "text": ""},
    "content_index", "response.content_part", "response.reasoning_text",
)  # fmt: skip
SUMMARY = TextKind(
    {"type": "reasoning", "summary": []}, "rs", "summary", {"type": "summary_text", "text": ""},
    "summary_index", "response.reasoning_summary_part", "response.reasoning_summary_text",
)  # fmt: skip
CALL = "response.function_call_arguments"


class ResponsesFormat:
    """The response to a request with one choice; it has `hydrajax.serve.replies.ReplyFormat`'s methods.

    An item ends where one of another kind begins.
    """

    END = ""  # of a stream

    def __init__(self, model: str, body: ResponsesBody, temperature: float, store: Callable[[dict[str, Any]], None]):
        """Begin a response.

        Args:
            model: its name.
            body: the request.
            temperature: the server's default.
            store: called with the finished response.
        """
        self._reasoning = SUMMARY if body.summary() else REASONING
        self._store, self._numbers = store, itertools.count()
        self._open: TextKind | str | None = None  # the kind of the last item, while it is in progress
        self._scored: list[dict[str, Any]] = []  # the tokens that are not yet in a message
        self._output: list[dict[str, Any]] = []
        self._response = body.echo(temperature) | {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "completed_at": None, "status": "in_progress", "model": model, "error": None, "incomplete_details": None,
            "output": self._output, "service_tier": "default", "usage": None,
        }  # fmt: skip

    def whole(self, choices: Sequence[ReplyChoice], counts: dict[str, Any]) -> dict[str, Any]:
        self._read(choices[0], ended=True)
        return self._finished(choices, counts)

    def opening(self, choices: Sequence[ReplyChoice]) -> list[dict[str, Any]]:
        """Return the first events of a stream."""
        return [self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")]

    def events(self, choice: ReplyChoice) -> list[dict[str, Any]]:
        """Return the events for the new part of the answer."""
        ended = choice.handle.done  # read first, so that the end follows all of the answer
        found = self._read(choice, ended)
        choice.ended = ended
        return found

    def closing(self, choices: Sequence[ReplyChoice], usage_for: int | None) -> list[dict[str, Any]]:
        """Return the last event."""
        response = self._finished(choices, usage(choices, 1))
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, message: str, status: int) -> list[dict[str, Any]]:
        """Return the event of an error."""
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [self._event("response.failed", response=self._response)]

    def _finished(self, choices: Sequence[ReplyChoice], counts: dict[str, Any]) -> dict[str, Any]:
        incomplete, details = choices[0].finish_reason == "length", counts.get("completion_tokens_details", {})
        self._response |= {
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "completed_at": None if incomplete else int(time.time()),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0, **details},
                "total_tokens": counts["total_tokens"],
            },
        } | statistics(choices)
        self._store(self._response)
        return self._response

    def _read(self, choice: ReplyChoice, ended: bool) -> list[dict[str, Any]]:
        """Add the new part of the answer to the output, and return its events."""
        delta, found = choice.delta(ended), []
        self._scored += (choice.logprobs(delta, True) or {"content": []})["content"]
        scored = self._scored_of(delta)
        if delta.reasoning:
            found += self._text(self._reasoning, delta.reasoning)
        if delta.text or (ended and not (self._output or delta.calls)):
            found += self._text(MESSAGE, delta.text, scored)
        for piece in delta.calls:
            found += self._call(piece)
        if ended:
            found += self._close("incomplete" if choice.finish_reason == "length" else "completed")
        return found

    def _scored_of(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of a delta's text; later ones stay for the next delta."""
        if not delta.text or not self._scored:
            return []
        data = [bytes(token["bytes"]) for token in self._scored]
        ends = list(itertools.accumulate(map(len, data)))
        written, text, thoughts = b"".join(data), delta.text.encode(), delta.reasoning.encode()
        first = max(written.find(text, max(written.find(thoughts), 0) + len(thoughts)), 0)
        begin, end = bisect_right(ends, first), bisect_left(ends, first + len(text)) + 1
        found, self._scored = self._scored[begin:end], self._scored[end:]
        return found

    def _text(self, kind: TextKind, text: str, scored: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        found = []
        if self._open is not kind:
            found = [*self._close(), self._added(kind, kind.prefix, kind.item)]
            self._output[-1][kind.field].append(part := copy.deepcopy(kind.part))
            found.append(self._event(f"{kind.part_events}.added", kind, part=part))
        part, more = self._output[-1][kind.field][0], {}
        part["text"] += text
        if kind is MESSAGE:
            more["logprobs"] = scored
            part["logprobs"] += scored
        return [*found, self._event(f"{kind.text_events}.delta", kind, delta=text, **more)]

    def _call(self, piece: dict[str, Any]) -> list[dict[str, Any]]:
        function, found = piece["function"], []
        if "id" in piece:
            item = {"type": "function_call", "call_id": piece["id"], "name": function["name"], "arguments": ""}
            found = [*self._close(), self._added(CALL, "fc", item)]
        self._output[-1]["arguments"] += (new := function["arguments"])
        return [*found, self._event(f"{CALL}.delta", CALL, delta=new)] if new else found

    def _added(self, kind: TextKind | str, prefix: str, item: dict[str, Any]) -> dict[str, Any]:
        self._open = kind
        fields = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._output.append(fields | copy.deepcopy(item))
        return self._event("response.output_item.added", item=self._output[-1])

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item in progress, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item = self._output[-1]
        item["status"] = status
        if isinstance(kind, str):
            found = [self._event(f"{CALL}.done", CALL, name=item["name"], arguments=item["arguments"])]
        else:
            part = item[kind.field][0]
            more = {"logprobs": part["logprobs"]} if kind is MESSAGE else {}
            found = [
                self._event(f"{kind.text_events}.done", kind, text=part["text"], **more),
                self._event(f"{kind.part_events}.done", kind, part=part),
            ]
        return [*found, self._event("response.output_item.done", item=item)]

    def _event(self, event: str, kind: TextKind | str | None = None, /, **fields: Any) -> dict[str, Any]:
        """Return an event, of the last item if it has one. Later changes of the item do not change it."""
        found: dict[str, Any] = {"type": event, "sequence_number": next(self._numbers)}
        if "response" not in fields:
            found["output_index"] = len(self._output) - 1
        if kind is not None:
            found["item_id"] = self._output[-1]["id"]
        if isinstance(kind, TextKind):
            found[kind.part_index] = 0
        return found | copy.deepcopy(fields)
