"""Continuous batching on one model or several, and an OpenAI-compatible API over HTTP (docs/serving.md).

`Server` is all of it. `batcher` is the engine and does not depend on HTTP; `app` is the API and does not touch devices.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hydrajax.errors import HydrajaxError
from hydrajax.optional_deps import needs

if TYPE_CHECKING:
    from hydrajax.serve.options import ServerOptions
    from hydrajax.serve.server import Server

__all__ = ["Server", "ServerOptions"]

HOMES = {"Server": "hydrajax.serve.server", "ServerOptions": "hydrajax.serve.options"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'hydrajax.serve' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(HOMES[name]), name)
    except ImportError as error:
        if not error.name or error.name.startswith("hydrajax"):
            raise
        raise HydrajaxError(needs("starlette")) from None
