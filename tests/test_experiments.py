"""The scripts of ``experiments/``, run at tiny sizes without assertions about time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.scripts import EXPERIMENTS, module
from hydrajax import assets
from hydrajax.bench.report.outputs import find_results
from hydrajax.errors import HydrajaxError
from hydrajax.formats.hub import resolve

# Scripts of figures and tables, with settings that take seconds, and the kind of their results.
SHORT, FAST = "--count 2 --new-tokens 8", "--count 2 --calibration 8 --repeats 1 --new-tokens 8"
PAPERS = {
    "hydra_figure_2": (f"{FAST} --sizes 2", "speed"),
    "hydra_figure_3": (f"{FAST} --sizes 2 --batch-sizes 1,2", "speed"),
    "hydra_figure_4": (SHORT, "acceptance"),
    "hydra_figure_5": (f"{SHORT} --steps 2 --repeats 1", "speed"),
    "hydra_figure_6": (f"{SHORT} --steps 2 --repeats 1", "speed"),
    "hydra_figures_7_to_9": (f"{FAST} --sizes 1,4 --batch-sizes 1,2", "trees"),
    "hydra_table_1": ("--context 128 --rounds 1", "overhead"),
    "hydra_table_2": ("--data DATA --max-new-tokens 4", "categories"),
    "amphista_tables_1_and_2": ("--data DATA --max-new-tokens 4 --questions 1", "categories"),
    "medusa_figure_4": (f"{FAST} --sizes 4 --dense 2 --largest 20", "trees"),
    "medusa_figure_5": (f"{SHORT} --points 2", "acceptance"),
    "medusa_table_3": (f"{FAST} --nodes 8", "speed"),
    "amphista_figure_1": ("--calibration 8 --new-tokens 8", "accuracy"),
}
QUESTIONS = [
    {"question_id": at, "category": category, "turns": ["Say tree."]}
    for at, category in enumerate(["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"])
]
QUESTIONS += [{"question_id": 8, "category": "humanities", "turns": ["Why?"]}]
QUESTIONS += [{"question_id": 9, "category": "qa", "turns": ["Who?"]}]


def run(name: str, folder: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run a script from another directory."""
    data = folder / "questions"
    data.mkdir(exist_ok=True)
    text = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (data / "spec_bench_question.jsonl").write_text(text)
    argv = [str(data) if word == "DATA" else word for word in argv]
    command = [sys.executable, str(EXPERIMENTS / f"{name}.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def succeeds(name: str, folder: Path, *argv: str):
    """Run a script and return its result."""
    done = run(name, folder, *argv)
    assert done.returncode == 0, done.stderr
    ((path, result),), _ = find_results(folder / "runs" / "experiments")
    assert path.name == f"{name}.json"
    return result


@pytest.fixture
def in_process(monkeypatch, capsys, tmp_path):
    """``run(name, *argv)``: exit code and stderr of a script run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def run(name: str, *argv: str) -> tuple[int, str]:
        script = module(EXPERIMENTS / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        add = getattr(script, "add_arguments", None)
        code = script.common.program(script.__doc__, script.run, script.FULL, script.QUICK, add)
        return code, capsys.readouterr().err

    return run


# The others do not use `common.program`.
def test_scripts_accept_the_settings_of_the_slow_tests(in_process, monkeypatch):
    """Up to the first measurement."""

    def begun(*_):
        raise HydrajaxError("begun")

    monkeypatch.setattr("common.Parts", begun)
    for name, (argv, _) in PAPERS.items():
        if "FULL = " in (EXPERIMENTS / f"{name}.py").read_text():  # the others do not use `common.program`
            assert in_process(name, *argv.split()) == (2, "hydrajax: begun\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_scripts(name, tmp_path):
    argv, kind = PAPERS[name]
    result = succeeds(name, tmp_path, *argv.split())
    assert result.kind == kind
    assert result.source.split()[0] == name.split("_")[0]
    assert re.findall(r"\d+", result.source) == re.findall(r"\d+", name)
    assert result.command.startswith(f"python experiments/{name}.py --")
    assert result.machine["platform"] == "cpu"
    if kind in ("speed", "categories"):
        assert all(row["equal"] for row in result.rows)
    if name.startswith("hydra_figure_") and kind == "speed":
        assert {row["tokens_per_step"] for row in result.rows if row["name"] == "autoregressive"} == {1.0}
    if kind == "categories":
        assert {row["category"] for row in result.rows} == {"mt_bench", "qa", "overall"}
    if kind == "accuracy":  # grows with the number of guesses
        for drafter in ("medusa", "hydra", "hydra_pp"):
            shares = [row["accuracy"] for row in result.rows if (row["drafter"], row["head"]) == (drafter, 0)]
            assert 0.2 < shares[0] <= shares[-1] <= 1
            assert shares == sorted(shares)


def test_scripts_that_train_pass_settings_on(in_process, monkeypatch):
    trained = []

    def fails(command):
        trained.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fails)
    for name in ("amphista_table", "lm_heads_pareto", "medusa_table_2", "parallel_table"):
        with pytest.raises(SystemExit) as ended:
            in_process(name, "--set", "batch_size=2", "data.limit=9")
        assert ended.value.code == 3
        assert {"batch_size=2", "data.limit=9"} < set(trained.pop())


TRAINING = f"{SHORT} --steps 2 --repeats 1 --timed 1 --rounds 1"


@pytest.mark.slow
def test_medusa_table_2(tmp_path):
    """On random lines instead of text generated by the base."""
    text = tmp_path / "runs" / "shipped" / "distilled.jsonl"
    text.parent.mkdir(parents=True)
    ids = np.random.default_rng(0).integers(5, 4000, (60, 200)).tolist()
    text.write_text("".join(json.dumps({"prompt_ids": row[:50], "output_ids": row[50:]}) + "\n" for row in ids))
    result = succeeds("medusa_table_2", tmp_path, *TRAINING.split(), "--variants", "Medusa-1", "Medusa-2")
    plain, alone, joint = result.rows
    assert (plain["name"], alone["name"], joint["name"]) == ("autoregressive", "Medusa-1", "Medusa-2")
    assert alone["equal"]
    assert joint["equal"]
    assert 0 < joint["bits_per_byte_before"] != joint["bits_per_byte"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which", "kind", "names"),
    [
        ("amphista_table", ["--variants", "Amphista"], "speed", ["autoregressive", "Amphista"]),
        (
            "parallel_table",
            ["--variants", "DFlash", "--calibration", "8", "--sizes", "4"],
            "speed",
            [f"DFlash, {tree}" for tree in ("chain", "static", "grown", "fastest", "grown, 0.7", "fastest, 0.7")],
        ),
        ("lm_heads_pareto", ["--heads", "amphista", "--lm-heads", "low rank"], "pareto", ["amphista, low rank"]),
    ],
    ids=["amphista_table", "parallel_table", "lm_heads_pareto"],
)
def test_scripts_that_train_heads(name, which, kind, names, tmp_path):
    config = EXPERIMENTS / "configs" / "demo_hydra.yaml"  # the script's own needs text generated by the base
    result = succeeds(name, tmp_path, "--config", str(config), *TRAINING.split(), *which)
    assert result.kind == kind
    assert [row["name"] for row in result.rows] == names
    assert all(row["equal"] for row in result.rows if "rule" not in row)  # a row that samples names its rule
    if kind == "pareto":  # a quarter of four full lm heads is one
        assert 384 * 4096 * 4 / 1e6 < result.rows[0]["draft_megabytes"] < 40


def test_interrupted_scripts_keep_their_parts(tmp_path):
    parts, path = module(EXPERIMENTS / "common.py").Parts, tmp_path / "r.json.parts"
    measured: list[str] = []

    def measure(key):
        return lambda: [{"key": key, "number": measured.append(key) or len(measured)}]

    first = parts(path, {"count": 3})
    assert first.rows("a", measure("a")) == first.rows("a", measure("a")) == [{"key": "a", "number": 1}]
    first.rows("b", measure("b"))
    path.write_text(path.read_text()[:-4])  # killed during the write
    again = parts(path, {"count": 3})
    assert again.rows("a", measure("a")) == [{"key": "a", "number": 1}]
    assert again.rows("b", measure("b")) == [{"key": "b", "number": 3}]
    assert parts(path, {"count": 4}).rows("a", measure("a")) == [{"key": "a", "number": 4}]  # other settings
    again.remove()
    assert not list(tmp_path.iterdir())


def test_invalid_arguments(in_process):
    for argv, message in (
        (["--base", "none"], "--draft: got none, expected draft heads for this base"),
        (["--calibration", "x"], "got 'x', expected an integer from 1 up"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--output", "no/folder.json"], "--output: cannot write no/folder.json"),
    ):
        code, err = in_process("amphista_figure_1", *argv)
        assert code == 2, err
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.slow
def test_drafting_ahead(tmp_path):
    """On two devices: equal tokens, and the simulator's inputs are in the file."""
    result = succeeds("ssd", tmp_path, "--quick", "--count", "1", "--new-tokens", "8", "--fan-outs", "3")
    assert result.settings["devices"] == 2
    assert [row["name"] for row in result.rows] == ["autoregressive", "one program", "in turn", "ahead, 3 outcomes"]
    assert all(row["equal"] for row in result.rows)
    in_turn, ahead = result.rows[2:]
    assert in_turn["predicted_hit_rate"] == in_turn["predicted_hidden"] == 0
    assert ahead["predicted_round_ms"] >= max(ahead["parts_ms"]["verify"], ahead["parts_ms"]["prepare"])
    assert {(row["draft"], row["depth"]) for row in result.settings["h200"]} >= {("68m", 1), ("1b", 10)}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_drafting_ahead_in_two_processes(tmp_path):
    """Equal tokens on one core, on both, and with the draft in another process."""
    result = succeeds("ssd_two_processes", tmp_path, "--quick", "--fan-outs", "3")
    assert [row["name"] for row in result.rows[4:]] == ["in turn", "ahead, 3 outcomes"]
    assert all(row["equal"] for row in result.rows)
    assert len({row["tokens_per_step"] for row in result.rows if "autoregressive" not in row["name"]}) == 1


@pytest.mark.slow
def test_quality(tmp_path):
    """Equal outputs have equal scores, and all rules are present."""
    questions = [{"question": f"{n} + {n} =", "answer": f"#### {2 * n}"} for n in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    quick = ["--quick", "--limit", "2", "--max-new-tokens", "4", "--draft", str(assets.path("hydra"))]
    result = succeeds("quality", tmp_path, *quick, "--gsm8k", "sums.jsonl")
    assert (result.kind, len(result.rows)) == ("quality", 4 * 2)
    assert {(row["set"], row["metric"], row["questions"]) for row in result.rows} == {("sums.jsonl", "exact match", 2)}
    assert {row["rule"]: row["equal"] for row in result.rows} == {
        "greedy": True, "exact, temperature 0.7": True, "rejection, temperature 0.7": None,
        "typical, epsilon 0.1, temperature 0.7": None,
    }  # fmt: skip
    assert all(row["difference"] == 0 for row in result.rows if row["equal"])


@pytest.mark.slow
def test_lookup_and_heads(tmp_path):
    """Equal outputs, and the combination accepts at least as many tokens as each alone."""
    line = "def total(prices):\n    return sum(price for price in prices)\n"
    (tmp_path / "again.jsonl").write_text(json.dumps({"prompt": f"{line}\n\n{line}\n\ndef total("}) + "\n")
    short = ["--quick", "--count", "1", "--new-tokens", "24", "--draft", "hydra", "--prompts", "again.jsonl"]
    result = succeeds("lookup_and_heads", tmp_path, *short)
    assert all(row["equal"] for row in result.rows)
    steps = {row["name"].removeprefix("again.jsonl: "): row["tokens_per_step"] for row in result.rows}
    for tree in ("released tree", "small tree"):
        assert steps[f"lookup+hydra, {tree}"] >= max(steps[f"hydra, {tree}"], steps["lookup, chain-5"])


@pytest.mark.slow
def test_serve_load_and_soak(tmp_path):
    """The script compares every answer with `generate` and exits with 1 after a wrong one."""
    for package in ("starlette", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    common = [
        "--slots",
        "2",
        "--tree",
        "chain-2",
        "--prompt-tokens",
        "24",
        "--new-tokens",
        "12",
        "--output",
        "load.json",
    ]
    load = ["--draft", "hydra++", "--draft", "lookup", "--rounds", "2", "--clients", "1,3", "--requests", "6"]
    done = run("serve_load", tmp_path, *common, *load)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "load.json").read_text())
    served = [row for row in found["rows"] if row["way"].startswith("server")]
    names = ["hydra++", "lookup", "none"]
    turns = [(0, clients, name) for clients in (1, 3) for name in names]
    turns += [(1, clients, name) for clients in (1, 3) for name in (*names[1:], names[0])]
    assert [(row["round"], row["clients"], row["way"].removeprefix("server, ")) for row in served] == turns
    for row in served:
        assert (row["requests"], row["wrong"]) == (6, 0)
        assert 0 < row["first_token_ms_50"] <= row["first_token_ms_99"]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in found["ratios"])
    questions = "".join(json.dumps({"prompt": f"def f{number}(x):"}) + "\n" for number in range(3))
    (tmp_path / "questions.jsonl").write_text(questions)
    soak = ["--clients", "4", "--requests", "40", "--disconnect", "0.3", "--questions", "questions.jsonl"]
    done = run("serve_load", tmp_path, *common, *soak)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert (row["requests"], row["lost"], row["wrong"], row["left"]) == (40, 0, 0, 0)
    assert 10 < row["whole"] < 40


@pytest.mark.slow
def test_long_contexts(tmp_path):
    """Cache and memory grow in proportion to the context; too long contexts are refused."""
    settings = ("--lengths", "200,2000", "--contexts", "40", "--count", "2", "--repeats", "1")
    done = run("long_context", tmp_path, *settings, "--output", "long.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "long.json").read_text())
    short, long = found["costs"]
    assert short["places"] * 8 == long["places"]
    assert short["cache_mb"] * 6 < long["cache_mb"] < short["cache_mb"] * 8
    assert {row["draft"] for row in found["tokens_per_step"]} >= {"hydra++", "draft-model", "lookup"}
    assert all(1 <= row["40"] <= 20 for row in found["tokens_per_step"])
    refused = run("long_context", tmp_path, "--lengths", "99999")
    assert (refused.returncode, "expected at most 32512 and 928" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_real_model(tmp_path):
    """All parts on the shipped model: equal outputs, hence equal scores, and the pictures."""
    sums = [{"question": f"{n} + {n} =", "answer": f"#### {2 * n}"} for n in range(3)]
    metrics = tmp_path / "runs" / "hydra" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("".join(json.dumps({"step": n, "kind": "eval", "tokens_per_step": 1.5}) + "\n" for n in (0, 8)))
    (tmp_path / "hydra.yaml").write_text("output: runs/hydra\nmodel: none\nbatch_size: 4\nsteps: 8\n")
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "gsm8k_test.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    flags = ["--base", "shipped", "--template", "plain", "--draft", "lookup", "--draft", "hydra", "--tree", "chain-2"]
    flags += ["--data", "DATA", "--quick", "--max-new-tokens", "24", "--score-tokens", "4", "--runs", "hydra.yaml"]
    done = run("real_model", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert "HumanEval is left out" in done.stdout
    found = {path.stem.removeprefix("real_model_"): result for path, result in find_results(tmp_path / "runs")[0]}
    parts = ["batch", "context", "curve", "mt_bench", "scores", "spec_bench", "spec_bench_sampled"]
    assert sorted(set(found) & set(parts)) == parts
    drafts = ["autoregressive", "lookup-chain-2", "hydra-chain-2"]
    names = [f"{name}, {rule}" for rule in ("greedy", "exact, T 0.7") for name in drafts]
    assert [row["name"] for row in found["mt_bench"].rows] == names
    assert all(row["equal"] for part in ("mt_bench", "spec_bench", "batch", "scores") for row in found[part].rows)
    categories = {row["category"] for row in found["spec_bench"].rows}
    assert categories == {question["category"] for question in QUESTIONS} | {"multi_turn", "overall"}
    assert [(row["name"], row["at"]) for row in found["curve"].rows] == [("hydra", 0), ("hydra", 8 * 4 * 2048 / 1e6)]
    assert {row["difference"] for row in found["scores"].rows} == {0}
    assert len(list((tmp_path / "runs" / "experiments" / "figures").glob("real_model_*.png"))) == 5


def test_real_model_reports_missing_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.chdir(tmp_path)
    script = module(EXPERIMENTS / "real_model.py")
    (tmp_path / "run").mkdir()
    for argv, message in (
        ([], "--data: got none, expected the directory of the question files"),
        (["--parts", "curve"], "--runs: got none, expected training runs"),
        (["--parts", "curve", "--runs", "run"], "--runs: got run without checkpoints, expected a run"),
    ):
        monkeypatch.setattr(sys, "argv", ["real_model.py", *argv])
        assert script.run_command("real_model.py", "", script.add_arguments, script.run, argv) == 2
        assert message in capsys.readouterr().err
    assert script.candidate_drafts("elsewhere") == ["lookup"]
    bundled = list(assets.SHIPPED_DRAFTS)
    assert [resolve(name, "draft") for name in bundled] == [assets.path(name) for name in assets.DRAFTS]
    assert script.candidate_drafts("shipped") == ["lookup", *bundled, *(f"lookup+{name}" for name in bundled)]


def test_edit_and_summary_prompts(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    script = module(EXPERIMENTS / "lookup_and_heads.py")
    function = "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height"
    (edit,) = script.edits(f"import os\n\n{function}\n\ndef none():\n    pass\n")
    ending = "# The same, with width renamed to new_width:\n\ndef area(new_width, height):\n"
    assert edit == f"{function}\n\n\n{ending}"
    queue = "class Queue:\n    def put(self):\n        pass\n    def get(self):\n        pass\n    def size(self): pass"
    (summary,) = script.summaries(f"{queue}\n\nclass Small:\n    def one(self):\n        pass\n")
    assert summary == f"{queue}\n\n\n# Summary: the methods of Queue are\n#\n# def put("
    assert [*script.edits("def broken(:"), *script.summaries("class")] == []


def test_quality_reports_missing_arguments(in_process, tmp_path):
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "a", "test": "b", "entry_point": "c"}) + "\n")
    for argv, message in (
        ([], "--humaneval: no questions were given; give one or more of --humaneval, --gsm8k, --summaries, --mt-bench"),
        (["--gsm8k", "a.jsonl", "--prompts", "b.jsonl"], "--prompts: is not used here"),
        (["--humaneval", "code.jsonl"], "--run-code: pass@1 runs the generated code in a sandbox"),
    ):
        code, err = in_process("quality", *argv)
        assert (code, message in err) == (2, True)
    assert not list((tmp_path / "runs" / "experiments").glob("*.json"))


def test_every_script_is_listed_and_every_paper_script_has_a_committed_result():
    text = (EXPERIMENTS / "README.md").read_text()
    for path in EXPERIMENTS.glob("*.py"):
        assert path.stem in ("common", "typical", "ablation") or f"`{path.name}`" in text, path
    results, _ = find_results(EXPERIMENTS / "results")
    expected = {name.replace("_", " ") for name in PAPERS}
    assert {result.source for _, result in results} >= expected


@pytest.mark.slow
def test_load_memory(tmp_path):
    """2 GB in four shards: private memory exceeds the device copy by at most 1.3 shards; also cast, quantised, sharded
    over devices and processes.
    """
    script = [sys.executable, str(EXPERIMENTS / "load_memory.py"), "--directory", str(tmp_path)]
    subprocess.run([*script, "--output", str(tmp_path / "report.json")], check=True, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["checkpoint_bytes"] > 1.9e9
    assert report["largest_shard_bytes"] < report["checkpoint_bytes"] / 3
    assert [case["case"] for case in report["cases"]] == ["float32", "bfloat16", "int8", "model", *["processes"] * 2]
    for case in report["cases"]:
        assert case["device_bytes"] > report["checkpoint_bytes"] / 5  # it really holds the model
        assert 0 < case["beside_device_copy_in_largest_shards"] < 1.3


@pytest.mark.slow
def test_load_low_bits(tmp_path):
    """Both kinds of files are loaded; each damage is refused in one line."""
    script = [sys.executable, str(EXPERIMENTS / "load_low_bits.py"), "--directory", str(tmp_path)]
    small = ["--gigabytes", "0.02", "--width", "512", "--vocabulary", "2000"]
    subprocess.run([*script, *small, "--output", str(tmp_path / "report.json")], check=True, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(case["kind"], len(case["damaged"])) for case in report] == [("gguf", 3), ("awq", 4)]
    for case in report:
        assert case["file_bytes"] == pytest.approx(2e7, rel=0.2)
        for damaged in case["damaged"]:
            assert damaged["code"] == 2
            assert len(damaged["lines"]) == 1
            assert damaged["lines"][0].startswith("hydrajax: --base: ")
