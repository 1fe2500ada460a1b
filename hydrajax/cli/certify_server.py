"""``hydrajax certify --server``: check that speculation does not change the text of an OpenAI-compatible server."""

import argparse
import os

from hydrajax.certify.servers.cases import built_in_contents, contents_of
from hydrajax.certify.servers.checks import ServerCheck, certify_server
from hydrajax.certify.servers.client import Client
from hydrajax.certify.servers.report import lines_of, record_of
from hydrajax.certify.servers.sides import Reference, Settings, Sides
from hydrajax.cli import options
from hydrajax.cli.prompt_files import read_prompts
from hydrajax.cli.screen import bar
from hydrajax.errors import HydrajaxError
from hydrajax.machine import machine

KEY = "OPENAI_API_KEY"
NEEDS_SERVER = (
    "reference", "model", "reference_model", "api_key", "reference_api_key", "requests", "concurrency", "tolerance",
    "timeout",
)  # fmt: skip
# Flags of a base and a draft that a server's certificate has no use for.
NOT_WITH_SERVER = (
    "draft", "draft_confidence", "tree", "draft_devices", "limit", "samples", "rule", "json_schema", "regex", "choices",
    "lark",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive = options.positive
    group = parser.add_argument_group("a server (docs/certify_servers.md)")
    group.add_argument("--server", metavar="URL", help="certify this OpenAI-compatible server, not a base and a draft")
    group.add_argument(
        "--reference", metavar="URL", help="compare with this server, the same one without speculation (or --base)"
    )
    group.add_argument("--model", metavar="NAME", help="name of the server's model (default: the first one it lists)")
    group.add_argument(
        "--reference-model", metavar="NAME", help="name of the reference's model (default: the first one it lists)"
    )
    group.add_argument("--api-key", metavar="KEY", help=f"the server's API key (default: ${KEY}, or no key)")
    group.add_argument(
        "--reference-api-key", metavar="KEY", help="the reference's API key (default: the server's, on the same host)"
    )
    group.add_argument(
        "--requests", metavar="N", type=positive, help="send N greedy requests at each concurrency (default 32)"
    )
    group.add_argument(
        "--concurrency", metavar="N,N,...", type=options.positives, help="send N requests at once (default 1,8,32)"
    )
    group.add_argument(
        "--tolerance", metavar="NATS", type=float,
        help="treat gaps of log-probabilities up to NATS as ties (default 0.05)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", metavar="S", type=positive, help="give up on a server that is silent for S seconds (default 300)"
    )


def refuse_without_server(args: argparse.Namespace) -> None:
    """Raise `HydrajaxError` for flags that need ``--server``, and without ``--base``."""
    for name in NEEDS_SERVER:
        if getattr(args, name) is not None:
            raise HydrajaxError(f"{name}: requires --server")
    if args.base is None:
        raise HydrajaxError("base: is missing, expected a base with a draft; or a server, see --server")


def run(args: argparse.Namespace, defaults: dict[str, object]) -> int:
    """Certify the server of ``args.server``; the flags' defaults serve to refuse those that do not concern a server."""
    settings = _settings(args, defaults)
    contents = contents_of(read_prompts(args.prompts)) if args.prompts else built_in_contents()
    with options.json_report(args.json, indent=1) as write:
        key = args.api_key if args.api_key is not None else os.environ.get(KEY)
        timeout = float(args.timeout or 300)
        server = Client("server", args.server, api_key=key, model=args.model, timeout=timeout)
        if args.reference is not None:
            theirs = args.reference_api_key
            other = Client(
                "reference",
                args.reference,
                api_key=theirs if theirs is not None else key if _same_host(args) else None,
                model=args.reference_model,
                timeout=timeout,
            )
            if (other.url, other.model) == (server.url, server.model):
                raise HydrajaxError("reference: got the server itself, expected one without speculation")
            reference = Reference(other)
        else:
            from hydrajax.certify.servers.local_reference import LocalReference  # loads JAX's part of the program

            reference = LocalReference(options.load_from(args, draft=None), args.base)
        print(f"server {server}, reference {reference}, tolerance {settings.tolerance:g} nats", flush=True)
        checks, sides = _checks(server, reference, settings, contents)
        outcomes = {check.holds for check in checks}
        certified = True in outcomes and False not in outcomes
        print(f"{sides.requests} requests\n{'certified' if certified else 'NOT CERTIFIED'}")
        shown = {name: value for name, value in options.recorded(args).items() if not name.endswith("api_key")}
        report = {"certified": certified, "server": str(server), "reference": str(reference), "machine": machine()}
        report |= {"requests": sides.requests, "settings": vars(settings), "arguments": shown}
        write(report | {"checks": [record_of(check) for check in checks]})
    return 0 if certified else 1


def _checks(server: Client, reference: Reference, settings: Settings, contents) -> tuple[list[ServerCheck], Sides]:
    """Run the checks, print each one, and show the requests of the present one."""
    found: list[ServerCheck] = []
    with bar() as progress:
        task = progress.add_task("asking", total=None)
        sides = Sides(server, reference, settings, lambda: progress.advance(task))
        for check in certify_server(sides, contents, lambda status: progress.update(task, description=status)):
            found.append(check)
            progress.stop()  # it redirects standard output
            print("\n".join(lines_of(check)), flush=True)
            progress.start()
    return found, sides


def _settings(args: argparse.Namespace, defaults: dict[str, object]) -> Settings:
    if (args.reference is None) == (args.base is None):
        found = "neither" if args.base is None else "both"
        raise HydrajaxError(f"reference: got {found} of --reference and --base, expected one of them")
    if args.reference is None and (args.reference_model or args.reference_api_key):
        raise HydrajaxError("reference_model: requires --reference")
    for name in (*NOT_WITH_SERVER, *options.sampling_flags()):
        if getattr(args, name, None) != defaults.get(name):
            raise HydrajaxError(f"{name}: does not apply to --server, which decodes by its own settings")
    tolerance = 0.05 if args.tolerance is None else args.tolerance
    if not 0 <= tolerance < float("inf"):
        raise HydrajaxError(f"tolerance: got {tolerance:g}, expected at least 0")
    levels = tuple(dict.fromkeys(args.concurrency or (1, 8, 32)))
    return Settings(tolerance, args.max_new_tokens, args.requests or 32, levels, args.seed)


def _same_host(args: argparse.Namespace) -> bool:
    """Return whether both URLs name one host, so that a key is not sent to another one."""
    hosts = [url.partition("://")[2].partition("/")[0].rpartition(":")[0] for url in (args.server, args.reference)]
    return hosts[0] == hosts[1]
