"""Errors in OpenAI's form."""

import re
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hydrajax.errors import HydrajaxError
from hydrajax.serve.requests import Closed, QueueFull

FAILED = "the server failed; its log has the reason"
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
PARAM = re.compile(r"[a-z][\w.]*(?=: )")  # messages begin with the field, such as messages.0.role


def error_body(message: str, status: int) -> dict[str, Any]:
    message = str(HydrajaxError(message))  # one line, whatever a path has
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = PARAM.match(message)
    return {"error": {"message": message, "type": kind, "param": param and param[0], "code": None}}


def _routes(request: Request) -> list[str]:
    """Return the routes of the API, without the files of its pages."""
    return [
        f"{method} {route.path.replace(':path', '')}"
        for route in request.app.routes
        for method in sorted(route.methods - {"HEAD"})
        if "." not in route.path or route.path.endswith(".json")
    ]


async def error_response(request: Request, error: Exception) -> Response:
    """Clients retry after 429 and 503."""
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
        asked = f"{request.method} {request.url.path}"
        if (status, message) == (404, "Not Found"):  # of the router
            message = f"no such route: {asked}; this server has: {', '.join(_routes(request))}"
        elif status == 405:
            message = f"no such method: {asked}; this route has: {(headers or {}).get('Allow')}"
    elif not isinstance(error, HydrajaxError):  # starlette then raises it again, and uvicorn logs it
        status, message, headers = 500, FAILED, None
    else:
        status = 429 if isinstance(error, QueueFull) else 503 if isinstance(error, Closed) else 400
        message, headers = str(error), {"retry-after": "1"} if status == 429 else None
    return JSONResponse(error_body(message, status), status_code=status, headers=headers)
