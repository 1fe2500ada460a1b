"""``hydrajax serve``: an OpenAI-compatible API over HTTP."""

from __future__ import annotations

import argparse
import logging.config
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from socket import socket
from typing import TYPE_CHECKING, Any

from hydrajax.cli import options
from hydrajax.cli.screen import status
from hydrajax.cli.signals import Terminated

if TYPE_CHECKING:
    from hydrajax.serve import Server


# The flags by group, with their metavars; "" for those without a value. Their texts are those of `ServerOptions`.
FLAGS = {
    "API": {
        "host": "ADDRESS", "port": "PORT", "api_key": "KEY", "cors": "ORIGIN", "any_model": "", "name": "NAME",
        "also": "DRAFT[@TREE]", "timeout": "S", "grace": "S", "max_body": "BYTES", "max_connections": "N",
        "stored_responses": "N", "stored_memory": "MB", "quiet": "",
    },
    "defaults of requests": {
        "template": "NAME|FILE", "tool_parser": "NAME", "chat_template_kwargs": "JSON", "reasoning_parser": "NAME",
        "max_new_tokens": "N", "temperature": "T", "rule": "NAME",
    },
    "batch": {
        "slots": "B", "queue": "N", "chunk": "N", "max_prompt": "N", "cache_memory": "MB", "prefix_reuse": "",
        "penalties": "", "top_logprobs": "K", "warm_up": "",
    },
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hydrajax.serve import ServerOptions

    options.add_model_arguments(parser, apart=True, corpus=True)
    for title, metavars in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, metavar in metavars.items():
            field = ServerOptions.model_fields[name]
            default = False if name == "quiet" else field.default
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction if default else "store_true"}
            text = " ".join(field.description.replace("`", "").split()).rstrip(".")
            if metavar:
                number = float if name == "temperature" else options.integer
                kind = str if "str" in str(field.annotation) else number
                how = {"metavar": metavar, "type": kind} | ({"action": "append"} if default == [] else {})
                if default not in (None, [], {}):
                    text += f" (default {f'{default:g}' if isinstance(default, float) else default})"
            group.add_argument(f"--{name.replace('_', '-')}", default=default, help=text[0].lower() + text[1:], **how)


def run(args: argparse.Namespace) -> int:
    from hydrajax.serve import Server, ServerOptions  # names a missing package
    from hydrajax.serve.connections import listen

    given = {name: value for name, value in vars(args).items() if name in ServerOptions.model_fields}
    ServerOptions.checked(given)
    options.tree_from(args, measures=True)  # checks it
    with closing(listen(args.host, args.port)) as listener:  # before the model is loaded
        return _serve(args, partial(Server, **given), listener)


def _serve(args: argparse.Namespace, make_server: Callable[..., Server], listener: socket) -> int:
    from uvicorn.config import LOGGING_CONFIG

    about = {"draft": str(options.draft_of(args) or "none")}
    show = partial(print, file=sys.stderr, flush=True)

    def on_status(line: str) -> None:
        if not args.quiet or line.startswith("serving"):
            show(line)

    with status("loading") as report:
        model = options.load_from(args, report)
        server = make_server(model, tree=args.tree, about=about, on_status=report)
    server.on_status = on_status
    if server.choice is not None and server.choice.tree is not None:
        show(server.choice)
    logging.config.dictConfig(LOGGING_CONFIG)
    show(repr(model))
    number = 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        server.start(listener).wait()
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    try:
        finished = server.stop()
    except KeyboardInterrupt:  # a second one
        finished = server.stop(grace=0.0)
    return 0 if finished else 128 + number
