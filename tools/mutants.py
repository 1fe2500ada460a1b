"""Change the code in one place at a time and count the changes that the tests notice (mutation testing).

    python tools/mutants.py --count 300 --out mutants.jsonl             # an hour on two cores; a second call resumes
    python tools/mutants.py --out other.jsonl --only mutants.jsonl --tree OTHER   # the survivors, on another checkout

A mutant swaps one comparison, operator or constant, or negates one condition. In a copy of the checkout, the default
tests of the eight files that are nearest to the changed module run, until one fails or the time is up.
Needs `pip install -e '.[test]'` and a system that can fork.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("decoding", "drafters", "trees", "formats", "serve")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # jax is imported
MOST_FILES = 8  # of tests per mutant: collecting more takes longer than their tests
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}


def mutants_of(path: Path) -> list[dict]:
    """Return each possible change of a file: where, the text that it replaces, and the new text."""
    source = path.read_text()
    lines, found = source.splitlines(), []

    def add(node: ast.AST, new: str) -> None:
        if node.lineno == node.end_lineno:
            line = lines[node.lineno - 1].encode()
            begin, end = line[: node.col_offset].decode(), line[node.end_col_offset :].decode()
            place = {"path": str(path.relative_to(ROOT)), "line": node.lineno}
            found.append(place | {"old": lines[node.lineno - 1], "new": begin + new + end})

    def visit(node: ast.AST) -> None:
        text = lambda part: ast.get_source_segment(source, part)  # noqa: E731
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arg)):
            return  # messages, names and annotations
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = text(node.left), text(node.comparators[0])
            add(node, f"{left} {COMPARED[type(node.ops[0])]} {right}")
        if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not isinstance(node.left, ast.Constant):
            add(node, f"({text(node.left)} {COMPUTED[type(node.op)]} {text(node.right)})")
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            word = "or" if isinstance(node.op, ast.And) else "and"
            add(node, f"({text(node.values[0])} {word} {text(node.values[1])})")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node, f"({text(node.operand)})")
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            add(node.test, f"(not ({text(node.test)}))")
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
            add(node, str(not node.value) if isinstance(node.value, bool) else str(node.value + 1))
        if isinstance(node, (ast.AnnAssign, ast.FunctionDef)):  # without annotations, and without TYPE_CHECKING below
            children = [node.value] if isinstance(node, ast.AnnAssign) else [node.args, *node.body]
        else:
            children = ast.iter_child_nodes(node)
        for child in children:
            if child is not None and not (isinstance(child, ast.If) and text(child.test) == "TYPE_CHECKING"):
                visit(child)

    visit(ast.parse(source))
    return found


def tests_of(tree: Path, path: str) -> list[str]:
    """Return the test files that may notice a change of this file, the likeliest first."""
    module = path.removesuffix(".py").replace("/", ".")
    room, stem = module.split(".")[1], module.rsplit(".", 1)[-1]
    parent = re.escape(module.rpartition(".")[0])
    named = re.compile(rf"{re.escape(module)}\b|from {parent} import [^\n]*\b{stem}\b")
    ranked = []
    for file in sorted((tree / "tests").rglob("test_*.py")):
        text = file.read_text()
        own = room in file.relative_to(tree / "tests").parts
        if named.search(text) or own or stem in file.stem:
            rank = (stem not in file.stem, not (own and named.search(text)), not named.search(text), len(text))
            ranked.append((*rank, str(file.relative_to(tree))))
    return [file for *_, file in sorted(ranked)[:MOST_FILES]]


def outcome(copy: Path, mutant: dict, seconds: float) -> dict:
    """Return whether a test of the copy fails with the mutant, which one, and the seconds that it took."""
    file = copy / mutant["path"]
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    places = [n for n, line in enumerate(lines) if line.rstrip("\n") == mutant["old"]]
    if not places:
        return {"outcome": "absent", "seconds": 0}
    nearest = min(places, key=lambda n: abs(n + 1 - mutant["line"]))
    changed = [*lines[:nearest], mutant["new"] + "\n", *lines[nearest + 1 :]]
    begin = time.monotonic()
    try:
        file.write_text("".join(changed))
        child = os.fork()
        if child == 0:
            _test(copy, tests_of(copy, mutant["path"]))
        while time.monotonic() - begin < seconds:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = None
    finally:
        file.write_text("".join(lines))
    # pytest exits with 0 if all tests pass and 5 if none runs. A mutant that cannot be imported is noticed.
    survives = status is None or os.waitstatus_to_exitcode(status) in (0, 5)
    output = (copy / "pytest.txt").read_text(errors="replace")
    if status is not None and os.waitstatus_to_exitcode(status) in (3, 4) and "loading conftest" not in output:
        raise RuntimeError(output)  # pytest itself failed
    first = re.search(r"^(?:FAILED|ERROR) ([^\n]*)", output, re.M)
    outcome = ("timeout" if status is None else "survived") if survives else "killed"
    return {"outcome": outcome, "seconds": round(time.monotonic() - begin, 1), "by": first[1][:120] if first else ""}


def _test(copy: Path, files: list[str]) -> None:
    os.setpgrp()
    os.chdir(copy)
    log = os.open("pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        import pytest

        code = int(pytest.main([*OPTIONS, *files]))
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # without the cleanup of the parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants, shared evenly among the rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--seconds", type=float, default=90, help="limit per mutant")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code and tests run")
    parser.add_argument("--only", type=Path, help="take the mutants of this result that were not killed")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per mutant")
    options = parser.parse_args()
    if options.only:
        results = [json.loads(line) for line in options.only.read_text().splitlines()]
        chosen = [
            {key: one[key] for key in ("path", "line", "old", "new")} for one in results if one["outcome"] != "killed"
        ]
    else:
        chosen, rng = [], random.Random(options.seed)
        for room in options.rooms:
            files = sorted((ROOT / "hydrajax" / room).rglob("*.py"))
            possible = [mutant for file in files for mutant in mutants_of(file)]
            chosen += rng.sample(possible, min(len(possible), options.count // len(options.rooms)))
        rng.shuffle(chosen)
    done = options.out.read_text().splitlines() if options.out.exists() else []
    known = {(one["path"], one["line"], one["new"]) for one in map(json.loads, done)}
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.dont_write_bytecode = True  # it is found by the second of the source's change
    # Two imports of seconds, once for all mutants. The parent computes nothing, so a fork is safe.
    import jax  # noqa: F401
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, options.out.open("a") as out:
        copy = Path(folder, "copy")
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=options.tree, capture_output=True, check=True).stdout
        kernels = [str(file.relative_to(options.tree)) for file in options.tree.glob("hydrajax/ops/cpu/*.so")]
        for name in [*tracked.decode().split("\0"), *kernels]:
            if name:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(options.tree / name, copy / name)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        for number, mutant in enumerate(chosen, 1):
            if (mutant["path"], mutant["line"], mutant["new"]) in known:
                continue
            result = mutant | outcome(copy, mutant, options.seconds)
            print(json.dumps(result), file=out, flush=True)
            print(
                f"{number}/{len(chosen)} {result['outcome']:8} {result['seconds']:6} {mutant['path']}:{mutant['line']}"
            )


if __name__ == "__main__":
    main()
