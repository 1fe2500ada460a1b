"""Attacks by how much there is: thousands of prompts in one file, thousands of questions, prompts through a pipe."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from attacks.commands import base, done, prompts, questions, start, text
from attacks.registry import Fell, Place, attack

PROMPTS, QUESTIONS = 10_000, 1000
MEMORY = 6 << 30
SETTINGS = ("--dtype", "float32", "--tree", "chain-2", "--draft", "lookup", "--max-new-tokens", 4)


def outputs(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["prompt_ids"], line["output_ids"]) for line in lines]


@attack("ten thousand prompts", count=1)
def many(place: Place) -> int:
    """All are answered, in order and as each is alone, from a file and through a pipe, in bounded memory."""
    path, output = prompts(place, PROMPTS), place.folder / "out.jsonl"
    model = ("generate", "--base", base(place), *SETTINGS)
    batch = ("--batch-size", 64, "--output", output)
    done(start(*model, "--prompts", path, *batch, memory=MEMORY), place)
    found = outputs(output)
    if len(found) != PROMPTS:
        raise Fell(f"{PROMPTS} prompts, {len(found)} answers")
    sample = sorted(place.random.sample(range(PROMPTS), 20))
    alone = place.folder / "alone.jsonl"
    alone.write_text("".join(json.dumps({"prompt": text(number, 6)}) + "\n" for number in sample))
    done(start(*model, "--prompts", alone, "--output", place.folder / "few.jsonl"), place)
    if outputs(place.folder / "few.jsonl") != [found[number] for number in sample]:
        raise Fell("the answers are others than those of the same prompts alone, or in another order")
    for name in ("-", "/dev/stdin"):
        output.unlink()
        with path.open("rb") as file, subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as pipe:
            done(start(*model, "--prompts", name, *batch, memory=MEMORY, stdin=pipe.stdout), place)
        if outputs(output) != found:
            raise Fell(f"{name}: the answers are others than those of the file")
    return 3


@attack("standard input", count=1)
def standard_input(place: Place) -> int:
    """Empty, cut off in a line, no text, without end of line."""
    good = json.dumps({"prompt": "the tree"}).encode()
    contents = {b"": 2, b"\n\n": 2, good: 0, good + b"\n" + good[:9]: 2, b"the tree": 0, b"\xff\xfe": 2, b"{": 2}
    model = ("generate", "--base", base(place), *SETTINGS, "--prompts", "-")
    for content, wanted in contents.items():
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
            pipe.stdin.write(content)
            pipe.stdin.close()
            done(start(*model, stdin=pipe.stdout), place, (wanted,))
    done(start(*model, stdin=subprocess.DEVNULL), place, (2,))
    return len(contents) + 1


@attack("a thousand questions", count=1)
def asked(place: Place) -> int:
    path, output = questions(place, QUESTIONS), place.folder / "answers"
    model = ("--base", base(place), "--dtype", "float32", "--template", "plain", "--max-new-tokens", 4)
    done(start("evaluate", *model, "--set", path, "--output", output, memory=MEMORY), place)
    lines = [line for file in output.glob("*.jsonl") for line in file.read_text().splitlines()]
    numbers = [json.loads(line)["question_id"] for line in lines]
    if sorted(numbers) != [*range(QUESTIONS)]:
        raise Fell(f"{QUESTIONS} questions, {len(numbers)} answers")
    return QUESTIONS
