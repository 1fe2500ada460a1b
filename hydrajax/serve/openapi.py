"""The routes as an OpenAPI document: bodies by their pydantic classes, and the responses."""

from typing import Any, NamedTuple

from hydrajax.machine import own_version
from hydrajax.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, complete
from hydrajax.serve.responses_body import ResponsesBody

Schema = dict[str, Any]
TEXT, INTEGER, BOOLEAN, ANY, NULL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {}, {"type": "null"}
OBJECT, OBJECTS = {"type": "object"}, {"type": "array", "items": {"type": "object"}}
IDS = {"type": "array", "items": INTEGER}
BODY_ERRORS = {
    400: "a wrong field, or a request that never fits", 404: "an unknown model or response", 408: "a slow body",
    413: "a large body", 415: "another content type than application/json", 429: "a full queue",
    500: "an internal error", 503: "the server is shutting down or has failed",
}  # fmt: skip


def _object(**fields: Schema) -> Schema:
    """Return the schema of an object that has these fields, and may have more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=NULL))
USAGE = _object(
    prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
    completion_tokens_details=_object(accepted_prediction_tokens=INTEGER),
)  # fmt: skip
HEAD = {"id": TEXT, "object": TEXT, "created": INTEGER, "model": TEXT, "usage": USAGE, "hydrajax": OBJECT}
REASON = {"index": INTEGER, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}, "logprobs": _or_null(OBJECT)}
MESSAGE = _object(role={"const": "assistant"}, content=_or_null(TEXT), refusal=NULL)
MODEL = _object(id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT, hydrajax=OBJECT)
RESPONSE = _object(
    id=TEXT, object={"const": "response"}, created_at=INTEGER, model=TEXT, output=OBJECTS, error=_or_null(OBJECT),
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]}, usage=_or_null(OBJECT), tools=OBJECTS,
    parallel_tool_calls=BOOLEAN, tool_choice=ANY, text=OBJECT, previous_response_id=_or_null(TEXT),
)  # fmt: skip
DELETED = _object(id=TEXT, object={"const": "response"}, deleted={"const": True})
HEALTH = _object(status={"enum": ["ok", "failed"]})
HELLO = {"role": "user", "content": "What is a brick?"}


class Operation(NamedTuple):
    """A route.

    Attributes:
        method, path, summary: which, and its purpose.
        response: JSON schema of the response; None for plain text.
        body: class of the request's body, None without one.
        example: a body.
        errors: statuses other than 200 and their reasons.
        has_key: the API key applies.
    """

    method: str
    path: str
    summary: str
    response: Schema | None
    body: Any = None
    example: dict[str, Any] | None = None
    errors: dict[int, str] = {500: "an internal error"}  # noqa: RUF012
    has_key: bool = True


def _posted(path: str, summary: str, response: Schema, body: Any, **example: Any) -> Operation:
    return Operation("POST", path, summary, response, body, example, BODY_ERRORS)


UNKNOWN = {404: "an unknown name", 500: "an internal error"}
OPERATIONS = (
    _posted(
        "/v1/chat/completions", "Answer a conversation.",
        _object(**HEAD, choices=_list(_object(**REASON, message=MESSAGE))), ChatBody, messages=[HELLO], max_tokens=16,
    ),
    _posted(
        "/v1/completions", "Continue prompts.", _object(**HEAD, choices=_list(_object(**REASON, text=TEXT))),
        CompletionBody, prompt="A brick is", max_tokens=16,
    ),
    _posted(
        "/v1/responses", "Answer a text or items; continue a stored response.", RESPONSE, ResponsesBody,
        input="What is a brick?", max_output_tokens=16,
    ),
    Operation("GET", "/v1/responses/{name}", "Return a stored response.", RESPONSE, errors=UNKNOWN),
    Operation("DELETE", "/v1/responses/{name}", "Delete a stored response.", DELETED, errors=UNKNOWN),
    Operation("GET", "/v1/models", "List the models.", _object(object={"const": "list"}, data=_list(MODEL))),
    Operation("GET", "/v1/models/{name}", "Return a model.", MODEL, errors=UNKNOWN),
    _posted(
        "/tokenize", "Return the token ids of a text or of messages.",
        _object(count=INTEGER, max_model_len=INTEGER, tokens=IDS, token_strs=_or_null(_list(TEXT))), TokenizeBody,
        prompt="A brick is",
    ),
    _posted("/detokenize", "Return the text of token ids.", _object(prompt=TEXT), DetokenizeBody, tokens=[1, 2]),
    Operation("GET", "/version", "Return the version.", _object(version=TEXT), has_key=False),
    Operation("GET", "/health", "Tell if the server works.", HEALTH, errors={503: "failed"}, has_key=False),
    Operation("GET", "/metrics", "Return statistics for Prometheus.", None, has_key=False),
)  # fmt: skip


def document(has_key: bool) -> dict[str, Any]:
    """Return the document; ``has_key``: the server has an API key."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": ERROR}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schemas, has_key)
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_key else {}
    info = {"title": "hydrajax", "version": own_version(), "summary": "An OpenAI-compatible API."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas} | keys}


def _described(operation: Operation, schemas: dict[str, Any], has_key: bool) -> dict[str, Any]:
    """Return an operation; add the schemas that its body refers to."""
    content = {"text/plain": {"schema": TEXT}}
    if operation.response is not None:
        content = {"application/json": {"schema": operation.response}}
    found: dict[str, Any] = {"summary": operation.summary}
    errors = dict(operation.errors)
    if "{name}" in operation.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}]
    if operation.body is not None:
        kind = complete(operation.body)
        own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= own.pop("$defs", {}) | {kind.__name__: own}
        body = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}, "example": operation.example}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
        if "stream" in kind.model_fields:
            content["text/event-stream"] = {"schema": _object(data=TEXT)}  # of each event
    if has_key and operation.has_key:
        found["security"] = [{"key": []}]
        errors[401] = "the API key is missing or wrong"
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if operation.path == "/health":
        error = content
    found["responses"] = {"200": {"description": "the answer", "content": content}} | {
        str(status): {"description": reason, "content": error} for status, reason in sorted(errors.items())
    }
    return found
