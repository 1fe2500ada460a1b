"""``hydrajax serve``: an OpenAI-compatible API over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hydrajax import ops
from hydrajax.cli import options
from hydrajax.cli.screen import status
from hydrajax.decoding.acceptance import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import AUTO, LanguageModel, make_executor
from hydrajax.optional_deps import needs
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.smaller import with_size

if TYPE_CHECKING:
    from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes

KEY = "HYDRAJAX_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, apart=True, corpus=True)
    default, positive, integer = "(default %(default)s)", options.positive, options.integer
    parser.add_argument("--template", metavar="NAME", default="auto", help=f"use a chat template, see chat {default}")
    web = parser.add_argument_group("API")
    web.add_argument("--host", default="127.0.0.1", help=f"listen on this address {default}")
    web.add_argument("--port", type=integer, default=8000, help=f"listen on this port, 0 for a free one {default}")
    web.add_argument("--api-key", metavar="KEY", help=f"require this key below /v1 (default: ${KEY}, or no key)")
    web.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let web pages of this origin ask the server, such as https://example.org, or * for all; repeatable",
    )
    web.add_argument("--any-model", action="store_true", help="answer requests for unknown models (default: 404)")
    web.add_argument("--name", default="hydrajax", help=f"name the model for clients {default}")
    web.add_argument(
        "--also",
        metavar="DRAFT[@TREE]",
        action="append",
        default=[],
        help="also serve the base with another draft, or with none, as model NAME:DRAFT[@TREE]; repeatable",
    )
    web.add_argument(
        "--timeout", metavar="S", type=positive, default=600, help=f"cut answers off after S seconds {default}"
    )
    web.add_argument(
        "--grace", metavar="S", type=integer, default=30, help=f"finish answers for S seconds at shutdown {default}"
    )
    web.add_argument(
        "--max-body", metavar="BYTES", type=positive, default=4 << 20, help=f"limit request bodies to BYTES {default}"
    )
    web.add_argument(
        "--max-connections",
        metavar="N",
        type=positive,
        default=1000,
        help=f"keep at most N connections open, and at most half of the free file descriptors {default}",
    )
    web.add_argument("--quiet", action="store_true", help="log warnings only")
    requests = parser.add_argument_group("defaults of requests")
    requests.add_argument(
        "--max-new-tokens", metavar="N", type=positive, default=256, help=f"limit of tokens {default}"
    )
    requests.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help=f"temperature, 0 is greedy {default}"
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--slots", metavar="B", type=positive, default=8, help=f"run up to B sequences at once {default}"
    )
    batch.add_argument("--queue", metavar="N", type=integer, default=64, help=f"let up to N requests wait {default}")
    batch.add_argument(
        "--chunk", metavar="N", type=positive, default=256, help=f"prefill prompts in chunks of N tokens {default}"
    )
    batch.add_argument(
        "--max-prompt", metavar="N", type=positive, help="limit prompts to N tokens (default: the context)"
    )
    batch.add_argument(
        "--cache-memory",
        metavar="MB",
        type=positive,
        help="limit the KV caches of all models to MB megabytes in equal shares (default: all slots with full context, "
        "and as much for the prefix cache)",
    )
    batch.add_argument("--no-prefix-reuse", action="store_true", help="turn the prefix cache off")
    batch.add_argument(
        "--penalties",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="support penalties and min_tokens, for 5 bytes per sequence and token of the vocabulary (default: on)",
    )
    batch.add_argument(
        "--top-logprobs",
        metavar="K",
        type=options.alternatives,
        default=0,
        help=f"support log-probabilities of the K most likely tokens, up to 20 {default}",
    )
    batch.add_argument(
        "--no-warm-up",
        action="store_true",
        help="compile at first use only (default: all programs, while the server answers)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        from hydrajax.serve.app import Api, ServerSettings
        from hydrajax.serve.connections import ConnectionLimits, most_connections
        from hydrajax.serve.server import Server, address_of, listen, local_names, serve
    except ImportError as error:
        if not error.name or error.name.startswith("hydrajax"):
            raise
        raise HydrajaxError(needs("starlette")) from None
    from hydrajax.serve.batcher import Batcher
    from hydrajax.serve.executor_pool import PoolSizes
    from hydrajax.serve.idle_times import idle_times
    from hydrajax.serve.request_encoder import RequestEncoder
    from hydrajax.serve.served_models import ServedModel, check_unique, close_all, plain_step_seconds, while_idle
    from hydrajax.serve.warm_up import WarmUp

    if args.grace < 0:
        raise HydrajaxError(f"grace: got {args.grace}, expected at least 0")
    ExactSampling(temperature=args.temperature)  # checks it before the model is loaded
    _check_text("host", args.host, "an address; 127.0.0.1 is reached from this machine only, 0.0.0.0 from all")
    key = _api_key(args.api_key)
    tree, measures = options.tree_from(args, measures=True), args.tree == AUTO
    own = (None, None) if measures else (args.tree, tree)
    offers = [_Offer(args.name, options.draft_of(args) or "none", *own)]
    offers += [_also(args.name, text) for text in args.also]
    for offer in offers:
        _check_text("name", offer.name, "printable characters without outer spaces")
    check_unique([offer.name for offer in offers])
    listener = listen(args.host, args.port)  # before the model is loaded
    with status("loading") as report:
        model = options.load_from(args, report)
        if measures:
            choice = model.autotune(quiet=True, on_status=report)
        else:
            choice = None if args.tree else model.measured_tree()
    if choice is not None and choice.tree is not None:
        print(choice, file=sys.stderr)
    sizes = PoolSizes(slots=args.slots, chunk=args.chunk, penalties=args.penalties, logprobs=args.top_logprobs)
    models = [model, *(model.with_draft(offer.draft) for offer in offers[1:])]
    pools = [offer.pool(each, sizes) for each, offer in zip(models, offers, strict=True)]
    memory = None if args.cache_memory is None else args.cache_memory * 1_000_000 // len(pools)
    batchers = [
        Batcher(pool, queue=args.queue, cache_memory=memory, prefix_cache=not args.no_prefix_reuse) for pool in pools
    ]
    encoder = RequestEncoder(model.tokenizer, model.config, args.template, args.max_prompt)
    settings = ServerSettings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        api_key=key,
        max_body=args.max_body,
        timeout=args.timeout,
        hosts=local_names(listener),
        origins=tuple(args.cors),
        any_model=args.any_model,
    )
    shared = {"conversations": encoder.has_chat_template}
    served = [
        ServedModel(
            offer.name, batcher, shared | {"draft": str(offer.draft), "tree": offer.tree_name or f"{pool.nodes} nodes"}
        )
        for offer, batcher, pool in zip(offers, batchers, pools, strict=True)
    ]

    def warm(warm_up: WarmUp) -> None:
        if not args.quiet:
            print(f"all {warm_up.total} programs are compiled", file=sys.stderr, flush=True)
        for pool, batcher in zip(pools, batchers, strict=True):
            if pool.drops_draft and (times := while_idle(partial(idle_times, pool), batchers, warm_up.wait)):
                batcher.expect(times)
        if seconds := while_idle(partial(plain_step_seconds, pools[0].executor), batchers, warm_up.wait):
            for each in served:
                each.about["plain_step_seconds"] = seconds

    warm_up = None if args.no_warm_up else WarmUp(pools, warm)
    app = Api(served, encoder, settings, warm_up).app()
    url = f"http://{address_of(listener)}"
    memory = sum(batcher.stats().limit_nbytes for batcher in batchers) / 1e6
    asks = "API key required" if key else "no API key required"
    print(
        f"{model!r}\nserving on {url}/v1, {memory:.0f} MB for KV caches; chat page: {url}; {asks}",
        file=sys.stderr,
        flush=True,
    )
    for batcher in batchers:
        batcher.start()
    if warm_up is not None:
        if not args.quiet:
            print(f"compiling {warm_up.total} programs, see {url}/health", file=sys.stderr, flush=True)
        warm_up.start()
    try:
        limits = ConnectionLimits(most_connections(listener, args.max_connections))
        return serve(Server(app, batchers, grace=args.grace, quiet=args.quiet, limits=limits), batchers, listener)
    finally:
        close_all(batchers)
        if warm_up is not None:
            warm_up.stop()


def _api_key(flag: str | None) -> str | None:
    """Return the key of ``--api-key`` or of the environment, None without either; an empty one is a mistake."""
    field, key = ("api_key", flag) if flag is not None else (KEY, os.environ.get(KEY))
    if key == "":
        raise HydrajaxError(f"{field}: got an empty key; to serve without a key, leave --api-key out and unset {KEY}")
    if key is not None and not _is_plain(key):
        raise HydrajaxError(
            f"{field}: got a key that no header can hold, expected printable characters, no outer spaces"
        )
    return key


def _is_plain(text: str) -> bool:
    """Return whether headers and JSON can hold a text: bytes that are not UTF-8, among others, are not printable."""
    return text != "" and text.isprintable() and text == text.strip()


def _check_text(field: str, text: str, expected: str) -> None:
    if not _is_plain(text):
        raise HydrajaxError(f"{field}: got {text!r}, expected {expected}")


class _Offer(NamedTuple):
    """A model to serve: its name for clients, draft and tree (None for the draft's own)."""

    name: str
    draft: str | Path
    tree_name: str | None
    tree: CandidateTree | None

    def pool(self, model: LanguageModel, sizes: PoolSizes) -> ExecutorPool:
        """Return the executors; without a named tree they also take plain steps where these are faster."""
        from hydrajax.serve.executor_pool import ExecutorPool

        executor = make_executor(model, model.program(tree=self.tree))
        if self.tree is not None:
            return ExecutorPool(executor, sizes)
        return ExecutorPool(executor, sizes, partial(tree_for, model), drops_draft=True)


def tree_for(model: LanguageModel, batch_size: int) -> CandidateTree:
    """Return the tree measured by `generate`, searched or default, for this batch size.

    Without one of its own, a larger batch gets the likeliest nodes of the tree for one sequence.
    """
    if (tree := _measured(model, batch_size)) is not None:
        return tree
    one, found = model.default_tree(), model.default_tree(batch_size)
    if batch_size > 1 and found == one:
        return with_size(_measured(model, 1) or one, ops.step_rows() // batch_size)
    return found


def _measured(model: LanguageModel, batch_size: int) -> CandidateTree | None:
    """Return the tree that `generate` has found to be the fastest on this device, if any is faster than no draft."""
    choice = model.measured_tree(batch_size)
    return None if choice is None else choice.tree


def _also(name: str, text: str) -> _Offer:
    """Parse ``--also DRAFT[@TREE]``."""
    draft, at, tree = text.rpartition("@") if "@" in text else (text, "", "")
    return _Offer(f"{name}:{text}", draft, tree or None, presets.by_name(tree) if at else None)
