"""The routes as an OpenAPI document: bodies by their pydantic classes, and the responses."""

import functools
from typing import Any, NamedTuple

from hydrajax.machine import own_version
from hydrajax.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, complete
from hydrajax.serve.responses_body import ResponsesBody

Schema = dict[str, Any]
TEXT, INTEGER, BOOLEAN, OBJECT = ({"type": name} for name in ("string", "integer", "boolean", "object"))
NULL, OBJECTS, IDS = {"type": "null"}, {"type": "array", "items": OBJECT}, {"type": "array", "items": INTEGER}
TEXT_OR_NULL, OBJECT_OR_NULL = {"type": ["string", "null"]}, {"type": ["object", "null"]}
BODY_ERRORS = {
    400: "a wrong field, or a request that never fits", 404: "an unknown model or response", 408: "a slow body",
    413: "a large body", 415: "another content type than application/json", 429: "a full queue",
    503: "the server is shutting down or has failed",
}  # fmt: skip


def _object(**fields: Schema) -> Schema:
    """Return the schema of an object that has these fields, and may have more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _choices(**content: Schema) -> Schema:
    """Return the schema of a response of completions or chats."""
    reasons = {"enum": ["stop", "length", "tool_calls"]}
    choice = _object(index=INTEGER, finish_reason=reasons, logprobs=OBJECT_OR_NULL, **content)
    return _object(
        id=TEXT, object=TEXT, created=INTEGER, model=TEXT, usage=USAGE, hydrajax=OBJECT,
        choices={"type": "array", "items": choice},
    )  # fmt: skip


ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=NULL))
USAGE = _object(
    prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
    completion_tokens_details=_object(reasoning_tokens=INTEGER, accepted_prediction_tokens=INTEGER),
)  # fmt: skip
MODEL = _object(id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT, hydrajax=OBJECT)
RESPONSE = _object(
    id=TEXT, object={"const": "response"}, created_at=INTEGER, model=TEXT, output=OBJECTS, error=OBJECT_OR_NULL,
    status={"enum": ["completed", "incomplete"]}, usage=OBJECT, tools=OBJECTS, parallel_tool_calls=BOOLEAN,
    text=OBJECT, previous_response_id=TEXT_OR_NULL,
)  # fmt: skip
STORED = "/v1/responses/{name}"
# What validators check that belong to no single type.
LIMITS: dict[str, Schema] = {"repetition_penalty": {"exclusiveMinimum": 0}}
ONE_TEXT = [_object(prompt=TEXT), _object(messages={"type": "array"})]


class Operation(NamedTuple):
    """A route: its purpose, the JSON schema of its response (None for plain text), and a request's body."""

    method: str
    path: str
    summary: str
    response: Schema | None
    body: Any = None
    example: dict[str, Any] | None = None

    def errors(self) -> dict[int, str]:
        """Return the statuses other than 200 and their reasons; that of keys is another."""
        if self.path == "/health":
            return {503: "failed"}
        named = {404: "an unknown name"} if "{name}" in self.path else {}
        return {**(named if self.body is None else BODY_ERRORS), 500: "an internal error"}


OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "Answer a conversation.",
        _choices(message=_object(role={"const": "assistant"}, content=TEXT_OR_NULL, refusal=NULL)), ChatBody,
        {"messages": [{"role": "user", "content": "What is a brick?"}], "max_tokens": 16},
    ),
    Operation(
        "POST", "/v1/completions", "Continue prompts.", _choices(text=TEXT), CompletionBody,
        {"prompt": "A brick is", "max_tokens": 16},
    ),
    Operation(
        "POST", "/v1/responses", "Answer a text or items, also after a stored response.", RESPONSE, ResponsesBody,
        {"input": "What is a brick?", "max_output_tokens": 16},
    ),
    Operation("GET", STORED, "Return a stored response.", RESPONSE),
    Operation("DELETE", STORED, "Delete a stored response.", _object(id=TEXT, object=TEXT, deleted={"const": True})),
    Operation("GET", "/v1/models", "List the models.", _object(object=TEXT, data={"type": "array", "items": MODEL})),
    Operation("GET", "/v1/models/{name}", "Return a model.", MODEL),
    Operation(
        "POST", "/tokenize", "Return the token ids of a text or of messages.",
        _object(count=INTEGER, max_model_len=INTEGER, tokens=IDS, token_strs={"type": ["array", "null"]}),
        TokenizeBody, {"prompt": "A brick is"},
    ),
    Operation(
        "POST", "/detokenize", "Return the text of token ids.", _object(prompt=TEXT), DetokenizeBody, {"tokens": [1]}
    ),
    Operation("GET", "/version", "Return the version.", _object(version=TEXT)),
    Operation("GET", "/health", "Tell if the server works.", _object(status={"enum": ["ok", "failed"]})),
    Operation("GET", "/metrics", "Return statistics for Prometheus.", None),
)  # fmt: skip


@functools.lru_cache  # takes 16 ms, in which the event loop serves nobody
def document(has_key: bool, vocab_size: int) -> dict[str, Any]:
    """Return the document; ``has_key``: the server has an API key."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": ERROR}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schemas, has_key)
    schemas["DetokenizeBody"]["properties"]["tokens"]["items"] |= {"minimum": 0, "maximum": vocab_size - 1}
    schemas["TokenizeBody"]["oneOf"] = ONE_TEXT
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_key else {}
    info = {"title": "hydrajax", "version": own_version(), "summary": "An OpenAI-compatible API."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas} | keys}


def _described(operation: Operation, schemas: dict[str, Any], has_key: bool) -> dict[str, Any]:
    """Return an operation; add the schemas that its body refers to."""
    method, path, summary, response, kind, example = operation
    found: dict[str, Any] = {"summary": summary, "operationId": f"{method} {path}"}
    content = {"application/json": {"schema": response}} if response else {"text/plain": {"schema": TEXT}}
    answer: dict[str, Any] = {"description": "the answer", "content": content}
    errors = operation.errors()
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}]
    if kind is not None:
        own = complete(kind).model_json_schema(ref_template="#/components/schemas/{model}")
        for field in LIMITS.keys() & own["properties"].keys():
            own["properties"][field] |= LIMITS[field]
        schemas |= own.pop("$defs", {}) | {kind.__name__: own}
        body = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}, "example": example}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
        if "stream" in kind.model_fields:
            content["text/event-stream"] = {"schema": _object(data=TEXT)}  # of each event
    if kind is ResponsesBody:
        name = {"parameters": {"name": "$response.body#/id"}}
        answer["links"] = {of: name | {"operationId": f"{of} {STORED}"} for of in ("GET", "DELETE")}
    if has_key and (kind is not None or path.startswith("/v1/")):
        found["security"] = [{"key": []}]
        errors[401] = "the API key is missing or wrong"
    failed = content if path == "/health" else {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found["responses"] = {"200": answer} | {
        str(status): {"description": reason, "content": failed} for status, reason in sorted(errors.items())
    }
    return found
