"""Malformed and large inputs: prompts, questions, training settings, command lines, standard input."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

from tools.faults.commands import check_call, expect, start
from tools.faults.fixtures import base, prompts, questions, text, write_lines
from tools.faults.registry import Failure, Trial, fault

SETTINGS = ("--dtype", "float32", "--tree", "chain-2", "--draft", "lookup", "--max-new-tokens", "4")


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


# --- malformed files, in this process ---------------------------------------------------------------------------------


def prompt_files(random: random.Random) -> dict[str, bytes]:
    """Contents of prompt files by their defect."""
    good, deep = line({"prompt": "the tree of"}), random.choice((50, 900, 5000, 200_000))
    many = b"".join(line({"prompt": f"the tree {n}"}) for n in range(40))
    return {
        "byte order mark": b"\xef\xbb\xbf" + good,
        "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf" + good,
        "UTF-16": good.decode().encode("utf-16"),
        "CRLF": good.replace(b"\n", b"\r\n") * 2,
        "CR alone": good.replace(b"\n", b"\r") * 2,
        "lone surrogate": b'{"prompt": "a \\ud800 b"}\n',
        "swapped surrogates": b'{"prompt": "\\udc00\\ud800"}\n',
        "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}\n',
        "NUL in text": b'{"prompt": "a\\u0000b"}\n',
        "NUL in the file": b'{"prompt": "a\0b"}\n' + bytes(random.randrange(1, 99)),
        "line of a megabyte": line({"prompt": "tree " * 200_000}),
        "word of a megabyte": line({"prompt": "x" * 1_000_000}),
        "megabyte of blanks": b" " * 1_000_000 + good,
        "duplicate keys": b'{"prompt": "a", "prompt": "b"}\n',
        "duplicate keys of two types": b'{"prompt": [1], "prompt": "b"}\n',
        "nested prompt": b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}\n",
        "nested other field": b'{"prompt": "a", "x": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}\n",
        "ids out of range": line({"prompt_ids": [1, 10 ** random.randrange(2, 30)]}),
        "negative id": line({"prompt_ids": [-1]}),
        "ids of other types": line({"prompt_ids": [1.0, True, None]}),
        "no ids": line({"prompt_ids": []}),
        "empty text": line({"prompt": ""}),
        "empty": b"",
        "blank": b"\n\n \n",
        "not JSON": random.randbytes(random.randrange(1, 3000)),
        "list": b'["a"]\n',
        "NaN": b'{"prompt": NaN}\n',
        "5000 digits": b'{"prompt_ids": [' + b"7" * 5000 + b"]}\n",
        "nested turns": line({"turns": [["a"]]}),
        "control characters": line({"prompt": "\x1b[2J\x07\u202e\u2028 tree"}),
        "no line end": good.strip(),
        "cut off": many[: random.randrange(len(many))],
        "many": many,
    }


@fault("prompt-files", seeds=4)
def malformed_prompts(trial: Trial) -> int:
    """`generate` answers, or refuses in one line and leaves no output."""
    files = prompt_files(trial.random)
    for what, content in files.items():
        path, output = trial.folder / "prompts.jsonl", trial.folder / "out.jsonl"
        path.write_bytes(content)
        output.unlink(missing_ok=True)
        arguments = ["--base", base(trial), "--prompts", path, *SETTINGS]
        if trial.random.random() < 0.5:
            arguments += ["--output", output]
        found = check_call(what, "generate", *arguments)
        if found.code == 2 and output.exists():
            raise Failure(f"{what}: refused, but wrote an output")
        if litter := [name for name in os.listdir(trial.folder) if name.startswith(".")]:
            raise Failure(f"{what}: {litter[0]} is left")
    return len(files)


@fault("question-files", seeds=2)
def malformed_questions(trial: Trial) -> int:
    """The same files as questions of `evaluate`."""
    files = prompt_files(trial.random)
    model = ["--base", base(trial), "--template", "plain", "--max-new-tokens", 4, "--dtype", "float32"]
    for number, (what, content) in enumerate(files.items()):
        path = trial.folder / "questions.jsonl"
        path.write_bytes(content.replace(b"prompt_ids", b"turns"))
        output = ["--output", trial.folder / f"answers{number}"]
        check_call(what, "evaluate", *model, "--set", path, *output, "--limit", 2)
    return len(files)


@fault("paths")
def paths(trial: Trial) -> int:
    """Directories, pipes, broken and circular links, long names and devices as prompts and as output."""
    folder = trial.folder
    (folder / "directory").mkdir()
    (folder / "nowhere").symlink_to(folder / "missing" / "x")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file").write_text("")
    os.mkfifo(folder / "full pipe")
    (folder / "good.jsonl").write_bytes(line({"prompt": "the tree"}))
    command = ("generate", "--base", base(trial), *SETTINGS, "--prompts")
    names = ["directory", "nowhere", "circle", "file/below", "x" * 300, "x/" * 3000, "full pipe"]

    def fill() -> None:
        (folder / "full pipe").write_bytes(line({"prompt": "the tree"}))

    for name in names:
        if name == "full pipe":
            threading.Thread(target=fill, daemon=True).start()
        check_call(f"prompts {name[:20]!r}", *command, folder / name)
    devices = ["/dev/null", "/dev/full", "/proc/self/mem"]
    for name in [*names, *devices]:
        check_call(f"output {name[:20]!r}", *command, folder / "good.jsonl", "--output", folder / name)
    return 2 * len(names) + len(devices)


@fault("train-settings", seeds=3)
def settings(trial: Trial) -> int:
    """YAML with tags, exponential aliases, invalid dates, nesting and wrong types."""
    deep = trial.random.choice((100, 900, 20_000))
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)
    )
    files = {
        "tag": "task: !!python/object/apply:os.system ['touch created']\n",
        "tag of a name": "task: !!python/name:os.system\n",
        "aliases": bomb,
        "aliases in a setting": bomb + "steps: *i\n",
        "circular alias": "a: &a [*a]\nsteps: *a\n",
        "invalid date": "steps: 2026-13-41\n",
        "5000 digits": f"steps: {'7' * 5000}\n",
        "nested": f"steps: {'[' * deep}{']' * deep}\n",
        "list as key": "? [1, 2]\n: 3\n",
        "list": "[1, 2]\n",
        "NUL": "steps: \0\n",
        "binary": trial.random.randbytes(500).decode("latin-1"),
        "two documents": "steps: 3\n---\nsteps: 4\n",
        "tabs": "data:\n\tfiles: x\n",
        "infinite": "steps: .inf\nbatch_size: .nan\n",
        "merge": "<<: 3\nsteps: 1\n",
        "NUL in a path": 'model: "a\\0b"\noutput: x\n',
    }
    path = trial.folder / "run.yaml"
    for what, content in files.items():
        path.write_text(content)
        check_call(what, "train", "--config", path, "--dry-run")
    if (Path.cwd() / "created").exists():
        raise Failure("a tag was executed")
    return len(files)


@fault("command-lines", seeds=30)
def command_lines(trial: Trial) -> None:
    """Random flags with values of the wrong type."""
    values = ["", "-1", "0", "1e999", "nan", "9" * 400, "\ud800", "a\nb", "[[0]]"]
    values += ["chain-99999999", "dynamic-9-9-9", "x" * 5000]
    flags = ("--tree", "--rule", "--temperature", "--top-k", "--top-p", "--min-p", "--epsilon", "--seed", "--stop")
    flags += ("--max-new-tokens", "--batch-size", "--dtype", "--draft", "--repetition-penalty", "--quantize", "--alpha")
    chosen: list[str] = []
    for flag in trial.random.sample(flags, trial.random.choice((1, 1, 2))):
        chosen += [flag, trial.random.choice(values)]
    command = ("generate", "--base", base(trial), "--prompt", "the tree", "--draft", "lookup", "--max-new-tokens", 4)
    before = sys.getrecursionlimit()
    check_call(" ".join(map(repr, chosen)), *command, *chosen)
    if sys.getrecursionlimit() != before:
        raise Failure("the recursion limit has changed")


# --- large inputs and standard input, in new processes ----------------------------------------------------------------

PROMPTS, QUESTIONS = 10_000, 1000
MEMORY = 6 << 30


def outputs(path: Path) -> list[tuple]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(record["prompt_ids"], record["output_ids"]) for record in records]


@fault("10k-prompts")
def many_prompts(trial: Trial) -> int:
    """From a file and through a pipe: all are answered, in order, as each alone, in bounded memory."""
    path, output = prompts(trial, PROMPTS), trial.folder / "out.jsonl"
    model = ("generate", "--base", base(trial), *SETTINGS)
    batch = ("--batch-size", 64, "--output", output)
    expect(start(*model, "--prompts", path, *batch, memory=MEMORY), trial)
    found = outputs(output)
    if len(found) != PROMPTS:
        raise Failure(f"answers: got {len(found)}, expected {PROMPTS}")
    sample = sorted(trial.random.sample(range(PROMPTS), 20))
    alone = write_lines(trial.folder / "alone.jsonl", [{"prompt": text(number, 6)} for number in sample])
    expect(start(*model, "--prompts", alone, "--output", trial.folder / "few.jsonl"), trial)
    if outputs(trial.folder / "few.jsonl") != [found[number] for number in sample]:
        raise Failure("the answers differ from those of the same prompts alone, or in order")
    for name in ("-", "/dev/stdin"):
        output.unlink()
        with path.open("rb") as file, subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as pipe:
            expect(start(*model, "--prompts", name, *batch, memory=MEMORY, stdin=pipe.stdout), trial)
        if outputs(output) != found:
            raise Failure(f"{name}: the answers differ from those of the file")
    return 3


@fault("stdin")
def standard_input(trial: Trial) -> int:
    """Empty, cut off in a line, not text, without a line end."""
    good = json.dumps({"prompt": "the tree"}).encode()
    codes = {b"": 2, b"\n\n": 2, good: 0, good + b"\n" + good[:9]: 2, b"the tree": 0, b"\xff\xfe": 2, b"{": 2}
    model = ("generate", "--base", base(trial), *SETTINGS, "--prompts", "-")
    for content, code in codes.items():
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
            pipe.stdin.write(content)
            pipe.stdin.close()
            expect(start(*model, stdin=pipe.stdout), trial, (code,))
    expect(start(*model, stdin=subprocess.DEVNULL), trial, (2,))
    return len(codes) + 1


@fault("1k-questions")
def many_questions(trial: Trial) -> int:
    path, output = questions(trial, QUESTIONS), trial.folder / "answers"
    model = ("--base", base(trial), "--dtype", "float32", "--template", "plain", "--max-new-tokens", 4)
    expect(start("evaluate", *model, "--set", path, "--output", output, memory=MEMORY), trial)
    lines = [line for file in output.glob("*.jsonl") for line in file.read_text().splitlines()]
    if sorted(json.loads(line)["question_id"] for line in lines) != [*range(QUESTIONS)]:
        raise Failure(f"answers: got {len(lines)}, expected one for each of {QUESTIONS} questions")
    return QUESTIONS
