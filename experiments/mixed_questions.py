"""Write questions of Spec-Bench's categories, edits of code and conversations of three turns to one file.

    python experiments/mixed_questions.py --data DIR --output questions.jsonl
    hydrajax evaluate --set questions.jsonl --base smollm2 --draft dspark --draft lookup --output answers

DIR holds spec_bench_question.jsonl and MT-Bench-101's mtbench101_multiturn.jsonl. An edit is a function of a held-out
file (`hydrajax.bench.questions.held_out`) with the request to write it again with a parameter renamed. Categories take
turns, so that a run which is stopped is balanced.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path

from lookup_and_heads import definitions

from hydrajax.bench.questions.held_out import held_out_files
from hydrajax.bench.questions.sets import read_questions
from hydrajax.bench.questions.summary import MT_BENCH
from hydrajax.cli import options, run_command
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import read_jsonl
from hydrajax.text.records import OBJECT, TEXT, checked, list_of

CONVERSATIONS, TURNS = "mtbench101_multiturn.jsonl", 3
SHORTEST, LONGEST = 300, 900  # characters of a function
REQUEST = "Rename the parameter {old} to {new} in this function, and write the whole function again."
EDIT = REQUEST + "\n\n```python\n{code}\n```"


def main() -> int:
    return run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="directory of the question files")
    add("--output", type=Path, required=True, metavar="FILE.jsonl")
    add("--turns", type=options.positive, default=3, metavar="N", help="of each of MT-Bench's categories (default 3)")
    add("--each", type=options.positive, default=6, metavar="N", help="of each other category (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    spec_bench: dict[str, list[dict]] = {}
    for one in read_questions("spec_bench", args.data):
        record = {"question_id": one.question_id, "category": one.category, "turns": list(one.turns)}
        spec_bench.setdefault(one.category, []).append(record)
    chosen = [some[: args.turns if name in MT_BENCH else args.each] for name, some in spec_bench.items()]
    chosen += [list(islice(some, args.each)) for some in (edits(), conversations(args.data / CONVERSATIONS))]
    records = [record for some in zip_longest(*chosen) for record in some if record is not None]
    with WholeFile(args.output, "--output") as file:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"written: {args.output}, {len(records)} questions of {len(chosen)} categories")
    return 0


def edits() -> Iterator[dict]:
    """Yield one edit for each held-out file with a function of suitable length."""
    for name, text in held_out_files():
        for node, source in definitions(text, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if names and SHORTEST <= len(source) <= LONGEST:
                request = EDIT.format(old=names[0], new=f"new_{names[0]}", code=source)
                yield {"question_id": f"edit {name}", "category": "edits of code", "turns": [request]}
                break


def conversations(path: Path) -> Iterator[dict]:
    """Yield the first long enough conversation of each of MT-Bench-101's tasks."""
    seen = set()
    for where, record in read_jsonl(path, "--data"):
        found = checked(record, {"task": TEXT, "history": list_of(OBJECT)}, where)
        turns = [checked(turn, {"user": TEXT}, where)["user"] for turn in found["history"][:TURNS]]
        if len(turns) == TURNS and found["task"] not in seen:
            seen.add(found["task"])
            yield {"question_id": f"conversation, {found['task']}", "category": "conversations", "turns": turns}


if __name__ == "__main__":
    sys.exit(main())
