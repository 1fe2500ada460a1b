"""Result files and files of the commands are read as results; damaged ones are named. Tables and the report."""

import json
import re

from helpers.refusals import assert_refused
from helpers.report_examples import RATE, ROWS, result, write_to
from hydrajax.bench.report import records
from hydrajax.bench.report.markdown import section, write_report
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.results import KINDS, Result, result_from
from hydrajax.bench.report.tables import cell, markdown_table, print_table
from hydrajax.machine import machine


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


TABLES = {
    "speed": "hydra / tree, 1, 64, 2.50, 311, 190 to 210, 1.27x, **no**",
    "trees": "hydra, 1, searched, T_8, 8, 2.60, 2.50, 400, 190 to 210, 1.27x",
    "categories": "qa, 10, 1.00x (τ 2.50), 1.90x (τ 2.50), yes",
    "accuracy": "hydra, 2, 20.0%, 60.0%",
    "steps": "chain-2, 1, 3, 2, 3, 2.5, 0.25, 0.125, 0.0625, 1.50",
}


def test_tables_hold_the_rows():
    for kind, found in TABLES.items():
        head, rule, *cells = cells_of(section(result(kind), "r.json"))
        assert found.split(", ") in cells, kind
        assert {len(line) for line in (head, rule, *cells)} == {len(found.split(", "))}
    # Other kinds show all their fields.
    head, _, *cells = cells_of(section(result("overhead"), "r.json"))
    assert head == ["drafter", "prefix_attention", "heads", "verify", "autoregressive_step"]
    assert cells[1] == ["hydra_pp", "1.2", "0.6, 1.4", "20", "18"]


def test_only_the_fastest_of_each_family_is_in_the_table():
    cells = cells_of(section(result("trees"), "r.json"))[2:]
    assert [line[3] for line in cells] == ["T_1", "T_8", "chain-1", "mc_sim_7b_63"]


def test_a_section_has_its_sources():
    text = section(result("speed", "hydra figure 2", remarks=["a remark"]), "r.json", "figures/r.png")
    parts = ("## Hydra figure 2: some speed", "(figures/r.png)", "- a remark", "- repeats 7", "device abacus, cores 2")
    assert all(part in text for part in parts)
    assert "`r.json`, made by `python x.py`" in text


def test_a_markdown_table():
    """Figures have no exponent."""
    lines = ["| a | b | c |", "|---|---:|---:|", "| x\\|y | 1 |  |", "| 0.123 | yes | 1, 2 |"]
    assert markdown_table(("a", "b", "c"), [("x|y", 1, None), (0.12345, True, [1, 2])]) == lines
    assert [cell(value) for value in (999.4, 999.6, 12345.6)] == ["999", "1,000", "12,346"]


def test_a_printed_table_is_never_cut(capsys):
    print_table(("name", "rate"), [["[bold]" + "x" * 150, 2.5], ["y", None]], left=["name"], title="rates")
    out = capsys.readouterr().out
    assert "[bold]" + "x" * 150 in out
    assert "2.5" in out
    assert out.startswith("rates")


def test_a_report_has_every_result(tmp_path):
    for kind in ROWS:
        write_to(tmp_path / f"{kind}.json", result(kind))
    write_report(find_results(tmp_path)[0], tmp_path / "REPORT.md")
    headings = [line for line in (tmp_path / "REPORT.md").read_text().splitlines() if line.startswith("## ")]
    assert headings == [f"## Some {kind}" for kind in sorted(ROWS)]


def test_texts_of_a_file_become_no_link_and_no_html(tmp_path):
    """Hostile texts in every field of a result."""
    evil = "x](javascript:a)\n# <b>$\\frac{$ | `\x1b[2J" + "y" * 5000
    row = ROWS["speed"][0] | {"name": evil}
    texts = {"title": evil, "command": evil, "remarks": [evil], "machine": {evil: evil}, "settings": {evil: [evil]}}
    write_to(tmp_path / "x](y).json", Result("speed", evil, rows=[row], **texts))
    write_report(find_results(tmp_path)[0], tmp_path / "REPORT.md")
    lines = (tmp_path / "REPORT.md").read_text().splitlines()
    assert max(map(len, lines)) < 10_000
    shown = [re.sub(r"`[^`]*`", "", line) for line in lines]
    assert not any("](" in line for line in shown)
    assert not any("<b" in line or "\x1b" in line or line.startswith("# <") for line in shown)
    assert sum(line.startswith("# ") for line in lines) == 1


def test_results_of_every_kind_are_written_and_read(tmp_path):
    assert set(ROWS) > set(KINDS)
    for kind in ROWS:
        written = result(kind, "hydra figure 2", remarks=["one", "two"])
        write_to(tmp_path / "r.json", written)
        assert find_results(tmp_path) == ([(tmp_path / "r.json", written)], [])


DAMAGE = [
    ("speed", lambda c: c.update(hydrajax_result=2), "hydrajax_result: got 2, expected 1"),
    ("speed", lambda c: c.pop("machine"), "field machine is missing"),
    ("speed", lambda c: c.update(rows=[]), "rows: got 0, expected 1 to 1000"),
    ("speed", lambda c: c["rows"].append("x"), "rows: got "),
    ("speed", lambda c: c["rows"][1].pop("batch"), "rows[1]: field batch is missing"),
    ("speed", lambda c: c["rows"][0].update(batch=1.5), "rows[0]: batch: got 1.5, expected an integer"),
    ("speed", lambda c: c["rows"][0].update(batch=True), "rows[0]: batch: got true, expected an integer"),
    ("speed", lambda c: c["rows"][0].update(equal=1), "rows[0]: equal: got 1, expected true or false or null"),
    ("speed", lambda c: c["rows"][0].update(speedup=float("nan")), "rows[0]: speedup: got NaN, expected a finite"),
    ("trees", lambda c: c["rows"][0].update(expected="2"), 'rows[0]: expected: got "2", expected a finite'),
]


def test_the_machine_has_a_device():
    found = machine()
    assert (found["platform"], bool(found["device"]), found["cores"] >= 1) == ("cpu", True, True)


def test_a_damaged_result_is_named(tmp_path):
    for kind, change, message in DAMAGE:
        content = json.loads(json.dumps({"hydrajax_result": 1, **vars(result(kind))}))
        change(content)
        assert_refused(result_from, (content, "where", f"where: ...{message}"))
        (tmp_path / "r.json").write_text(json.dumps(content))
        assert_refused(find_results, (tmp_path, "r.json: "))


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


def test_evaluate_gives_categories(tmp_path):
    figures = {"questions": 3, **RATE, "equal": True, "steps": 7}
    summary = {"machine": {}, "arguments": {"set": "mt_bench"}, "results": {"hydra": {"qa": figures}}}
    write(tmp_path / "answers" / "summary.json", records.of_evaluate(summary))
    by_kind = {found.kind: found.rows for _, found in find_results(tmp_path)[0]}
    assert by_kind["categories"] == [{"name": "hydra", "category": "qa", "questions": 3, **RATE, "equal": True}]


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
    texts = ["", "{", "[]", "null", '{"rows": 1}', "[" * 100_000, '{"kind": "eval", "top1": 3}']
    for text in (*texts, '{"hydrajax_results": 3}'):
        (tmp_path / "other.json").write_text(text)
        (tmp_path / "other.jsonl").write_text(text)
        results, others = find_results(tmp_path)
        assert results == []
        assert [path.name for path in others] == ["other.json", "other.jsonl"]
    assert_refused(find_results, (tmp_path / "none", "is not a directory"))
