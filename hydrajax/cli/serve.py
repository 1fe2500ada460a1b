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
from typing import TYPE_CHECKING

from hydrajax.cli import options
from hydrajax.cli.screen import status
from hydrajax.cli.signals import Terminated
from hydrajax.decoding.keywords import RULES

if TYPE_CHECKING:
    from hydrajax.serve import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hydrajax.serve import ServerOptions

    options.add_model_arguments(parser, apart=True, corpus=True)
    default, positive, integer = "(default %(default)s)", options.positive, options.integer
    parser.add_argument("--template", metavar="NAME", help=f"use a chat template, see chat {default}")
    web = parser.add_argument_group("API")
    web.add_argument("--host", help=f"listen on this address {default}")
    web.add_argument("--port", type=integer, help=f"listen on this port, 0 for a free one {default}")
    web.add_argument(
        "--api-key", metavar="KEY", help="require this key below /v1 (default: $HYDRAJAX_API_KEY, or no key)"
    )
    web.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        help="let web pages of this origin ask the server, such as https://example.org, or * for all; repeatable",
    )
    web.add_argument("--any-model", action="store_true", help="answer requests for unknown models (default: 404)")
    web.add_argument("--name", help=f"name the model for clients {default}")
    web.add_argument(
        "--also",
        metavar="DRAFT[@TREE]",
        action="append",
        help="also serve the base with another draft, or with none, as model NAME:DRAFT[@TREE]; repeatable",
    )
    seconds = "(default %(default)g)"
    web.add_argument("--timeout", metavar="S", type=positive, help=f"cut answers off after S seconds {seconds}")
    web.add_argument("--grace", metavar="S", type=integer, help=f"finish answers for S seconds at shutdown {seconds}")
    web.add_argument("--max-body", metavar="BYTES", type=positive, help=f"limit request bodies to BYTES {default}")
    web.add_argument(
        "--max-connections",
        metavar="N",
        type=positive,
        help=f"keep at most N connections open, and at most half of the free file descriptors {default}",
    )
    web.add_argument("--quiet", action="store_true", help="log warnings only")
    requests = parser.add_argument_group("defaults of requests")
    requests.add_argument("--max-new-tokens", metavar="N", type=positive, help=f"limit of tokens {default}")
    requests.add_argument("--temperature", metavar="T", type=float, help=f"temperature, 0 is greedy {default}")
    requests.add_argument(
        "--rule",
        metavar="NAME",
        choices=list(RULES),
        help=f"accept drafts by this rule, whose parameters are fields of requests: %(choices)s {default}",
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument("--slots", metavar="B", type=positive, help=f"run up to B sequences at once {default}")
    batch.add_argument("--queue", metavar="N", type=integer, help=f"let up to N requests wait {default}")
    batch.add_argument("--chunk", metavar="N", type=positive, help=f"prefill prompts in chunks of N tokens {default}")
    batch.add_argument(
        "--max-prompt", metavar="N", type=positive, help="limit prompts to N tokens (default: the context)"
    )
    batch.add_argument(
        "--cache-memory",
        metavar="MB",
        type=positive,
        help="limit the KV caches of all models together to MB megabytes, prefix cache included (default: all slots "
        "with full context, and as much for the prefix cache)",
    )
    batch.add_argument("--no-prefix-reuse", dest="prefix_reuse", action="store_false", help="turn the prefix cache off")
    batch.add_argument(
        "--penalties",
        action=argparse.BooleanOptionalAction,
        help="support penalties and min_tokens, for 5 bytes per sequence and token of the vocabulary (default: on)",
    )
    batch.add_argument(
        "--top-logprobs",
        metavar="K",
        type=options.alternatives,
        help=f"support log-probabilities of the K most likely tokens, up to 20 {default}",
    )
    batch.add_argument(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="compile at first use only (default: all programs, while the server answers)",
    )
    defaults = {name: field.default for name, field in ServerOptions.model_fields.items()}
    parser.set_defaults(**defaults | {"quiet": False})


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
