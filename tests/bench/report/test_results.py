"""Result files and files of the commands are read as results, and damaged files are named."""

from __future__ import annotations

import json

from helpers.refusals import assert_refused
from helpers.report_examples import RATE, ROWS, result, write_to
from hydrajax.bench.report import records
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.results import KINDS, result_from
from hydrajax.machine import machine


def test_results_of_every_kind_are_written_and_read(tmp_path):
    assert set(ROWS) == set(KINDS)
    for kind in KINDS:
        written = result(kind, "hydra figure 2", remarks=["one", "two"])
        write_to(tmp_path / "r.json", written)
        assert find_results(tmp_path) == ([(tmp_path / "r.json", written)], [])


DAMAGE = [
    ("speed", lambda c: c.update(hydrajax_result=2), "hydrajax_result: got 2, expected 1"),
    ("speed", lambda c: c.update(kind="pie"), 'kind: got "pie", expected one of speed, trees'),
    ("speed", lambda c: c.pop("machine"), "field machine is missing"),
    ("speed", lambda c: c.update(rows=[]), "rows: got 0, expected 1 to 1000"),
    ("speed", lambda c: c["rows"].append("x"), "rows: got "),
    ("speed", lambda c: c["rows"][1].pop("batch"), "rows[1]: field batch is missing"),
    ("speed", lambda c: c["rows"][0].update(batch=1.5), "rows[0]: batch: got 1.5, expected an integer"),
    ("speed", lambda c: c["rows"][0].update(batch=True), "rows[0]: batch: got true, expected an integer"),
    ("speed", lambda c: c["rows"][0].update(equal=1), "rows[0]: equal: got 1, expected true or false or null"),
    ("speed", lambda c: c["rows"][0].update(speedup=float("nan")), "rows[0]: speedup: got NaN, expected a finite"),
    ("trees", lambda c: c["rows"][0].update(expected="2"), 'rows[0]: expected: got "2", expected a finite'),
    ("overhead", lambda c: c["rows"][0].update(heads=[1, None]), "rows[0]: heads: got [1, null], expected"),
]


def test_a_damaged_result_is_named(tmp_path):
    for kind, change, message in DAMAGE:
        content = json.loads(json.dumps({"hydrajax_result": 1, **vars(result(kind))}))
        change(content)
        assert_refused(result_from, (content, "where", f"where: ...{message}"))
        (tmp_path / "r.json").write_text(json.dumps(content))
        assert_refused(find_results, (tmp_path, "r.json: "))


def test_a_wrong_row_is_not_written(tmp_path):
    assert_refused(write_to, (tmp_path / "r.json", result("speed", rows=[{}]), "rows[0]: field name is missing"))
    assert not list(tmp_path.iterdir())


def test_the_machine_has_a_device():
    found = machine()
    assert found["platform"] == "cpu"
    assert found["device"]
    assert found["cores"] >= 1


# --- what the commands write ------------------------------------------------------------------------------------------


def write(path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_bench_gives_steps_and_rates(tmp_path):
    row = ROWS["steps"][0] | {"tokens_per_step": 2.2, "tokens_per_second": 150.0, "speedup": 1.5, "outputs_equal": True}
    row |= {"autoregressive_tokens_per_second": 100.0}
    arguments = {"base": "some/base", "random": None, "repeats": 5}
    write(tmp_path / "b.json", records.of_bench({"machine": {"device": "x"}, "arguments": arguments, "rows": [row]}))
    (steps, speed), others = find_results(tmp_path)
    assert others == []
    assert (steps[1].kind, steps[1].rows) == ("steps", ROWS["steps"])
    assert steps[1].settings == {"base": "some/base", "repeats": 5}
    assert [(row["name"], row["tokens_per_second"]) for row in speed[1].rows] == [
        ("chain-2", 150.0), ("autoregressive", 100.0),
    ]  # fmt: skip
    row |= {"tokens_per_second": None}  # without prompts
    arguments = {"base": None, "random": "7b"}
    write(tmp_path / "b.json", records.of_bench({"machine": {}, "arguments": arguments, "rows": [row]}))
    assert [(found.kind, found.title) for _, found in find_results(tmp_path)[0]] == [("steps", "a decode step of 7b")]


def test_tree_search_gives_trees(tmp_path):
    measured = [{"name": str(n), "nodes": n, "expected_tokens_per_step": 1.5, **RATE} for n in (1, 4)]
    measured.append({"name": "dynamic-4-1-3", "nodes": 4, "expected_tokens_per_step": None, **RATE})
    provenance = {"arguments": {"draft": "a/hydra", "batch_size": 2}, "machine": {}, "measured": measured}
    write(tmp_path / "tree_b2.json", {"choices": [[0]]} | records.of_tree_search(provenance))
    ((_, found),), _ = find_results(tmp_path)
    assert [(row["drafter"], row["batch"], row["family"], row["nodes"]) for row in found.rows] == [
        ("hydra", 2, "root", 1), ("hydra", 2, "searched", 4), ("hydra", 2, "dynamic", 4),
    ]  # fmt: skip


def test_evaluate_gives_categories_and_roofline_predictions(tmp_path):
    figures = {"questions": 3, **RATE, "equal": True, "steps": 7}
    summary = {"machine": {}, "arguments": {"set": "mt_bench"}, "results": {"hydra": {"qa": figures}}}
    write(tmp_path / "answers" / "summary.json", records.of_evaluate(summary))
    cell = ROWS["prediction"][0]
    times = {
        "predicted": {"step": cell["predicted_step"], "autoregressive_step": cell["predicted_autoregressive_step"]},
        "measured": {"step": cell["step"], "autoregressive_step": cell["autoregressive_step"]},
    }
    times["predicted"] |= {name: cell[name] for name in ("batch", "context", "nodes")}
    write(tmp_path / "roofline.json", records.of_roofline({"machine": {}, "arguments": {}, "rows": [times]}))
    by_kind = {found.kind: found.rows for _, found in find_results(tmp_path)[0]}
    assert by_kind["prediction"] == [cell]
    assert by_kind["categories"] == [{"name": "hydra", "category": "qa", "questions": 3, **RATE, "equal": True}]


def test_evaluate_with_scores_gives_quality(tmp_path):
    """Over all questions, shares times 100; without scores, categories only."""
    figures = {"questions": 3, "mean": 0.25, "low": 0.0, "high": 0.5, "difference": -0.01}
    figures |= {"difference_low": None, "difference_high": None}
    arguments = {"set": "some/HumanEval.jsonl.gz", "rule": "typical", "epsilon": 0.1, "temperature": None}
    overall = {"questions": 3, **RATE, "equal": None}
    content = {"machine": {}, "arguments": arguments, "results": {"hydra": {"overall": overall}}}
    scores = {"metrics": {"pass@1": 100}, "results": {"hydra": {"code": {}, "overall": {"pass@1": figures}}}}
    write(tmp_path / "a" / "summary.json", records.of_evaluate(content | {"scores": scores}))
    without = {"metrics": {}, "results": {"hydra": {}}}
    write(tmp_path / "b" / "summary.json", records.of_evaluate(content | {"scores": without}))
    results, _ = find_results(tmp_path)
    assert [found.kind for _, found in results] == ["categories", "quality", "categories"]
    assert results[1][1].rows == [
        {"set": "HumanEval.jsonl.gz", "metric": "pass@1", "rule": "typical, epsilon 0.1", "name": "hydra"}
        | {"questions": 3, "score": 25.0, "low": 0.0, "high": 50.0, "difference": -1.0}
        | {"difference_low": None, "difference_high": None, "tokens_per_step": 2.5, "speedup": 1.27, "equal": None}
    ]


def test_training_runs_of_one_folder_are_one_result(tmp_path):
    for run, share in (("medusa", 0.3), ("hydra", 0.5)):
        lines = [{"step": 0, "kind": "eval"} | {f"top{n}": [0.0, 0.0] for n in range(1, 6)}]
        lines += [{"step": 9, "kind": "eval"} | {f"top{n}": [share, share / 2] for n in range(1, 6)}]
        lines += [{"step": 10, "kind": "train", "loss": 1.0}]
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((_, found),), _ = find_results(tmp_path)
    firsts = {row["drafter"]: row["accuracy"] for row in found.rows if (row["head"], row["top"]) == (0, 1)}
    assert firsts == {"medusa": 0.3, "hydra": 0.5}
    assert found.settings == {"after step": 9}


def test_other_files_are_left_alone(tmp_path):
    texts = [
        "",
        "{",
        "[]",
        "null",
        '{"rows": 1}',
        "[" * 100_000,
        '{"hydrajax_results": 3}',
        '{"kind": "eval", "top1": 3}',
    ]
    for text in texts:
        (tmp_path / "other.json").write_text(text)
        (tmp_path / "other.jsonl").write_text(text)
        results, others = find_results(tmp_path)
        assert results == []
        assert [path.name for path in others] == ["other.json", "other.jsonl"]
    assert_refused(find_results, (tmp_path / "none", "is not a directory"))
