"""Continuous batching on one model or several, and an OpenAI-compatible API over HTTP (docs/serving.md).

`Server` is all of it. `batcher` is the engine and does not depend on HTTP; `app` is the API and does not touch devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydrajax.errors import HydrajaxError
from hydrajax.optional_deps import needs

if TYPE_CHECKING:
    from hydrajax.serve.server import Server

__all__ = ["Server"]


def __getattr__(name: str) -> Any:
    if name != "Server":
        raise AttributeError(f"module 'hydrajax.serve' has no attribute {name!r}")
    try:
        from hydrajax.serve.server import Server
    except ImportError as error:
        if not error.name or error.name.startswith("hydrajax"):
            raise
        raise HydrajaxError(needs("starlette")) from None
    return Server
