"""Attacks by files: prompts, questions and settings that nobody should write. In this process, to try many of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from attacks.commands import base
from attacks.registry import Fell, Place, attack

SETTINGS = ("--dtype", "float32", "--tree", "chain-2", "--draft", "lookup", "--max-new-tokens", "4")


def hydrajax(*arguments: object) -> SimpleNamespace:
    """The program in this process: code, out and err. Anything that it raises is a fall."""
    from hydrajax.cli import main

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # of argparse, such as for --help
            code = exit_.code or 0
        out.flush()
        err.flush()
    return SimpleNamespace(code=code, out=out.buffer.getvalue().decode(), err=err.buffer.getvalue().decode())


def check(found: SimpleNamespace, what: str) -> None:
    if found.code not in (0, 2):
        raise Fell(f"{what}: exit code {found.code}")
    lines = [line for line in found.err.splitlines() if line.startswith("hydrajax: ")]
    if found.code == 2 and (len(lines) != 1 or len(lines[0]) > 20_000):
        raise Fell(f"{what}: code 2 with {len(lines)} lines of ours, {max(map(len, lines), default=0)} characters")
    if "Traceback" in found.err:
        raise Fell(f"{what}: a traceback")


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def prompt_files(random: random.Random) -> dict[str, bytes]:
    """What a prompt file may hold, by what it is."""
    good, deep = line({"prompt": "the tree of"}), random.choice((50, 900, 5000, 200_000))
    many = b"".join(line({"prompt": f"the tree {n}"}) for n in range(40))
    return {
        "byte order mark": b"\xef\xbb\xbf" + good,
        "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf" + good,
        "UTF-16": good.decode().encode("utf-16"),
        "CRLF": good.replace(b"\n", b"\r\n") * 2,
        "CR alone": good.replace(b"\n", b"\r") * 2,
        "lone surrogate": b'{"prompt": "a \\ud800 b"}\n',
        "surrogates the wrong way round": b'{"prompt": "\\udc00\\ud800"}\n',
        "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}\n',
        "NUL in text": b'{"prompt": "a\\u0000b"}\n',
        "NUL in the file": b'{"prompt": "a\0b"}\n' + bytes(random.randrange(1, 99)),
        "a line of a megabyte": line({"prompt": "tree " * 200_000}),
        "a megabyte in one word": line({"prompt": "x" * 1_000_000}),
        "a megabyte of blanks": b" " * 1_000_000 + good,
        "duplicate keys": b'{"prompt": "a", "prompt": "b"}\n',
        "duplicate keys of two kinds": b'{"prompt": [1], "prompt": "b"}\n',
        "nested": b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}\n",
        "nested beside": b'{"prompt": "a", "x": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}\n",
        "ids out of range": line({"prompt_ids": [1, 10 ** random.randrange(2, 30)]}),
        "negative id": line({"prompt_ids": [-1]}),
        "ids that are none": line({"prompt_ids": [1.0, True, None]}),
        "no ids": line({"prompt_ids": []}),
        "empty text": line({"prompt": ""}),
        "empty": b"",
        "blank": b"\n\n \n",
        "not JSON": random.randbytes(random.randrange(1, 3000)),
        "a list": b'["a"]\n',
        "NaN": b'{"prompt": NaN}\n',
        "a number of many digits": b'{"prompt_ids": [' + b"7" * 5000 + b"]}\n",
        "turns of turns": line({"turns": [["a"]]}),
        "control characters": line({"prompt": "\x1b[2J\x07\u202e\u2028 tree"}),
        "no line end": good.strip(),
        "cut off": many[: random.randrange(len(many))],
        "many": many,
    }


@attack("prompt files", count=4)
def prompts(place: Place) -> int:
    """Each is generated for, or refused in one line; then no output is left."""
    files = prompt_files(place.random)
    for what, content in files.items():
        path, output = place.folder / "prompts.jsonl", place.folder / "out.jsonl"
        path.write_bytes(content)
        output.unlink(missing_ok=True)
        arguments = ["--base", base(place), "--prompts", path, *SETTINGS]
        if place.random.random() < 0.5:
            arguments += ["--output", output]
        found = hydrajax("generate", *arguments)
        check(found, what)
        if found.code == 2 and output.exists():
            raise Fell(f"{what}: refused, but there is an output")
        if litter := [name for name in os.listdir(place.folder) if name.startswith(".")]:
            raise Fell(f"{what}: {litter[0]} is left")
    return len(files)


@attack("places of prompts and outputs", count=1)
def places(place: Place) -> int:
    """Directories, pipes, links to nowhere and in a circle, names too long: as prompts, and as an output."""
    folder = place.folder
    (folder / "directory").mkdir()
    (folder / "nowhere").symlink_to(folder / "missing" / "x")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file").write_text("")
    os.mkfifo(folder / "full pipe")
    (folder / "good.jsonl").write_bytes(line({"prompt": "the tree"}))
    model = ("--base", base(place), *SETTINGS)
    names = ["directory", "nowhere", "circle", "file/below", "x" * 300, "x/" * 3000, "full pipe"]

    def fill() -> None:
        (folder / "full pipe").write_bytes(line({"prompt": "the tree"}))

    for name in names:
        if name == "full pipe":
            threading.Thread(target=fill, daemon=True).start()
        found = hydrajax("generate", *model, "--prompts", folder / name)
        check(found, f"prompts {name[:20]!r}")
    for name in [*names, "/dev/null", "/dev/full", "/proc/self/mem"]:
        found = hydrajax("generate", *model, "--prompts", folder / "good.jsonl", "--output", folder / name)
        check(found, f"output {name[:20]!r}")
    return 2 * len(names) + 3


@attack("question and seed files", count=2)
def questions(place: Place) -> int:
    """The same files as questions of evaluate."""
    files = prompt_files(place.random)
    for number, (what, content) in enumerate(files.items()):
        path = place.folder / "questions.jsonl"
        path.write_bytes(content.replace(b"prompt_ids", b"turns"))
        output = place.folder / f"answers{number}"
        arguments = ["--base", base(place), "--set", path, "--output", output, "--template", "plain", "--limit", 2]
        check(hydrajax("evaluate", *arguments, "--max-new-tokens", 4, "--dtype", "float32"), what)
    return len(files)


@attack("training settings", count=3)
def settings(place: Place) -> int:
    """YAML with tags, aliases without end, dates that are none, nested, of another kind."""
    deep = place.random.choice((100, 900, 20_000))
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)
    )
    files = {
        "tag": "task: !!python/object/apply:os.system ['touch created']\n",
        "tag of a name": "task: !!python/name:os.system\n",
        "aliases": bomb,
        "aliases in a setting": bomb + "steps: *i\n",
        "a loop": "a: &a [*a]\nsteps: *a\n",
        "no date": "steps: 2026-13-41\n",
        "many digits": f"steps: {'7' * 5000}\n",
        "nested": f"steps: {'[' * deep}{']' * deep}\n",
        "keys that are lists": "? [1, 2]\n: 3\n",
        "a list": "[1, 2]\n",
        "NUL": "steps: \0\n",
        "binary": place.random.randbytes(500).decode("latin-1"),
        "two documents": "steps: 3\n---\nsteps: 4\n",
        "tabs": "data:\n\tfiles: x\n",
        "infinite": "steps: .inf\nbatch_size: .nan\n",
        "merge": "<<: 3\nsteps: 1\n",
        "NUL in a path": 'model: "a\\0b"\noutput: x\n',
    }
    for what, text in files.items():
        path = place.folder / "run.yaml"
        path.write_text(text)
        check(hydrajax("train", "--config", path, "--dry-run"), what)
    if (Path.cwd() / "created").exists():
        raise Fell("a tag was run")
    return len(files)


@attack("command lines", count=30)
def lines(place: Place) -> None:
    """Flags at random with values of the wrong kind."""
    values = ["", "-1", "0", "1e999", "nan", "9" * 400, "\ud800", "a\nb", "[[0]]"]
    values += ["chain-99999999", "dynamic-9-9-9", "x" * 5000]
    flags = ("--tree", "--rule", "--temperature", "--top-k", "--top-p", "--min-p", "--epsilon", "--seed", "--stop")
    flags += ("--max-new-tokens", "--batch-size", "--dtype", "--draft", "--repetition-penalty", "--quantize", "--alpha")
    arguments = ["generate", "--base", base(place), "--prompt", "the tree", "--draft", "lookup", "--max-new-tokens", 4]
    for flag in place.random.sample(flags, place.random.choice((1, 1, 2))):
        arguments += [flag, place.random.choice(values)]
    before = sys.getrecursionlimit()
    check(hydrajax(*arguments), " ".join(map(repr, arguments[9:])))
    if sys.getrecursionlimit() != before:
        raise Fell("the recursion limit was changed")
