"""Results in files, tables and pictures: what is shown is what was measured, and a damaged file is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.measure.machine import machine
from hydrajax.report.figures import draw, front
from hydrajax.report.markdown import section, table, write_report
from hydrajax.report.outputs import find_results
from hydrajax.report.results import KINDS, Result, result_from, write_result

RATE = {"tokens_per_step": 2.5, "tokens_per_second": 200.4, "low": 190.0, "high": 210.0, "speedup": 1.27}
ROWS = {
    "speed": [
        {"name": "autoregressive", "batch": 1, "nodes": 1, **RATE, "equal": True},
        {"name": "hydra | tree", "batch": 1, "nodes": 64, **RATE | {"tokens_per_second": 311.0}, "equal": False},
    ],
    "trees": [
        {"drafter": "hydra", "batch": 1, "family": family, "name": name, "nodes": nodes, "expected": expected, **RATE}
        | {"tokens_per_second": rate}
        for family, name, nodes, expected, rate in [
            ("root", "T_1", 1, 1.0, 500.0),
            ("searched", "T_2", 2, 1.6, 300.0),
            ("searched", "T_8", 8, 2.6, 400.0),
            ("chain", "chain-1", 2, 1.6, 290.0),
            ("released", "mc_sim_7b_63", 64, None, 100.0),
        ]
    ],
    "acceptance": [
        {"drafter": "medusa", "rule": "greedy", "parameter": None, "value": None, "tokens_per_step": 2.0, "nats": 1.5},
        {
            "drafter": "medusa",
            "rule": "typical",
            "parameter": "epsilon",
            "value": 0.2,
            "tokens_per_step": 3.0,
            "nats": 2,
        },
        {
            "drafter": "medusa",
            "rule": "typical",
            "parameter": "epsilon",
            "value": 0.1,
            "tokens_per_step": 3.5,
            "nats": 3,
        },
    ],
    "overhead": [
        {"drafter": "medusa", "prefix_attention": None, "heads": [0.3, 0.25], "verify": 20, "autoregressive_step": 18},
        {"drafter": "hydra_pp", "prefix_attention": 1.2, "heads": [0.6, 1.4], "verify": 20, "autoregressive_step": 18},
    ],
    "categories": [
        {"name": name, "category": category, "questions": 10, **RATE | {"speedup": speedup}, "equal": True}
        for name, speedup in (("plain", 1.0), ("hydra", 1.9))
        for category in ("qa", "overall")
    ],
    "quality": [
        {"set": name, "metric": metric, "rule": rule, "name": drafter, "questions": 20, "score": 31.5, "low": 20.0}
        | {"high": 40.0, "difference": -1.5, "difference_low": -3.0, "difference_high": 0.5}
        | {"tokens_per_step": 2.5, "speedup": 1.27, "equal": True if rule == "greedy" else None}
        for name, metric in (("HumanEval", "pass@1"), ("gsm8k", "exact match"))
        for rule in ("greedy", "typical, epsilon 0.1")
        for drafter in ("plain", "hydra")
    ],
    "accuracy": [
        {"drafter": drafter, "head": head, "top": top, "accuracy": 0.1 * top + 0.1 * head}
        for drafter in ("medusa", "hydra")
        for head in (0, 1)
        for top in (1, 5)
    ],
    "pareto": [
        {"drafter": drafter, "lm_head": lm_head, "nodes": 64, "draft_megabytes": size, "draft_ms": 0.5}
        | {**RATE, "tokens_per_step": tau, "tokens_per_second": rate, "equal": True}
        | {"predicted_gigabytes": size / 10, "predicted_speedup": tau / 2}
        for drafter, lm_head, size, tau, rate in [
            ("medusa", "full", 24.0, 2.1, 300.0),
            ("medusa", "shared", 2.0, 1.5, 280.0),
            ("amphista", "full", 30.0, 2.5, 290.0),
            ("amphista", "shared", 8.0, 2.2, 310.0),
        ]
    ],
    "steps": [
        {"tree": "chain-2", "batch": 1, "nodes": 3, "autoregressive_step": 2.0, "step": 3.0, "propose": 0.25}
        | {"verify": 2.5, "accept_commit": 0.125, "observe": 0.0625, "break_even": 1.5}
    ],
    "prediction": [
        {"batch": 1, "context": 512, "nodes": 64, "predicted_step": 9.0, "step": 10.0}
        | {"predicted_autoregressive_step": 3.3, "autoregressive_step": 3.0}
    ],
    "program": [
        {"what": what, "batch": batch, "context": 512, "nodes": nodes, "kernels": 627, "kernels_per_layer": 19.5}
        | {"gigabytes": gigabytes, "floor_gigabytes": 12.0, "copies": copies, "copied_megabytes": 201.4 * copies}
        | {"temporary_megabytes": 34.4, "one_graph": copies == 0}
        for what, batch, nodes, gigabytes, copies in [
            ("ar", 1, 1, 15.0, 0),
            ("ar", 8, 1, 18.0, 0),
            ("hydra++", 8, 64, 24.0, 2),
        ]
    ],
}
FIXED = {"command": "python x.py", "machine": {"device": "abacus", "cores": 2}, "settings": {"repeats": 7}}


def result(kind: str, source: str = "", **changes) -> Result:
    return Result(**{"kind": kind, "source": source, "title": f"some {kind}", "rows": ROWS[kind], **FIXED} | changes)


def write_to(path, found: Result) -> None:
    with WholeFile(path, "--output") as file:
        write_result(file, found)


def test_there_is_an_example_of_every_kind():
    assert set(ROWS) == set(KINDS)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_back_the_result(tmp_path, kind):
    written = result(kind, "hydra figure 2", remarks=["one", "two"])
    write_to(tmp_path / "r.json", written)
    assert find_results(tmp_path) == ([(tmp_path / "r.json", written)], [])


def broken(kind: str, change) -> dict:
    content = json.loads(json.dumps({"hydrajax_result": 1, **vars(result(kind))}))
    change(content)
    return content


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("speed", lambda c: c.update(hydrajax_result=2), "hydrajax_result: this version reads 1, found 2"),
        ("speed", lambda c: c.update(kind="pie"), 'kind: found "pie", known are speed, trees'),
        ("speed", lambda c: c.pop("machine"), "machine: must be of type dict, found null"),
        ("speed", lambda c: c.update(rows=[]), "rows: there are none"),
        ("speed", lambda c: c["rows"].append("x"), "rows[2]: field name is missing"),
        ("speed", lambda c: c["rows"][1].pop("batch"), "rows[1]: field batch is missing"),
        ("speed", lambda c: c["rows"][0].update(batch=1.5), "rows[0].batch: must be integer, found 1.5"),
        ("speed", lambda c: c["rows"][0].update(batch=True), "rows[0].batch: must be integer, found true"),
        ("speed", lambda c: c["rows"][0].update(equal=1), "rows[0].equal: must be true or false or null, found 1"),
        ("speed", lambda c: c["rows"][0].update(speedup=float("nan")), "rows[0].speedup: must be number, found NaN"),
        ("trees", lambda c: c["rows"][0].update(expected="2"), "rows[0].expected: must be number or null"),
        ("overhead", lambda c: c["rows"][0].update(heads=[1, None]), "rows[0].heads: must be list of numbers"),
    ],
)
def test_a_damaged_result_is_named(tmp_path, kind, change, message):
    content = broken(kind, change)
    with pytest.raises(HydrajaxError, match=r"^where: ") as caught:
        result_from(content, "where")
    assert message in str(caught.value)
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(HydrajaxError, match=r"r\.json: "):
        find_results(tmp_path)


def test_a_wrong_row_is_not_written(tmp_path):
    with pytest.raises(HydrajaxError, match=r"rows\[0\]: field name is missing"):
        write_to(tmp_path / "r.json", result("speed", rows=[{}]))
    assert not list(tmp_path.iterdir())


def test_the_machine_is_named():
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
    write(tmp_path / "b.json", {"machine": {"device": "x"}, "arguments": arguments, "rows": [row]})
    (steps, speed), others = find_results(tmp_path)
    assert others == []
    assert (steps[1].kind, steps[1].rows) == ("steps", ROWS["steps"])
    assert steps[1].settings == {"base": "some/base", "repeats": 5}
    assert [(row["name"], row["tokens_per_second"]) for row in speed[1].rows] == [
        ("chain-2", 150.0), ("autoregressive", 100.0),
    ]  # fmt: skip


def test_bench_without_prompts_gives_steps_alone(tmp_path):
    row = ROWS["steps"][0] | {"tokens_per_second": None}
    arguments = {"base": None, "random": "7b"}
    write(tmp_path / "b.json", {"machine": {}, "arguments": arguments, "rows": [row]})
    assert [(found.kind, found.title) for _, found in find_results(tmp_path)[0]] == [("steps", "a decode step of 7b")]


def test_tree_search_gives_trees(tmp_path):
    measured = [{"name": str(n), "nodes": n, "expected_tokens_per_step": 1.5, **RATE} for n in (1, 4)]
    measured.append({"name": "dynamic-4-1-3", "nodes": 4, "expected_tokens_per_step": None, **RATE})
    provenance = {"arguments": {"draft": "a/hydra", "batch_size": 2}, "machine": {}, "measured": measured}
    write(tmp_path / "tree_b2.json", {"choices": [[0]], "provenance": provenance})
    ((_, found),), _ = find_results(tmp_path)
    assert [(row["drafter"], row["batch"], row["family"], row["nodes"]) for row in found.rows] == [
        ("hydra", 2, "root", 1), ("hydra", 2, "searched", 4), ("hydra", 2, "dynamic", 4),
    ]  # fmt: skip


def test_evaluate_gives_categories_and_roofline_predictions(tmp_path):
    figures = {"questions": 3, **RATE, "equal": True, "steps": 7}
    summary = {"machine": {}, "arguments": {"set": "mt_bench"}, "results": {"hydra": {"qa": figures}}}
    write(tmp_path / "answers" / "summary.json", summary)
    cell = ROWS["prediction"][0]
    times = {
        "predicted": {"step": cell["predicted_step"], "autoregressive_step": cell["predicted_autoregressive_step"]},
        "measured": {"step": cell["step"], "autoregressive_step": cell["autoregressive_step"]},
    }
    times["predicted"] |= {name: cell[name] for name in ("batch", "context", "nodes")}
    write(tmp_path / "roofline.json", {"machine": {}, "arguments": {}, "rows": [times]})
    by_kind = {found.kind: found.rows for _, found in find_results(tmp_path)[0]}
    assert by_kind["prediction"] == [cell]
    assert by_kind["categories"] == [{"name": "hydra", "category": "qa", "questions": 3, **RATE, "equal": True}]


def test_evaluate_with_scores_gives_quality(tmp_path):
    """Of all questions, shares times 100; and categories as before where nothing could be scored."""
    figures = {"questions": 3, "mean": 0.25, "low": None, "high": 0.5, "difference": -0.01}
    figures |= {"difference_low": -0.5, "difference_high": None}
    arguments = {"set": "some/HumanEval.jsonl.gz", "rule": "typical", "epsilon": 0.1, "temperature": None}
    overall = {"questions": 3, **RATE, "equal": None}
    content = {"machine": {}, "arguments": arguments, "results": {"hydra": {"overall": overall}}}
    scores = {"metrics": {"pass@1": 100}, "results": {"hydra": {"code": {}, "overall": {"pass@1": figures}}}}
    write(tmp_path / "a" / "summary.json", content | {"scores": scores})
    write(tmp_path / "b" / "summary.json", content | {"scores": {"metrics": {}, "results": {"hydra": {}}}})
    results, _ = find_results(tmp_path)
    assert [found.kind for _, found in results] == ["categories", "quality", "categories"]
    assert results[1][1].rows == [
        {"set": "HumanEval.jsonl.gz", "metric": "pass@1", "rule": "typical, epsilon 0.1", "name": "hydra"}
        | {"questions": 3, "score": 25.0, "low": None, "high": 50.0, "difference": -1.0}
        | {"difference_low": -50.0, "difference_high": None, "tokens_per_step": 2.5, "speedup": 1.27, "equal": None}
    ]


def test_training_runs_side_by_side_are_one_result(tmp_path):
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


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"rows": 1}', '{"rows": [{}], "arguments": {}}', "[" * 100_000, '{"provenance": 3}'],
)
def test_other_files_are_left_alone(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "other.jsonl").write_text(text)
    results, others = find_results(tmp_path)
    assert results == []
    assert [path.name for path in others] == ["other.json", "other.jsonl"]


def test_no_directory(tmp_path):
    with pytest.raises(HydrajaxError, match="is not a directory"):
        find_results(tmp_path / "none")


# --- tables -----------------------------------------------------------------------------------------------------------


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("speed", ["hydra / tree", "1", "64", "2.50", "311", "190 to 210", "1.27x", "**no**"]),
        ("trees", ["hydra", "1", "searched", "T_8", "8", "2.60", "2.50", "400", "190 to 210", "1.27x"]),
        ("acceptance", ["medusa", "typical", "epsilon 0.2", "3.00", "2.000"]),
        ("overhead", ["hydra_pp", "1.2", "0.6", "1.4", "20", "18"]),
        ("categories", ["qa", "10", "1.00x (τ 2.50)", "1.90x (τ 2.50)", "yes"]),
        (
            "quality",
            [
                "gsm8k",
                "exact match",
                "greedy",
                "hydra",
                "20",
                "31.50",
                "20.00 to 40.00",
                "-1.50",
                "-3.00 to +0.50",
                "2.50",
                "1.27x",
                "yes",
            ],
        ),
        ("accuracy", ["hydra", "2", "20.0%", "60.0%"]),
        ("pareto", ["amphista", "shared", "8", "0.5", "2.20", "310", "190 to 210", "1.27x", "yes", "0.80", "1.10x"]),
        ("steps", ["chain-2", "1", "3", "2", "3", "2.5", "0.25", "0.125", "0.0625", "1.50"]),
        ("prediction", ["1", "512", "64", "3.3", "3", "+10%", "9", "10", "-10%"]),
        ("program", ["ar", "1", "512", "1", "627", "19.5", "15.00", "12.00", "1.250", "0 (0 MB)", "34", "yes"]),
        ("program", ["hydra++", "8", "512", "64", "627", "19.5", "24.00", "12.00", "2.000", "2 (403 MB)", "34", "no"]),
    ],
)
def test_tables_hold_the_rows(kind, found):
    head, rule, *cells = cells_of(section(result(kind), "p.png", "r.json"))
    assert found in cells
    assert {len(line) for line in (head, rule, *cells)} == {len(found)}


def test_only_the_fastest_of_each_family_is_in_the_table():
    cells = cells_of(section(result("trees"), "p.png", "r.json"))[2:]
    assert [line[3] for line in cells] == ["T_1", "T_8", "chain-1", "mc_sim_7b_63"]


def test_a_section_says_where_its_figures_are_from():
    text = section(result("speed", "hydra figure 2", remarks=["a remark"]), "figures/r.png", "r.json")
    for part in (
        "## Hydra figure 2: some speed",
        "(figures/r.png)",
        "- a remark",
        "- repeats 7",
        "device abacus, cores 2",
    ):
        assert part in text
    assert "`r.json`, made by `python x.py`" in text


def test_a_markdown_table():
    assert table(("a", "b"), [("x|y", "1")]) == ["| a | b |", "|---|---:|", "| x\\|y | 1 |"]


# --- pictures ---------------------------------------------------------------------------------------------------------


def points(axes) -> list[tuple[float, float]]:
    return [tuple(point) for line in axes.lines for point in line.get_xydata().tolist()]


def test_scores_stand_with_their_intervals():
    left, right = draw(result("quality")).axes
    assert (left.get_title(), left.get_xlabel(), right.get_xlabel()) == ("HumanEval", "pass@1", "exact match")
    assert [label.get_text() for label in left.get_yticklabels()] == ["greedy", "typical, epsilon 0.1"]
    assert {x for x, _ in points(left)} == {31.5, 20.0, 40.0}
    assert len({y for _, y in points(left)}) == 4  # two rules by two ways


def test_bars_have_the_rates_as_lengths():
    left, right = draw(result("speed")).axes
    assert [bar.get_width() for bar in left.patches] == [200.4, 311.0]
    assert [bar.get_width() for bar in right.patches] == [2.5, 2.5]
    assert [label.get_text() for label in left.get_yticklabels()] == ["autoregressive", "hydra | tree"]


def test_batches_are_curves_of_throughput_and_latency():
    rows = [ROWS["speed"][0] | {"batch": batch, "tokens_per_second": rate} for batch, rate in ((4, 400.0), (1, 200.0))]
    left, right = draw(result("speed", rows=rows)).axes
    assert points(left) == [(1, 200), (4, 400)]
    assert points(right) == [(1, 5), (4, 10)]  # ms for a token of each row


def test_trees_are_drawn_over_nodes_with_a_star_at_the_fastest():
    above, below = draw(result("trees")).axes
    found = points(above)
    for row in ROWS["trees"]:
        assert (row["nodes"], row["tokens_per_second"]) in found
    (star,) = (line for line in above.lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[8, 400]]
    (foretold,) = (line for line in below.lines if line.get_linestyle() == ":" and len(line.get_xdata()))
    assert foretold.get_xydata().tolist() == [[1, 1], [2, 1.6], [8, 2.6]]


def test_rules_are_curves_over_what_is_varied_and_lines_where_nothing_is():
    above, below = draw(result("acceptance")).axes
    assert [point for point in points(above) if 0 < point[0] < 1] == [(0.1, 3.5), (0.2, 3.0)]
    assert [point for point in points(below) if 0 < point[0] < 1] == [(0.1, 3.0), (0.2, 2.0)]
    assert {line.get_ydata()[0] for line in above.lines if len(set(line.get_ydata())) == 1} == {2.0}


def test_costs_are_stacked():
    (axes,) = draw(result("overhead")).axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    np.testing.assert_allclose(bars, [(0, 0), (0, 1.2), (0, 0.3), (1.2, 0.6), (0.3, 0.25), (1.8, 1.4)])
    (axes,) = draw(result("steps")).axes
    assert sum(bar.get_width() for bar in axes.patches) == 0.25 + 2.5 + 0.125 + 0.0625
    assert {x for x, _ in points(axes)} == {2.0}  # the autoregressive step


def test_categories_accuracies_and_predictions():
    (axes,) = draw(result("categories")).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 1.0, 1.9, 1.9]
    first, second = draw(result("accuracy")).axes
    np.testing.assert_allclose(points(first), [(1, 0.1), (5, 0.5)] * 2)
    np.testing.assert_allclose(points(second), [(1, 0.2), (5, 0.6)] * 2)
    (axes,) = draw(result("prediction")).axes
    assert {(10.0, 9.0), (3.0, 3.3)} <= set(points(axes))


def test_sizes_are_points_and_the_best_of_them_a_line():
    figure = draw(result("pareto"))
    fronts = [axes.lines[0].get_xydata().tolist() for axes in figure.axes]
    assert fronts[0] == [[2, 1.5], [8, 2.2], [30, 2.5]]  # medusa's full lm head is larger and worse than another
    assert fronts[1] == [[290, 2.5], [310, 2.2]]
    np.testing.assert_allclose(fronts[2], [[0.2, 0.75], [0.8, 1.1], [3, 1.25]])
    for axes, (x, y) in zip(figure.axes, [(24, 2.1), (300, 2.1), (2.4, 1.05)], strict=True):
        assert (x, y) in points(axes)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Pareto front", "medusa, full", "medusa, shared", "amphista, full", "amphista, shared"]


@pytest.mark.parametrize("less_is_better", [True, False])
def test_a_front_holds_what_nothing_beats(less_is_better):
    numbers = np.random.default_rng(0).integers(0, 6, (12, 2)).tolist()
    sign = -1 if less_is_better else 1
    expected = [
        (x, y)
        for x, y in map(tuple, numbers)
        if not any((sign * a >= sign * x and b >= y) and (a, b) != (x, y) for a, b in numbers)
    ]
    assert front([tuple(point) for point in numbers], less_is_better) == sorted(set(expected))


def test_programs_are_bars_over_the_floor():
    figure = draw(result("program"))
    (axes,) = figure.axes
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    np.testing.assert_allclose(bars, [(-0.2, 1.25), (0.2, 1.5), (1.2, 2.0)])  # hydra++ has none at batch 1
    assert {y for _, y in points(axes)} == {1.0}  # the floor
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ar", "hydra++"]
    assert axes.get_ylabel() == "bytes moved / floor"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["batch 1, context 512", "batch 8, context 512"]


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_has_all_in_the_order_of_the_papers(tmp_path):
    sources = ["", "amphista figure 1", "medusa figure 5", "hydra table 1", "hydra figures 7 to 9"]
    sources += ["amphista table 3", "hydra figure 3", "", "medusa table 3", "hydra figure 2", ""]
    (tmp_path / "sub").mkdir()
    for at, (source, kind) in enumerate(zip(sources, ROWS, strict=True)):
        write_to(tmp_path / ("sub" if at % 2 else ".") / f"r{at // 2}.json", result(kind, source))
    results, _ = find_results(tmp_path)
    written = write_report(results, tmp_path / "REPORT.md")
    text = (tmp_path / "REPORT.md").read_text()
    headings = [line[3:].rsplit(":", 1)[0] for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "Hydra figure 2", "Hydra figure 3", "Hydra figures 7 to 9", "Hydra table 1", "Medusa figure 5",
        "Medusa table 3", "Amphista figure 1", "Amphista table 3", "Some speed", "Some program", "Some pareto",
    ]  # fmt: skip
    pictures = sorted((tmp_path / "figures").iterdir())
    assert len(pictures) == len(ROWS) == len(written) - 1  # of equal names, too
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{picture.name})" in text
    before = {path: path.read_bytes() for path in written}
    write_report(results, tmp_path / "REPORT.md")
    assert before == {path: path.read_bytes() for path in written}  # the same again, to the byte


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "REPORT.md"
    path.write_text("old")
    monkeypatch.setattr("hydrajax.report.markdown.draw", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([(tmp_path / "r.json", result("speed"))], path)
    assert path.read_text() == "old"
    assert not list(tmp_path.glob(".*"))
