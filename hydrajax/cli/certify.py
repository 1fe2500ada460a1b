"""``hydrajax certify``: check that a draft, a tree and a rule do not change the base's output, here or on a server."""

import argparse
import sys

from hydrajax.certify.certificate import Check, certify
from hydrajax.cli import certify_server, options
from hydrajax.cli.prompt_files import PROMPT_FORMATS
from hydrajax.errors import HydrajaxError
from hydrajax.loaded_model import make_executor
from hydrajax.machine import machine
from hydrajax.models.weights import described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, base_required=False, apart=True, corpus=True)
    options.add(parser, "--prompts", help=f"prompts (default: four built in): {PROMPT_FORMATS}")
    options.add(parser, "--limit", default=16)
    options.add(parser, "--max-new-tokens", type=options.positive, default=64)
    options.add(parser, "--seed")
    parser.add_argument(
        "--samples", metavar="N", type=options.positive, default=4096,
        help="draws of the chi-square test (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the certificate to this file")
    options.add_sampling_arguments(parser)
    options.add_grammar_arguments(parser)
    certify_server.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.server is not None:
        parser = argparse.ArgumentParser(add_help=False)
        add_arguments(parser)
        return certify_server.run(args, {action.dest: action.default for action in parser._actions})
    certify_server.refuse_without_server(args)
    tree, request = options.tree_from(args), options.request_from(args)
    if options.draft_of(args) is None:
        raise HydrajaxError("--draft: got none, expected a draft to certify")
    with options.json_report(args.json, indent=1) as write:
        model = options.load_from(args)
        exact = model if args.dtype == "float32" else options.load_from(args, dtype="float32")
        prompts = options.prompts_from(args.prompts, model, args.limit)
        program = model.program(request, tree=tree)
        executor = make_executor(model, program, request)
        exact_executor = make_executor(exact, exact.program(request, tree=program.tree), request)
        name, numbers = args.tree or f"{program.tree.size} nodes", described(args.dtype, args.quantize)
        print(f"base {args.base}, draft {args.draft}, tree {name}, {request.shown_rule()}, {numbers}", flush=True)
        checks: list[Check] = []
        how = {"exact": exact_executor, "samples": args.samples, "seed": args.seed}
        for check in certify(executor, prompts, **how, on_status=lambda text: print(f"{text} ...", file=sys.stderr)):
            checks.append(check)
            show(check)
        holds = all(check.holds for check in checks)
        print("certified" if holds else "NOT CERTIFIED")
        report = {"certified": holds, "machine": machine(), "arguments": options.recorded(args)}
        write(report | {"rule": request.shown_rule(), "checks": [vars(check) for check in checks]})
    return 0 if holds else 1


def show(check: Check) -> None:
    print(f"{'holds' if check.holds else 'FAILS'}: {check.name}\n  {check.summary}")
    for detail in check.details:
        if "verdict" in detail:
            print(
                f"  prompt {detail['prompt']}, position {detail['position']}: tokens {detail['tokens']}, margin "
                f"{detail['margin']:.2g} in float32, rounding {detail['rounding']:.2g}: {detail['verdict']}"
            )
