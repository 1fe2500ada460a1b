"""`hydrajax generate` and `hydrajax evaluate` in two processes with two CPU devices each."""

import dataclasses
import json
import re
import shutil
import signal
import time

import pytest

from helpers.hosts import finish, start
from helpers.outputs import read_answers, write_lines

NEW = 8
TEXTS = ["the tree", "a base of the tree"]
BOTH = ["--mesh", "data=2,model=2"]  # the model axis lies within a process, the data axis between the two
SHARED = ["--mesh", "model=4"]
OTHERS = "prompts or arguments: got others than process 0, expected the same in all processes"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("prompts") / "texts.jsonl", [{"prompt": text} for text in TEXTS])


@pytest.fixture(scope="module")
def arguments(base, heads, wide_tree):
    return ["generate", "--base", base, "--draft", heads, "--tree", wide_tree, "--max-new-tokens", NEW]


def answers(path) -> list:
    return [dataclasses.replace(answer, wall_time=0.0) for answer in read_answers(path)]


def both(*commands, **environment):
    """Return the first of two processes, after checking that both end well and the other one prints nothing."""
    main, other = finish(start(*commands, **environment))
    assert (main.code, other.code, other.out, other.err) == (0, 0, "", ""), main.err
    return main


def fails(found, *lines: str, code: int = 2) -> None:
    """Check that every process has ended with this code and its line.

    One line is that of all: a slow process may print that of a faster one, which has ended it.
    """
    printed = [process.err for process in found]
    if len(lines) == 1:
        lines = lines * len(found)
        printed = [re.sub(r"^hydrajax: process \d: ", "hydrajax: ", line) for line in printed]
    assert [process.code for process in found] == [code] * len(found)
    assert printed == [f"hydrajax: {line}\n" for line in lines]


@pytest.mark.slow
def test_two_processes_generate_what_one_generates(program, arguments, prompts, tmp_path):
    arguments = [*arguments, "--prompts", prompts, "--batch-size", 2, "--output"]
    main = both(*[[*arguments, tmp_path / "two.jsonl", *BOTH]] * 2)
    assert main.out == ""
    assert "tokens_per_step" in main.err
    assert [path.name for path in tmp_path.iterdir()] == ["two.jsonl"]
    program(*arguments, tmp_path / "one.jsonl")
    assert answers(tmp_path / "two.jsonl") == answers(tmp_path / "one.jsonl")


@pytest.mark.slow
def test_samples_and_streams(program, arguments):
    """The times of bursts differ between the processes."""
    sampled = ["--prompt", TEXTS[1], "--temperature", 0.8, "--seed", 3, "--max-new-tokens", 60, "--stream"]
    expected = program(*arguments, *sampled).out
    for mesh in (BOTH, SHARED):
        assert both(*[[*arguments, *sampled, *mesh]] * 2).out == expected


@pytest.mark.slow
def test_the_main_process_chooses_the_tree(base, heads, tmp_path):
    command = ["generate", "--base", base, "--draft", heads, "--max-new-tokens", NEW, "--prompt", TEXTS[0], *SHARED]
    command += ["--tree", "auto"]
    settings = {"XDG_CACHE_HOME": str(tmp_path / "{process}"), "HYDRAJAX_MEASURE_TREES": "1"}
    assert "(measured just now; " in both(command, command, **settings).err
    shutil.rmtree(tmp_path / "1")  # only one host has the cache
    assert "(measured on " in both(command, command, **settings).err


@pytest.mark.slow
def test_mistakes_of_all_and_of_one(arguments, tmp_path):
    def run(*more):
        return finish(start(*[[*arguments, *own] for own in more]))

    prompt = ["--prompt", TEXTS[0]]
    alone = "--mesh: got data=1 x model=1, expected all 4 devices of 2 processes"
    fails(run(prompt, prompt), alone)
    missing = [*SHARED, "--prompts", "/nowhere"]
    fails(run(missing, missing), "--prompts: no such file: /nowhere")
    long = [*SHARED, "--prompt", "tree " * 200]
    fails(run(long, long), "--prompt: got 203 tokens, expected at most the model's context of 128")
    grammar = [*SHARED, *prompt, "--regex", "a+"]
    fails(run(grammar, grammar), "grammar: got 2 processes, expected 1")
    # of process 1 alone
    good, lacks = [*SHARED, *prompt], [*SHARED, *prompt, "--base", "/nowhere"]
    lacking = "--base: no such directory: /nowhere"
    fails(run(good, lacks), f"process 1: {lacking}", lacking)
    fails(run(good, [*good, "--seed", 4]), f"process 1: {OTHERS}", OTHERS)
    # of process 0 alone
    output = [*good, "--output"]
    unwritable = "--output: cannot write /nowhere/x: no such directory: /nowhere"
    fails(run([*output, "/nowhere/x"], [*output, tmp_path / "x"]), unwritable)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 2), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ending_one_ends_the_other(arguments, number, code):
    streaming = [*arguments, "--prompt", TEXTS[0], *SHARED, "--max-new-tokens", 110, "--stream"]
    main, other = processes = start(streaming, streaming)
    main.stdout.read(1)  # it decodes
    began = time.monotonic()
    other.send_signal(number)
    main, other = finish(processes)
    assert time.monotonic() - began < 60
    assert main.code == code
    (line,) = main.err.splitlines()
    if number == signal.SIGKILL:
        assert line.startswith("hydrajax: another process of this run has ended or cannot be reached: ")
    else:
        assert (other.code, f"{line}\n") == (code, other.err.replace("hydrajax: ", "hydrajax: process 1: "))


@pytest.mark.slow
def test_two_processes_evaluate_and_resume(base, heads, tmp_path):
    questions = tmp_path / "mine.jsonl"
    asked = [{"question_id": n, "category": "trees", "turns": [text, "a base"]} for n, text in enumerate(TEXTS)]
    write_lines(questions, asked)
    command = ["evaluate", "--base", base, "--draft", heads, "--set", questions, "--max-new-tokens", 8, *BOTH]
    command += ["--output"]
    assert "resuming" not in both(*[[*command, tmp_path / "two", "--limit", 1]] * 2).err
    # Process 1 does not see the answers of the first run.
    main = both([*command, tmp_path / "two"], [*command, tmp_path / "elsewhere"])
    assert "resuming: 1 of 2 questions are answered" in main.err
    assert not (tmp_path / "elsewhere").exists()
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    for rows in summary["results"].values():
        assert rows["overall"]["questions"] == 2
        assert rows["overall"]["equal"]
