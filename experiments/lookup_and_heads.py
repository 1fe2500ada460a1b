"""Prompt lookup, draft heads, and both in one tree, on prompts that edit or summarise code.

    python experiments/lookup_and_heads.py [--quick] [--draft DIR]

The prompts are made of held-out functions and classes. Editing: a function, then its first line with a parameter
renamed. Summing up: a class, then the beginning of a list of its methods. ``--prompts`` reads a file instead. Each kind
of heads decodes with the released tree and a small one, with and without a lookup branch, in one contest per kind of
prompts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import common
import numpy as np
from common import Setup, speed_rows

from hydrajax.bench.questions.held_out import held_out_files
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets

FULL = {"count": 24, "new_tokens": 128, "repeats": 5, "added": 5, "prompt_tokens": 500}
QUICK = {"count": 3, "new_tokens": 48, "repeats": 1}
LEAST_TOKENS = 80  # of a prompt: shorter ones hold nothing to repeat
SMALL = "cartesian-2x2"  # for heads without a searched tree


def run(args) -> None:
    setup = Setup(args)
    names = list(setup.heads)
    for name in names:
        directory = setup.heads[name].draft_directory
        setup.heads[f"lookup+{name}"] = setup.base.with_draft(f"lookup-{args.added}+{directory}")
    setup.heads["lookup"] = setup.base.with_draft("lookup")
    kinds = {Path(args.prompts).name: setup.measured} if args.prompts else made_prompts(setup.base.tokenizer, args)
    rows = []
    for kind, prompts in kinds.items():
        found = args.parts.rows(kind, partial(measured, setup, kind, prompts, names))
        rows += found
        print_comparison(found)
    remarks = ["editing, summing up: see the script; lookup+: the tree with a lookup branch"]
    common.write(args, "speed", "", "Prompt lookup and draft heads, alone and in one tree", rows, remarks)


def measured(setup: Setup, kind: str, prompts: list[np.ndarray], names: list[str]) -> list[dict]:
    """Time no draft, lookup's chain, and each kind of heads in both trees with and without lookup."""
    setup.measured = prompts
    chain = presets.chain(setup.args.added)
    executors = {f"{kind}: lookup, chain-{setup.args.added}": setup.executor("lookup", chain)}
    for name in names:
        small = presets.searched(setup.heads[name].draft_directory, 1) or presets.by_name(SMALL)
        for title, tree in (("released tree", setup.released(name)), ("small tree", small)):
            for heads in (name, f"lookup+{name}"):
                executors[f"{kind}: {heads}, {title}"] = setup.executor(heads, tree)
    return [row | {"prompts": kind} for row in speed_rows(setup.contest(executors), 1)]


def print_comparison(rows: list[dict]) -> None:
    """Print whether heads and lookup together accept at least as many tokens as each alone."""
    steps = {row["name"]: row["tokens_per_step"] for row in rows}
    lookup = next(value for name, value in steps.items() if ": lookup, " in name)
    for name, value in steps.items():
        if ": lookup+" in name:
            alone = steps[name.replace(": lookup+", ": ")]
            verdict = "the combination is best" if value >= max(alone, lookup) else "ONE ALONE IS BETTER"
            print(f"{name}: τ {value:.2f}, heads alone {alone:.2f}, lookup alone {lookup:.2f}: {verdict}")


# --- prompts ----------------------------------------------------------------------------------------------------------


def made_prompts(tokenizer, args) -> dict[str, list[np.ndarray]]:
    """Return ``args.count`` prompts of each kind, at most one per file, within ``args.prompt_tokens``."""
    if tokenizer is None:
        raise HydrajaxError("--prompts: got none, expected a file, as this base has no tokenizer")
    found: dict[str, list[np.ndarray]] = {"editing": [], "summing up": []}
    for _, text in held_out_files():
        if all(len(prompts) == args.count for prompts in found.values()):
            break
        for kind, texts in (("editing", edits(text)), ("summing up", summaries(text))):
            ids = (np.array(tokenizer.encode(prompt, verbose=False), np.int32) for prompt in texts)
            fitting = (prompt for prompt in ids if LEAST_TOKENS <= len(prompt) <= args.prompt_tokens)
            if len(found[kind]) < args.count and (prompt := next(fitting, None)) is not None:
                found[kind].append(prompt)
    for kind, prompts in found.items():
        if len(prompts) < args.count:
            raise HydrajaxError(f"--count: got {args.count}, expected at most {len(prompts)} ({kind}, held-out files)")
    return found


def edits(text: str) -> Iterator[str]:
    """Yield a prompt for every function that uses a parameter several times: repeat it with the parameter renamed."""
    for node, source in definitions(text, ast.FunctionDef):
        for parameter in node.args.args:
            name, new = parameter.arg, f"new_{parameter.arg}"
            if name != "self" and len(re.findall(rf"\b{name}\b", source)) >= 3 and new not in source:
                head = source.splitlines()[0]
                renamed = re.sub(rf"\b{name}\b", new, head)
                yield f"{source}\n\n\n# The same, with {name} renamed to {new}:\n\n{renamed}\n"
                break


def summaries(text: str) -> Iterator[str]:
    """Yield a prompt for every class with several methods: list the methods."""
    for node, source in definitions(text, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        if len(methods) >= 3:
            yield f"{source}\n\n\n# Summary: the methods of {node.name} are\n#\n# def {methods[0].name}("


def definitions(text: str, kind: type) -> Iterator[tuple]:
    """Yield the undecorated top-level definitions of a kind with their source."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in body:
        if isinstance(node, kind) and not node.decorator_list:
            yield node, "\n".join(lines[node.lineno - 1 : node.end_lineno])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
