"""``hydrajax serve``: OpenAI's interface over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hydrajax.cli import options
from hydrajax.cli.screen import status
from hydrajax.decoding.acceptance import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.optional_deps import needs
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

if TYPE_CHECKING:
    from hydrajax.serve.pool import Pool, Sizes

HELP = "answer requests over HTTP, many at a time, in the words of OpenAI's interface"
KEY = "HYDRAJAX_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, apart=True)
    parser.add_argument("--template", metavar="NAME", default="auto", help="chat template, as of chat (default auto)")
    web = parser.add_argument_group("interface")
    web.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    web.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    web.add_argument("--api-key", metavar="KEY", help=f"ask for this key below /v1 (default: that in {KEY}, or none)")
    web.add_argument("--name", default="hydrajax", help="of the model (default %(default)s)")
    web.add_argument(
        "--also",
        metavar="DRAFT[@TREE]",
        action="append",
        default=[],
        help="another draft for the same base, or none; a model of its own, called NAME:DRAFT[@TREE]; repeatable",
    )
    web.add_argument("--timeout", metavar="S", type=options.positive, default=600, help="seconds an answer may take")
    web.add_argument("--grace", metavar="S", type=int, default=30, help="seconds to finish what runs at the end")
    web.add_argument("--max-body", metavar="BYTES", type=options.positive, default=4 << 20, help="default %(default)s")
    web.add_argument("--quiet", action="store_true", help="log warnings only")
    texts = parser.add_argument_group("requests that do not say")
    texts.add_argument("--max-new-tokens", metavar="N", type=options.positive, default=256, help="default %(default)s")
    texts.add_argument("--temperature", metavar="T", type=float, default=0.0, help="default %(default)s, greedy")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--slots", metavar="B", type=options.positive, default=8, help="rows that run at once (8)")
    batch.add_argument("--queue", metavar="N", type=int, default=64, help="requests that may wait (%(default)s)")
    batch.add_argument(
        "--chunk", metavar="N", type=options.positive, default=256, help="tokens of a prompt read between steps (256)"
    )
    batch.add_argument("--max-prompt", metavar="N", type=options.positive, help="tokens (default: the context)")
    batch.add_argument(
        "--cache-memory",
        metavar="MB",
        type=options.positive,
        help="megabytes for caches (default: all rows with full context, and as much for kept prompts)",
    )
    batch.add_argument("--no-prefix-reuse", action="store_true", help="keep no prompts for those that begin alike")
    batch.add_argument("--penalties", action="store_true", help="take presence, frequency and repetition penalties")
    batch.add_argument(
        "--top-logprobs",
        metavar="K",
        type=options.alternatives,
        default=0,
        help="alternatives to every token that requests can ask for, up to 20 (default 0)",
    )
    batch.add_argument("--no-warm-up", action="store_true", help="compile at the first use, not at the start")


def run(args: argparse.Namespace) -> int:
    try:
        from hydrajax.serve.app import Interface, Settings
        from hydrajax.serve.server import LOOPBACK, listening, serve, server
    except ImportError as error:
        if not error.name or error.name.startswith("hydrajax"):
            raise
        raise HydrajaxError(needs("starlette")) from None
    from hydrajax.serve.batcher import Batcher
    from hydrajax.serve.pool import Sizes
    from hydrajax.serve.request_encoder import Encoder
    from hydrajax.serve.served import Served, check_names, close_all, plain_step_seconds

    if args.grace < 0:
        raise HydrajaxError(f"grace: must be at least 0, found {args.grace}")
    ExactSampling(temperature=args.temperature)  # refuses one that is out of range
    offers = [_Offer(args.name, options.draft_of(args) or "none", args.tree, options.tree_from(args))]
    offers += [_also(args.name, text) for text in args.also]
    check_names([offer.name for offer in offers])
    listener = listening(args.host, args.port)  # refused before a model is loaded
    with status("loading") as say:
        model = options.load_from(args, say)
    sizes = Sizes(rows=args.slots, chunk=args.chunk, penalties=args.penalties, logprobs=args.top_logprobs)
    drafted = [model, *(model.with_draft(offer.draft) for offer in offers[1:])]
    pools = [offer.pool(one, sizes) for one, offer in zip(drafted, offers, strict=True)]
    memory = None if args.cache_memory is None else args.cache_memory * 1_000_000
    batchers = [Batcher(pool, queue=args.queue, cache_memory=memory, keep=not args.no_prefix_reuse) for pool in pools]
    encoder = Encoder(model.tokenizer, model.config, args.template, args.max_prompt)
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        api_key=args.api_key or os.environ.get(KEY) or None,
        max_body=args.max_body,
        timeout=args.timeout,
        hosts=LOOPBACK if args.host in LOOPBACK else None,
    )
    shared = {"conversations": encoder.takes_conversations}
    if not args.no_warm_up:
        with status("compiling") as say:
            for offer, pool in zip(offers, pools, strict=True):
                pool.warm(lambda text, name=offer.name: say(f"{name}: {text}"))
            say("timing a step without a draft")
            shared["plain_step_seconds"] = plain_step_seconds(pools[0].executor)
    served = [
        Served(
            offer.name, batcher, shared | {"draft": str(offer.draft), "tree": offer.tree_name or f"{pool.nodes} nodes"}
        )
        for offer, batcher, pool in zip(offers, batchers, pools, strict=True)
    ]
    app = Interface(served, encoder, settings).app()
    host, port = listener.getsockname()[:2]
    shown = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    memory = sum(batcher.stats().limit_nbytes for batcher in batchers) / 1e6
    print(
        f"{model!r}\nserving on {shown}/v1, {memory:.0f} MB for caches; to chat: {shown}", file=sys.stderr, flush=True
    )
    for batcher in batchers:
        batcher.start()
    try:
        return serve(server(app, batchers, grace=args.grace, quiet=args.quiet), batchers, listener)
    finally:
        close_all(batchers)


class _Offer(NamedTuple):
    """A model that is served: the name that clients call it by, its draft, and its tree, None for the draft's own."""

    name: str
    draft: str | Path
    tree_name: str | None
    tree: CandidateTree | None

    def pool(self, model: LanguageModel, sizes: Sizes) -> Pool:
        """Return the executors for this model, which drop the draft where that pays unless the tree is named."""
        from hydrajax.serve.pool import Pool

        executor = make_executor(model, model.spec(tree=self.tree))
        if self.tree is not None:
            return Pool(executor, sizes)
        return Pool(executor, sizes, model.default_tree, drops_draft=True)


def _also(name: str, text: str) -> _Offer:
    """What ``--also DRAFT[@TREE]`` names."""
    draft, at, tree = text.rpartition("@") if "@" in text else (text, "", "")
    return _Offer(f"{name}:{text}", draft, tree or None, presets.by_name(tree) if at else None)
