"""``hydrajax certify``: check that a draft, a tree and a rule leave the base's output what it is."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from hydrajax import api
from hydrajax.cli import options
from hydrajax.cli.bench import BUILT_IN_PROMPTS, plain
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.measure.certificate import Check, Subject, certify
from hydrajax.report.results import machine
from hydrajax.text.prompt import Prompt, read_prompts

HELP = "check that drafting changes nothing: equal tokens, or an equal distribution"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser)
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="prompts to check with (default: a few built in)")
    parser.add_argument("--limit", metavar="N", type=options.positive, default=16, help="prompts (default %(default)s)")
    parser.add_argument("--max-new-tokens", metavar="N", type=options.positive, default=64, help="default %(default)s")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=options.positive,
        default=4096,
        help="of the chi-square test (default 4096)",
    )
    parser.add_argument("--seed", metavar="S", type=options.seed, default=0, help="default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the certificate here too")
    options.add_rule_arguments(parser)


def run(args: argparse.Namespace) -> int:
    tree, rule = options.tree_from(args), options.rule_from(args)
    if options.draft_of(args) is None:
        raise HydrajaxError("--draft: there is nothing to certify without draft heads")
    with ExitStack() as stack:
        file = None if args.json is None else stack.enter_context(WholeFile(args.json, "--json"))
        loaded = options.load_from(args)
        exact = loaded if args.dtype == "float32" else options.load_from(args, dtype="float32")
        texts = read_prompts(args.prompts)[: args.limit] if args.prompts else built_in(loaded)
        prompts = [api.encode(loaded, text, f"prompt {row}") for row, text in enumerate(texts)]
        tree = tree or loaded.default_tree()
        tree.check(loaded.drafter.depth, loaded.model.config.vocab_size)
        subject = Subject(
            loaded.model, loaded.drafter, loaded.params, exact.model, exact.drafter, exact.params, tree, rule
        )
        name = args.tree or f"{tree.size} nodes"
        print(f"base {args.base}, draft {args.draft}, tree {name}, {rule}, {args.dtype}", flush=True)
        checks: list[Check] = []
        for check in certify(
            subject,
            prompts,
            max_new_tokens=args.max_new_tokens,
            eos_ids=loaded.eos_ids,
            samples=args.samples,
            seed=args.seed,
            on_status=lambda status: print(f"{status} ...", file=sys.stderr),
        ):
            checks.append(check)
            show(check)
        holds = all(check.holds for check in checks)
        print("certified" if holds else "NOT CERTIFIED")
        if file is not None:
            report = {"certified": holds, "machine": machine(), "arguments": plain(args), "rule": str(rule)}
            report["checks"] = [vars(check) for check in checks]
            file.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if holds else 1


def show(check: Check) -> None:
    print(f"{'holds' if check.holds else 'FAILS'}: {check.name}\n  {check.summary}")
    for detail in check.details:
        if "verdict" in detail:
            print(
                f"  prompt {detail['prompt']}, position {detail['position']}: tokens {detail['tokens']}, margin "
                f"{detail['margin']:.2g} in float32, rounding {detail['rounding']:.2g}: {detail['verdict']}"
            )


def built_in(loaded: api.Loaded) -> list[Prompt]:
    if loaded.tokenizer is None:
        raise HydrajaxError("--prompts: is needed, as the base has no tokenizer for the built-in ones")
    return [Prompt(text, f"built-in prompt {row}") for row, text in enumerate(BUILT_IN_PROMPTS)]
