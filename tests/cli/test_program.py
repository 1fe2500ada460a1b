"""The program: help, version, options that commands share, tab completion and the status line."""

import io
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import pytest
from argcomplete import CompletionFinder
from rich.console import Console

from hydrajax import assets
from hydrajax.cli import EPILOG, bench, build_parser, main, options, parse, screen, train
from hydrajax.cli.completion import add_completers
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.traversal import BlockVerification
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import without_weights
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.ops.trace import Platform, tracing
from hydrajax.trees import presets

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"


def test_without_a_command_it_prints_its_help(program, capsys):
    result = program()
    assert result.err == ""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert result.out == capsys.readouterr().out
    assert "register-python-argcomplete hydrajax" in EPILOG
    assert EPILOG in result.out
    for command in ("generate", "train", "distill", "convert"):
        assert re.search(rf"^ +{command} +\w", result.out, re.MULTILINE)


def test_the_version_names_jax_and_python_and_starts_no_device(capsys, monkeypatch):
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("started a backend"))
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    expected = f"hydrajax {version('hydrajax')}, jax {version('jax')}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == expected


def test_training_is_a_command_too(program, capsys):
    """`hydrajax train` and `python -m hydrajax.train` report the same error, and so does distill."""
    said = "hydrajax: --config: unknown key draft.num_draft_head; did you mean draft.num_draft_heads?\n"
    asked = ["--config", str(CONFIGS / "demo_hydra.yaml"), "draft.num_draft_head=3"]
    for name in ("train", "distill --output none.jsonl"):
        result = program(*name.split(), *asked, code=2)
        assert (result.out, result.err) == ("", said)
    assert train.main(asked) == 2
    assert capsys.readouterr().err == said


def test_settings_may_stand_anywhere():
    for order in (
        "seed=1 --config own_text data.length=64",
        "--config own_text seed=1 data.length=64 --dry-run",
        "seed=1 data.length=64 --config own_text",
    ):
        args = parse(build_parser(["train"]), ["train", *order.split()])
        assert (args.config, args.overrides) == ("own_text", ["seed=1", "data.length=64"])


LOADING = [
    "generate --base B --prompt x", "chat --base B", "bench --base B", "evaluate --base B --set mt_bench --output O",
    "certify --base B", "tree search --base B --prompts P --save", "convert int8 --base B",
]  # fmt: skip


def parsed(*argv):
    return build_parser(list(argv)).parse_args(argv)


def test_the_dtype_is_left_to_the_checkpoint_and_the_device():
    for command in LOADING:
        assert parsed(*command.split()).dtype == "auto", command
        assert parsed(*command.split(), "--dtype", "bfloat16").dtype == "bfloat16", command


def test_flags_of_rules():
    for flags, rule in (
        ("--temperature 1.3 --top-k 20 --top-p 0.9", ExactSampling(1.3, top_k=20, top_p=0.9)),
        ("--rule exact --top-k 1", ExactSampling(top_k=1)),
        ("--temperature 0", Greedy()),
        ("--rule typical --epsilon 0 --alpha 0", Typical(epsilon=0.0, alpha=0.0)),
        ("--rule rejection --min-p 0.1", RejectionSampling(min_p=0.1)),
        ("--rule block --top-p 0.9", BlockVerification(top_p=0.9)),
    ):
        assert options.request_from(parsed("generate", "--base", "B", "--prompt", "x", *flags.split())).rule == rule


WITHOUT_BFLOAT16 = "computing in float16: GPUs of compute capability 7.5 have no bfloat16\n"


@pytest.mark.parametrize(
    ("platform", "chosen", "printed"),
    [
        (Platform("cpu", 1), "float32", ""),
        (Platform("gpu", 1), "bfloat16", ""),
        (Platform("gpu", 1, 8.0), "bfloat16", ""),
        (Platform("gpu", 1, 7.5), "float16", WITHOUT_BFLOAT16),
    ],
)
def test_the_dtype_that_was_chosen_is_recorded(wordless, tmp_path, capsys, platform, chosen, printed):
    export_llama(tmp_path / "base", *load_llama(wordless), dtype=jnp.bfloat16)
    args = parsed("certify", "--base", str(tmp_path / "base"))
    with tracing(platform=platform):
        loaded = options.load_from(args)
    assert loaded.model.dtype == chosen
    assert options.recorded(args)["dtype"] == chosen
    assert capsys.readouterr().err == printed


def test_random_weights_are_float32_unless_told_otherwise(monkeypatch):
    found = []
    monkeypatch.setattr(bench, "random_model", lambda *arguments: found.append(arguments[2]) or (None, None, None))
    monkeypatch.setattr(bench, "_with_own_tree", lambda *arguments: None)
    for flags, dtype in (([], "float32"), (["--dtype", "bfloat16"], "bfloat16")):
        args = parsed("bench", "--random", "tiny", *flags)
        with tracing(platform=Platform("gpu", 1)):
            bench._executor(args, Request())
        assert jnp.dtype(found.pop()) == options.recorded(args)["dtype"] == dtype


def test_only_ascii_digits_are_integers():
    for text in ("1_0", "+1", " 1", "１"):
        for flag in ("--slots", "--port", "--queue", "--grace"):
            with pytest.raises(HydrajaxError, match=f"{flag}: .*expected an integer"):
                parsed("serve", "--base", "B", f"{flag}={text}")
        with pytest.raises(HydrajaxError, match="tree: got 'chain-"):
            presets.by_name(f"chain-{text}")


def test_sizes_of_a_mesh():
    for text in ("data=2,model=4", "model=4, data=2"):
        assert parsed("chat", "--base", "B", "--mesh", text).mesh == {"data": 2, "model": 4}


def test_a_mesh_of_more_devices_than_there_are_is_refused_before_the_base_is_looked_for():
    with pytest.raises(HydrajaxError, match="mesh: got data=1 x model=4096, expected 1 to"):
        options.load_from(parsed("generate", "--base", "nowhere", "--prompt", "x", "--mesh", "model=4096"))


def test_the_program_answers_a_shell(tmp_path):
    """argcomplete's protocol: the line and the cursor are in the environment, the answer is in a file."""
    line = "hydrajax ev"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    command = [sys.executable, "-m", "hydrajax"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "answer").read_text() == "evaluate "


def completions(*words: str) -> set[str]:
    """Return the completions of the last word."""
    parser = build_parser(list(words))
    add_completers(parser)
    *before, begun = ["hydrajax", *words]
    return {found.strip() for found in CompletionFinder(parser)._get_completions(before, begun, "", None)}


def test_completions_of_arguments(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    (tmp_path / "oak.json").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert completions("generate", "--base", "") == {"llama/", "shipped", "smollm2"}
    assert completions("chat", "--draft", "") == {"llama/", *without_weights(), *assets.DRAFT_NAMES}
    assert completions("evaluate", "--draft", "lo") == {"lookahead", "lookup"}
    assert completions("convert", "export", "--output", "") == {"llama/"}
    assert completions("bench", "--tree", "o") == {"oak.json"}
    assert completions("bench", "--tree", "mc") == {"mc_sim_7b_63"}
    assert completions("generate", "--prompts", "n") == {"notes.txt"}
    assert completions("generate", "--rule", "") == {"greedy", "typical", "exact", "rejection", "traversal", "block"}
    sizes = {"none", "int8", "int8-64", "int8-128", "int4", "int4-64", "int4-128", "mxfp4", "fp8"}
    assert completions("generate", "--quantize", "") == sizes
    assert "--temperature" in completions("generate", "--t")


def test_a_log_gets_a_line_at_once_and_then_at_most_one_per_interval(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with screen.status("loading", every=10) as update:
        for now in (1.0, 9.9, 10.1, 12.0, 20.0, 20.2):
            update(f"compiling at {now}")
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "loading ...\ncompiling at 10.1 ...\ncompiling at 20.2 ...\n"


def test_a_terminal_gets_one_line_that_leaves_no_trace(capsys, monkeypatch):
    monkeypatch.setattr(screen, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True))
    with screen.status("loading") as update:
        update("compiling 3 of 7")
    found = capsys.readouterr().err
    assert "loading" in found or "compiling" in found
    assert "\n" not in found.rsplit("\x1b[2K", 1)[-1]  # the line was erased


def test_narrow_terminals_cut_the_description_of_a_bar_only():
    for width in [60, 80, 120]:
        console = Console(file=io.StringIO(), width=width)
        bar = screen.bar()
        bar.add_task("path/to/questions.jsonl, 5 contenders, " + "long " * 30, total=2000, completed=1500)
        console.print(bar)
        line = console.file.getvalue()
        assert re.match(r"━.* 1500/2000 +-?[-:\d]+ path/to/q.*…\n$", line), line


def test_drafted_text_is_in_brackets_where_there_are_no_styles():
    out = io.StringIO()
    screen.write_marked(Console(file=out, width=20), [("a\tb", True), (" [c]" + "d" * 30, False)])
    assert out.getvalue() == "⟦a\tb⟧ [c]" + "d" * 30 + "\n"
