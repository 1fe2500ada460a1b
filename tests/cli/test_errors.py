"""Refusals and endings of the command line: one line, an exit code, and no file that is left behind.

The tests of each reader check its messages. Here every command and every kind of error has a row.
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from helpers.lora_files import write_lora
from helpers.outputs import write_lines
from hydrajax import assets, cli
from hydrajax.cli import generate as command
from hydrajax.cli import run_command
from hydrajax.text.answers import Generation

GENERATE = "generate --base base --output out.jsonl"
EXPORT = "convert export --base base --draft heads --output out"
EVALUATE = "evaluate --base base --draft heads --tree chain-2 --set questions.jsonl --max-new-tokens 8 --output out"
SEARCH = f"tree search --base base --draft {assets.path('medusa')} --prompts prompts.jsonl --output out.json"
SHOW = "tree show chain-2 --base base --draft heads"
# Of each command, with arguments that are right: flags that are wrong, and the line.
REFUSALS = {
    "": [
        ("genreate", r"invalid choice: 'genreate' \(choose from .*generate"),
        ("generate --prompt x", "the following arguments are required: --base"),
        ("convert", "required: VERB .*see hydrajax convert --help"),
        ("convert exprot", r"invalid choice: 'exprot' \(choose from .*export.*push.*int8"),
    ],
    GENERATE: [
        ("", "one of the arguments --prompt --prompts is required"),
        ("--prompt ''", "--prompt: is empty"),
        (f"--prompt {'xyz' * 100}", r"--prompt: got \d{3} tokens, expected at most"),
        ("--prompts long.jsonl", r"long\.jsonl line 3: prompt_ids: got 129 tokens, expected at most .* context of 128"),
        ("--prompts nothing.jsonl", r"nothing\.jsonl line 1: prompt_ids: got no tokens, expected at least one"),
        ("--prompts none.jsonl", r"--prompts: no such file: none\.jsonl"),
        ("--prompts prompts.jsonl --prompt a", "--prompt: not allowed with argument --prompts"),
    ],
    f"{GENERATE} --prompt x": [
        ("--base nowhere", "--base: no such directory: nowhere"),
        (f"--base {'x' * 300}", "--base: no such directory: x{300}"),
        ("--base empty", r"--base: no such file: .*config\.json"),
        ("--base cut", r"--base: .*model\.safetensors is damaged"),
        ("--base base --draft nowhere", "--draft: no such directory: nowhere"),
        ("--draft empty", "--draft: .*no draft heads of a supported format|--draft: no such file"),
        ("--draft heads --draft-confidence 0.4", "--draft-confidence: requires a draft model or DSpark .*got Medusa$"),
        ("--tree chain-2", "--tree: got 'chain-2', expected 'root' without --draft"),
        ("--merge-adapter", "^hydrajax: merge: requires an adapter$"),
        ("--adapter nowhere", "^hydrajax: --adapter: no such directory: nowhere$"),
        ("--adapter base", "^hydrajax: --adapter: no such file: base/adapter_config.json$"),
        # before the base is loaded
        ("--base nowhere --output none/out.jsonl", "--output: cannot write .*: no such directory: .*/none"),
        *([("--base nowhere --output locked/x", "--output: cannot write .*/x: Permission")] if os.geteuid() else []),
        ("--output file/out.jsonl", "--output: cannot write .*: no such directory: .*/file"),
        ("--stream --batch-size 2", "--stream: prints one prompt at a time; leave out --output and --batch-size"),
        # numbers and names
        ("--dtype half", r"--dtype: invalid choice: 'half' \(choose from .*bfloat16.*see hydrajax( generate)? --help"),
        ("--quantize int4-48", r"--quantize: invalid choice: 'int4-48' \(choose from .*int4-64.*int4-128"),
        ("--max-new-tokens 0", "--max-new-tokens: got '0', expected an integer from 1 up"),
        ("--batch-size 1.5", r"--batch-size: got '1\.5', expected an integer from 1 up"),
        ("--batch-size 2147483648", "--batch-size: got '2147483648', expected at most 2147483647"),
        (f"--seed {2**32}", "--seed: got '4294967296', expected an integer from 0 to 4294967295"),
        ("--temperature warm", "--temperature: invalid float value: 'warm'"),
        ("--logit-bias 3", "^hydrajax: --logit-bias: expected ID:B,ID:B,..., found '3'"),
        ("--logit-bias 9999:1", "--logit-bias: got token id 9999, expected 0 to"),
        ("--temperature 1 --rule greedy", "--temperature: got a value for the rule greedy, expected none, only with "),
        ("--json-schema broken.json", "--json-schema: got text that is not JSON"),
        ("--json-schema cut/model.safetensors", "--json-schema: .* is not UTF-8 text"),
        ("--regex a --choices a", "--choices: not allowed with argument --regex"),
        # flags that there are not
        ("--max-new 5", "unrecognized arguments: --max-new 5"),
        (
            "--drft=lookup 1",
            r"unrecognized arguments: --drft=lookup 1; did you mean --draft\? \(see hydrajax --help\)$",
        ),
        ("--max_length 1", r"--max_length 1; did you mean --max-new-tokens\?"),
        ("--prompt-lookup-num-tokens 1", r'did you mean --draft="lookup"\?'),
        ("--num-beams 1", "; hydrajax has no beam search"),
    ],
    "generate --base base --prompt x": [
        ("--logprobs", r"--logprobs: requires --output FILE\.jsonl"),
        ("--top-logprobs 2", r"--top-logprobs: requires --output FILE\.jsonl"),
    ],
    "serve --base base": [
        ("--streamer 1", r"unrecognized arguments: --streamer 1 \(see"),  # not --tree
        ("--stop-strings 1", r"unrecognized arguments: --stop-strings 1 \(see"),  # it has no --stop
        ("--mesh 8", "--mesh: got '8', expected model=M or data=D,model=M"),
    ],
    EXPORT: [
        ("--base nowhere", "--base: no such directory: nowhere"),
        ("--draft base", "--draft: .*no draft heads of a supported format"),
        ("--base base --draft mtp", "has no MTP module"),
        ("--heads 3", "--heads: got 3, but Medusa has 2 heads to choose from"),
        ("--format x", r"--format: invalid choice: 'x' \(choose from .*hydra.*medusa.*native"),
        ("--output file", "export: .*file is a file"),
        (f"--output {'x' * 300}", "cannot (write|use) .*: File name too long"),
        ("--output base", "--output: got 'base', the directory of the base; choose another one"),
        ("--output heads", "--output: got 'heads', the directory of the heads"),
        ("--output ./heads/../heads/", "--output: got '.*', the directory of the heads"),
        ("--output link", "--output: got 'link', the directory of the heads"),
    ],
    "convert push": [("", "required: DIR, ORG/NAME"), ("nowhere lab/heads", "push: no such directory: nowhere")],
    "convert int8 --base base --prompts prompts.jsonl": [
        ("--base wordless", "but the base has no tokenizer; give token ids"),
        ("--prompts outside.jsonl", "got token id 320, expected 0 to 319"),
        ("--json no/file.json", "--json: cannot write"),
    ],
    "convert int8 --base wordless": [("", "--prompts: is required, as the base has no tokenizer")],
    "convert merge --base base": [
        ("--adapter lora --output lora", "--output: got 'lora', the directory of the adapter; choose another one$")
    ],
    EVALUATE: [
        ("--set mt_bench", "--data: the set mt_bench needs the directory"),
        ("--categories cats", "--categories: got 'cats', expected trees$"),
        ("--max-new-tokens 127", "--max-new-tokens: got 127, expected at most 126"),
        ("--template llama", "--template: got 'llama', expected auto, vicuna, plain"),
        ("--base wordless", "--base: has no tokenizer, which question sets need"),
    ],
    "evaluate --base base --tree chain-2 --set questions.jsonl --max-new-tokens 8 --output out": [
        ("", "--tree: got 'chain-2' without a draft")
    ],
    "tree search --base base --draft lookup --prompts prompts.jsonl": [
        ("", "one of the arguments --output --save is required"),
        ("--save", "--save: got the draft 'lookup', which has no directory to save to; use --output"),
        ("--output out.json --draft none", "--draft: is required, as the tree is searched for a draft"),
        ("--output out.json --draft lookahead-3-3-3", "--draft: Lookahead cannot be calibrated, as its guesses depend"),
        ("--output out.json --shapes both", "--shapes: got 'both', but got dynamic-2-0-1, expected a static tree"),
        ("--output out.json --how chains", "--how: got 'chains', which needs a draft model; the draft is Lookup"),
    ],
    SEARCH.replace("--base base", f"--base {assets.base()}"): [
        ("--sizes 2,200", "--sizes: got 200, expected at most --largest 100"),
        ("--picture no/curve.png", "--picture: cannot write no/curve.png"),
        ("--shapes dynamic --sizes 1", "--sizes: got 1, expected at least 2 nodes"),
    ],
    "tree show": [
        ("oak", "tree: got 'oak'"),
        ("dynamic-8-2-3", "got dynamic-8-2-3, expected a static tree for a drawing without --base"),
        ("chain-2 --base base --prompt x", "--draft: is required with --base, to draw a step"),
        ("chain-2 --draft heads", "--draft: requires --base, as only a model has steps to draw"),
        ("chain-2 --step 2", "--step: requires --base, as only a model has steps to draw"),
    ],
    SHOW: [
        ("", "--prompt: is required with --base, to draw a step"),
        ("--prompt ''", "--prompt: is empty, expected some text"),
        ("--prompt for --step 999", r"--step: got 999, expected at most \d+, where the text ends"),
        ("--prompt for --picture no/t.png", "--picture: cannot write no/t.png"),
    ],
    "bench": [
        ("", "exactly one of --base and --random"),
        ("--random 8x7b", "--random: got '8x7b', expected tiny"),
        ("--random tiny --random-draft wings", "--random-draft: got 'wings', expected none, lookup"),
        ("--random tiny --draft heads", "--draft: requires --base"),
        ("--random tiny --adapter base", "--adapter: requires --base$"),
        ("--random tiny --context 10", "--context: got 10, expected more than"),
        ("--random tiny --json no/such/file", "--json: cannot write"),
        ("--base base --draft lookahead-5-3", "--draft: got 'lookahead-5-3', expected lookahead"),
    ],
    "certify": [
        ("", "--base: is missing"),
        ("--base base", "--draft: got none, expected a draft to certify"),
        ("--reference u --base B", "^hydrajax: --reference: requires --server$"),
    ],
    "roofline": [
        ("", "exactly one of --shape and --base"),
        ("--shape 8x7b", "--shape: got '8x7b', expected tiny"),
        ("--base none", "--base: no such file"),
        ("--shape tiny --context 64,4096", "--context: got 4096, expected at most the model's 1024"),
    ],
    "roofline --shape 7b": [
        ("--device B200", "invalid choice: 'B200'"),
        ("--tree-sizes 65", "tree sizes: got 65, expected 1 to 64"),
        ("--tree chain-5", "got a depth of 5, expected at most"),
        ("--draft-kind lookup --tree dynamic-8-1-4", "expected a static tree because PromptLookup cannot fill dynamic"),
        ("--tree dynamic-8-1-4 --tree-sizes 2", "dynamic-8-1-4, expected a static tree for a sweep over tree sizes"),
        ("--batch-sizes 1,x", "got 'x', expected an integer from 1 up"),
        ("--json no/such/file", "--json: cannot write"),
        ("--mesh model=5", "--mesh: got model=5, expected a divisor of the base's 32 heads"),
        ("--mesh rows=2", "got 'rows=2', expected model=M or data=D,model=M"),
        ("--device TPUv4i --mesh model=2", "--mesh: the bandwidth between several TPUv4i is unknown"),
    ],
    "report": [
        ("nowhere", "is not a directory"),
        ("empty", "no results in"),
        ("results", "r.json: field source is missing"),
    ],
    "train seed=1 --config own_text --dryrun data.length=64": [
        ("", r"unrecognized arguments: --dryrun data.length=64; did you mean --dry-run\? \(see hydrajax --help\)$")
    ],
}


@pytest.fixture(scope="module")
def folder(base, heads, wordless, tmp_path_factory):
    """The working directory of all rows."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("folder")
    for name, path in {"base": base, "heads": heads, "wordless": wordless}.items():
        shutil.copytree(path, folder / name)
    (folder / "link").symlink_to("heads")
    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": [2]}')  # which grammars require
    write_lora(folder / "lora", AutoModelForCausalLM.from_pretrained(base))
    shutil.copytree(base, folder / "cut")
    (folder / "cut" / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1])
    (folder / "empty").mkdir()
    (folder / "locked").mkdir(mode=0o500)
    (folder / "file").touch()
    (folder / "broken.json").write_text("{")
    (folder / "results").mkdir()
    (folder / "results" / "r.json").write_text(json.dumps({"hydrajax_result": 1, "kind": "accuracy"}))
    lines = {
        "prompts": [{"prompt": "the tree"}],
        "long": [{"prompt_ids": [1] * 128}, {"prompt": "a"}, {"prompt_ids": [1] * 129}],
        "nothing": [{"prompt_ids": []}],
        "outside": [{"prompt_ids": [1, 320]}],
        "questions": [{"question_id": 5, "category": "trees", "turns": ["the tree"]}],
    }
    for name, records in lines.items():
        write_lines(folder / f"{name}.jsonl", records)
    return folder


@pytest.mark.parametrize("begun", REFUSALS)
def test_refusals(program, folder, begun, monkeypatch):
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for flags, words in REFUSALS[begun]:
        found = program(*shlex.split(f"{begun} {flags}"), code=2)
        assert found.out == "", flags
        assert re.fullmatch(r"hydrajax: [^\n]+\n", found.err), (flags, found.err)
        assert re.search(words, found.err), (flags, found.err)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_commands_of_one_process_refuse_several(refused, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    for name in ("chat", "serve", "bench", "certify"):
        line = f"hydrajax: JAX_COORDINATOR_ADDRESS: {name} runs in one process; unset it\n"
        refused(line, name, "--base", "nowhere")


def test_a_library_that_panics():
    """pyo3's type is not an Exception, and no module has it."""
    panic = type("PanicException", (BaseException,), {})
    outcome = cli._outcome(panic("index\nout of bounds"), frozenset())
    assert outcome == (2, "hydrajax: a library failed: index out of bounds")


@pytest.fixture
def generate(program, base, monkeypatch):
    """``generate(then, *flags, code=0)``: `hydrajax generate`, whose decoding yields a text and then calls ``then``."""

    def run(then, *flags, code=0):
        def results(*_, **__):
            yield Generation([1], [2], "a caf\u00e9 \ufffd", 1, [1], 1, 0.1)
            then()

        monkeypatch.setattr(command, "generate", results)
        return program("generate", "--base", base, "--prompt", "the tree", *flags, code=code)

    return run


def fails_with(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        (fails_with(KeyboardInterrupt()), 130, "interrupted"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "terminated"),
    ],
)
def test_an_interrupted_command_leaves_no_file(generate, tmp_path, then, code, said):
    result = generate(then, "--output", tmp_path / "out.jsonl", code=code)
    assert result.err == f"hydrajax: {said}\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # what called the program has its own again


def test_a_crash_leaves_the_old_file_alone(generate, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    with pytest.raises(RuntimeError, match="a bug"):  # a bug of ours keeps its traceback
        generate(fails_with(RuntimeError("a bug")), "--output", output)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert output.read_text() == "old\n"


def test_text_that_the_terminal_s_encoding_lacks_is_escaped(generate, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    generate(lambda: None)
    terminal.flush()
    assert b"a caf\\xe9 \\ufffd\n" in terminal.buffer.getvalue()


def test_a_platform_that_is_not_there(generate, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("jax.devices", fails_with(RuntimeError("Unable to initialize backend 'cuda':\nno devices")))
    result = generate(fails_with(AssertionError()), code=2)
    assert "hydrajax: JAX_PLATFORMS: got 'cuda', which JAX cannot start here: Unable to initialize" in result.err


def start(*argv):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "hydrajax", *map(str, argv)]
    return subprocess.Popen(words, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_real_process_prints_one_line_and_no_traceback():
    process = start("tree", "show", "oak")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"hydrajax: tree: got 'oak', expected root, [^\n]+\n", err), err


@pytest.mark.slow
def test_a_real_ctrl_c(base, tmp_path):
    folder, prompts = tmp_path / "results", tmp_path / "prompts.jsonl"
    folder.mkdir()
    prompts.write_text('{"prompt_ids": [5]}\n' * 20_000)
    args = ("generate", "--base", base, "--prompts", prompts, "--max-new-tokens", 120, "--output", folder / "out.jsonl")
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
