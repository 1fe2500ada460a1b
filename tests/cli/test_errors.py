"""Errors of the command line: one line with the field, exit code 2, no output file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from helpers import programs
from hydrajax import cli
from hydrajax.cli import COMMANDS, run_command
from hydrajax.cli import generate as command
from hydrajax.text.answers import Generation


@pytest.fixture
def refused(program, tmp_path):
    """``refused(pattern, *argv)``: `hydrajax generate` prints one line that matches, and leaves no file."""

    def check(pattern: str, *argv, output=True) -> str:
        folder = tmp_path / "results"
        folder.mkdir(exist_ok=True)
        result = program("generate", *argv, *(["--output", folder / "out.jsonl"] if output else []))
        assert result.code == 2, result
        assert result.out == ""
        assert re.fullmatch(r"hydrajax: [^\n]+\n", result.err), result.err
        assert re.search(pattern, result.err), result.err
        assert list(folder.iterdir()) == []
        return result.err

    return check


@pytest.fixture
def prompts(tmp_path):
    """``prompts(*lines) -> Path`` of a prompt file; lines are objects or text."""

    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


TEXT = ("--prompt", "the tree")


# --- the base -------------------------------------------------------------------------------------------------


def test_base(refused, base, tmp_path):
    refused(r"--base: no such directory: .*/nowhere", "--base", tmp_path / "nowhere", *TEXT)
    refused(r"--base: no such directory", "--base", base / "config.json", *TEXT)
    refused(r"hydrajax: --base: no such directory: x{300}", "--base", "x" * 300, *TEXT)
    folder = tmp_path / "empty"
    folder.mkdir()
    refused(r"--base: no such file: .*config\.json", "--base", folder, *TEXT)


@pytest.fixture
def copied(base, tmp_path):
    return shutil.copytree(base, tmp_path / "copy")


def test_base_weights_missing_or_truncated(refused, copied):
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 500, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(r"--base: .*model\.safetensors is damaged", "--base", copied, *TEXT)
    weights.unlink()
    refused(r"--base: .* has neither model\.safetensors nor pytorch_model\.bin", "--base", copied, *TEXT)
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')
    refused(r"--base: shard model-2\.safetensors is named in .* but missing", "--base", copied, *TEXT)


def test_a_library_that_panics():
    """pyo3's type is not an Exception, and no module has it."""
    panic = type("PanicException", (BaseException,), {})
    assert cli._outcome(panic("index\nout of bounds"), frozenset()) == (
        2,
        "hydrajax: a library failed: index out of bounds",
    )


# --- the draft ------------------------------------------------------------------------------------------------


def test_draft_missing_or_foreign(refused, base, tmp_path):
    common = ("--base", base, *TEXT, "--draft")
    refused(r"--draft: no such directory: .*/nowhere", *common, tmp_path / "nowhere")
    other = shutil.copytree(base, tmp_path / "gpt")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    refused(r"--draft: .* holds no draft heads of a supported format: .*'hydra_num_heads'", *common, other)


# --- the tree -------------------------------------------------------------------------------------------------


def test_tree(refused, base, heads, tmp_path):
    common = ("--base", base, "--draft", heads, *TEXT, "--tree")
    refused(r"tree: got a depth of 3, expected at most the 2 tokens that the draft proposes", *common, "chain-3")
    refused(
        r"--tree: got 'oak', expected root, chain-K, .*mc_sim_7b_63.*, a \.json file or a JSON list of",
        *common,
        "oak",
    )
    refused(r"--tree: got '\[\[0\],', expected a JSON list of choices such as ", *common, "[[0],")
    refused(r"--tree: no such file: .*/none\.json", *common, tmp_path / "none.json")


def test_tree_without_draft(refused, program, base):
    for draft in ((), ("--draft", "none")):
        pattern = r"--tree: got 'chain-2', expected 'root' without --draft"
        refused(pattern, "--base", base, *draft, *TEXT, "--tree", "chain-2")
    args = ["--base", base, "--prompt", "the tree", "--max-new-tokens", 8, "--tree", "root"]
    assert program("generate", *args).code == 0


# --- the prompts ----------------------------------------------------------------------------------------------


def test_both_or_neither_prompt_flag(refused, base, prompts):
    refused(r"one of the arguments --prompt --prompts is required", "--base", base)
    file = prompts({"prompt": "a"})
    refused(r"--prompts: not allowed with argument --prompt", "--base", base, "--prompt", "a", "--prompts", file)


def test_empty_prompt(refused, base, wordless, prompts):
    refused(r"--prompt: is empty", "--base", base, "--prompt", "")
    for line, pattern in [
        ({"prompt": ""}, r"prompts\.jsonl line 2: prompt: is empty"),
        ({"turns": ["", "second"]}, r"prompts\.jsonl line 2: turns: is empty"),
        ({"prompt_ids": []}, r"prompts\.jsonl line 2: prompt_ids: got no tokens, expected at least one"),
    ]:
        refused(pattern, "--base", base, "--prompts", prompts({"prompt_ids": [1]}, line))


def test_text_that_encodes_to_nothing(refused, copied):
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None, "normalizer": strip}))
    refused(r"--prompt: got no tokens, expected at least one", "--base", copied, "--prompt", "  ")


def test_prompt_longer_than_the_context(refused, base, prompts):
    refused(r"--prompt: got \d{3} tokens, expected at most", "--base", base, "--prompt", "xyz" * 100)
    file = prompts({"prompt_ids": [1] * 128}, "", {"prompt_ids": [1] * 129})
    refused(
        r"prompts\.jsonl line 3: prompt_ids: got 129 tokens, expected at most the model's context of 128",
        "--base",
        base,
        "--prompts",
        file,
    )


def test_chat_template_that_fails(refused, copied, prompts):
    (copied / "chat_template.jinja").write_text("{{ raise_exception('only the user may speak') }}")
    file = prompts({"turns": ["hello"]})
    pattern = r"line 1: turns: the tokenizer's chat template failed: only the user may speak"
    refused(pattern, "--base", copied, "--prompts", file)


def test_prompt_file(refused, base, prompts, tmp_path):
    """tests/text/test_prompt.py covers every malformed prompt file."""
    common = ("--base", base, "--prompts")
    refused(r"--prompts: no such file: .*/none\.jsonl", *common, tmp_path / "none.jsonl")
    refused(r"--prompts: .* is empty", *common, prompts())
    refused(r"line 2: is not JSON", *common, prompts({"prompt": "a"}, '{"prompt": '))


# --- flags ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (
            ("--dtype", "half"),
            r"--dtype: invalid choice: 'half' \(choose from '?auto'?, '?float32'?, '?bfloat16'?, '?float16'?\)",
        ),
        (("--quantize", "int4-48"), r"--quantize: invalid choice: 'int4-48' \(choose from .*int4-64.*int4-128"),
        (("--max-new-tokens", "0"), r"--max-new-tokens: got '0', expected an integer from 1 up"),
        (("--batch-size", "1.5"), r"--batch-size: got '1\.5', expected an integer from 1 up"),
        (("--seed", str(2**32)), r"--seed: got '4294967296', expected an integer from 0 to 4294967295"),
        (("--temperature", "warm"), r"--temperature: invalid float value: 'warm'"),
        (("--max-new", "5"), r"unrecognized arguments: --max-new 5"),
    ],
)
def test_flags(refused, base, flags, pattern):
    refused(pattern + r".*see hydrajax( generate)? --help", "--base", base, *TEXT, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--rule", "greedy", "--temperature", "1"),
            "--temperature: got a value for the rule greedy, expected none, only with typical, exact, rejection",
        ),
        (("--logit-bias", "3"), r"hydrajax: --logit-bias: expected ID:B,ID:B,..., found '3'"),
        (("--logit-bias", "9999:1"), "--logit-bias: got token id 9999, expected 0 to"),
        (("--rule", "exact", "--min-p", "2"), "--min-p: got 2.0, expected a number from 0 to 1"),
        (("--repetition-penalty", "0"), "--repetition-penalty: got 0.0, expected a positive number"),
        (("--frequency-penalty", "nan"), "--frequency-penalty: got nan, expected a finite number"),
        (("--rule", "exact", "--temperature", "-1"), "--temperature: got -1.0, expected a finite number from 0 up"),
        (("--rule", "exact", "--top-p", "1.5"), "--top-p: got 1.5, expected above 0 and at most 1"),
        (("--rule", "typical", "--epsilon", "2"), "--epsilon: got 2.0, expected a number from 0 to 1"),
    ],
)
def test_rules(refused, base, flags, message):
    refused(message, "--base", base, *TEXT, *flags)


def test_missing_base(refused):
    refused(r"the following arguments are required: --base", *TEXT)


# --- the output -----------------------------------------------------------------------------------------------


def test_unwritable_output_shows_before_anything_is_loaded(refused, base, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_from", lambda args: pytest.fail("loaded"))
    file = tmp_path / "file"
    file.touch()
    common = ("--base", base, *TEXT, "--output")
    for path in (tmp_path / "none" / "out.jsonl", file / "out.jsonl"):
        pattern = rf"--output: cannot write .*: no such directory: {path.parent}"
        refused(pattern, *common, path, output=False)
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(refused, base, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(
        r"--output: cannot write .*: Permission denied", "--base", base, *TEXT, "--output", locked / "o", output=False
    )


def results_then(error):
    """A stand-in for `generate` that raises after its first result."""

    def generate(*_, **__):
        yield Generation([1], [2], "a", 1, [1], 1, 0.1)
        raise error

    return generate


def test_ctrl_c_leaves_no_file(program, base, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "generate", results_then(KeyboardInterrupt()))
    result = program("generate", "--base", base, *TEXT, "--output", tmp_path / "out.jsonl")
    assert result.code == 130
    assert result.err == "hydrajax: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_no_file(program, base, tmp_path, monkeypatch):
    def generate(*_, **__):
        yield Generation([1], [2], "a", 1, [1], 1, 0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        yield Generation([1], [2], "a", 1, [1], 1, 0.1)

    monkeypatch.setattr(command, "generate", generate)
    result = program("generate", "--base", base, *TEXT, "--output", tmp_path / "out.jsonl")
    assert (result.code, result.err) == (143, "hydrajax: terminated\n")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # what called the program has its own again


def test_text_that_the_terminal_s_encoding_lacks_is_escaped(base, monkeypatch):
    def generate(*_, **__):
        yield Generation([1], [2], "a café \ufffd", 1, [1], 1, 0.1)

    monkeypatch.setattr(command, "generate", generate)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["generate", "--base", str(base), *TEXT]) == 0
    terminal.flush()
    assert b"a caf\\xe9 \\ufffd\n" in terminal.buffer.getvalue()


def test_a_platform_that_is_not_there(program, base, monkeypatch):
    def no_devices():
        raise RuntimeError("Unable to initialize backend 'cuda':\nno devices")

    monkeypatch.setattr(command, "generate", results_then(AssertionError()))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("jax.devices", no_devices)
    result = program("generate", "--base", base, *TEXT)
    assert result.code == 2
    assert "hydrajax: JAX_PLATFORMS: got 'cuda', which JAX cannot start here: Unable to initialize" in result.err


def test_a_crash_leaves_the_old_file_alone(program, base, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    monkeypatch.setattr(command, "generate", results_then(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):  # a bug of ours keeps its traceback
        program("generate", "--base", base, *TEXT, "--output", output)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert output.read_text() == "old\n"


# --- the program ----------------------------------------------------------------------------------------------


def test_unknown_command(program):
    result = program("genreate")
    assert result.code == 2
    assert re.fullmatch(r"hydrajax: .*invalid choice: 'genreate' \(choose from .*generate.*\n", result.err)


def start(*argv, **kwargs):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "hydrajax", *map(str, argv)]
    return subprocess.Popen(
        command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **kwargs
    )


def test_a_real_process_prints_one_line_and_no_traceback():
    process = start("tree", "show", "oak")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"hydrajax: tree: got 'oak', expected root, [^\n]+\n", err), err


@pytest.mark.slow
def test_a_real_ctrl_c(base, prompts, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    file = prompts(*[{"prompt_ids": [5]}] * 20_000)
    args = ("generate", "--base", base, "--prompts", file, "--max-new-tokens", 120, "--output", folder / "out.jsonl")
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: here as in the foreground.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = start(*args)
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in folder.iterdir()):  # until the first result is in the temporary file
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "hydrajax: interrupted\n")
    assert list(folder.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(monkeypatch, capfd):
    """Such as `head`. The program must not report it at exit either."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = run_command("hydrajax", "help", lambda parser: None, lambda args: print("text"), [])
        print("more", flush=True)  # goes nowhere now
        monkeypatch.undo()
    assert code == 141
    assert capfd.readouterr().err == ""


def test_help_lists_the_commands_and_imports_nothing_slow():
    process = subprocess.run(programs.command("show_help"), capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")
    assert re.search(rf"^ +generate +{COMMANDS['generate']}$", process.stdout, re.MULTILINE)
    assert process.stdout.endswith("set()\n")
