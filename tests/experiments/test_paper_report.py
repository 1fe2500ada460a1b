"""Pictures of every kind of result, and the report in the order of the papers."""

from __future__ import annotations

import numpy as np
import pytest
from paper_figures import draw, front
from paper_report import TABLES, write_paper_report

from helpers.report_examples import ROWS, result, write_to
from helpers.scripts import EXPERIMENTS
from hydrajax.bench.report.drawing import save_png
from hydrajax.bench.report.outputs import find_results


def test_tables_hold_the_rows():
    for kind, row in {
        "acceptance": "medusa, typical, epsilon 0.2, 3.00, 2.000",
        "overhead": "hydra_pp, 1.2, 0.6, 1.4, 20, 18",
        "pareto": "amphista, shared, 8, 0.5, 2.20, 310, 190 to 210, 1.27x, yes, 0.80, 1.10x",
        "program": "hydra++, 8, 512, 64, 627, 19.5, 24.00, 12.00, 2.000, 2 (403 MB), 34, no",
    }.items():
        columns, cells = TABLES[kind](ROWS[kind])
        assert row in [", ".join(map(str, line)) for line in cells]
        assert {len(line) for line in (columns, *cells)} == {row.count(", ") + 1}


# --- pictures ---------------------------------------------------------------------------------------------------------


def points(axes) -> list[tuple[float, float]]:
    return [tuple(point) for line in axes.lines for point in line.get_xydata().tolist()]


def labels(axis_labels) -> list[str]:
    return [label.get_text() for label in axis_labels]


def test_scores_have_intervals():
    left, right = draw(result("quality")).axes
    assert (left.get_title(), left.get_xlabel(), right.get_xlabel()) == ("HumanEval", "pass@1", "exact match")
    assert labels(left.get_yticklabels()) == ["greedy", "typical, epsilon 0.1"]
    assert {x for x, _ in points(left)} == {31.5, 20.0, 40.0}


def test_bars():
    left, right = draw(result("speed")).axes
    assert [bar.get_width() for bar in left.patches] == [200.4, 311.0]
    assert [bar.get_width() for bar in right.patches] == [2.5, 2.5]
    assert labels(left.get_yticklabels()) == ["autoregressive", "hydra | tree"]
    (axes,) = draw(result("overhead")).axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    np.testing.assert_allclose(bars, [(0, 0), (0, 1.2), (0, 0.3), (1.2, 0.6), (0.3, 0.25), (1.8, 1.4)])  # stacked
    (axes,) = draw(result("steps")).axes
    assert sum(bar.get_width() for bar in axes.patches) == 0.25 + 2.5 + 0.125 + 0.0625
    assert {x for x, _ in points(axes)} == {2.0}  # the autoregressive step
    (axes,) = draw(result("categories")).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 1.0, 1.9, 1.9]
    figure = draw(result("program"))
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in figure.axes[0].patches]
    np.testing.assert_allclose(bars, [(-0.2, 1.25), (0.2, 1.5), (1.2, 2.0)])  # hydra++ has none at batch 1
    assert labels(figure.legends[0].get_texts()) == ["batch 1, context 512", "batch 8, context 512"]
    (bar,) = draw(result("tpu_program")).axes[0].patches  # a program that does not fit has no bar
    assert bar.get_height() == pytest.approx(2.5 / 2.1)


def test_curves():
    rows = [ROWS["speed"][0] | {"batch": batch, "tokens_per_second": rate} for batch, rate in ((4, 400.0), (1, 200.0))]
    left, right = draw(result("speed", rows=rows)).axes
    assert points(left) == [(1, 200), (4, 400)]
    assert points(right) == [(1, 5), (4, 10)]  # ms for a token of each row
    above, below = draw(result("acceptance")).axes
    assert [point for point in points(above) if 0 < point[0] < 1] == [(0.1, 3.5), (0.2, 3.0)]
    assert [point for point in points(below) if 0 < point[0] < 1] == [(0.1, 3.0), (0.2, 2.0)]
    assert {line.get_ydata()[0] for line in above.lines if len(set(line.get_ydata())) == 1} == {2.0}  # constant rules
    for axes, shares in zip(draw(result("accuracy")).axes, ([(1, 0.1), (5, 0.5)], [(1, 0.2), (5, 0.6)]), strict=True):
        np.testing.assert_allclose(points(axes), shares * 2)
    (axes,) = draw(result("prediction")).axes
    assert {(10.0, 9.0), (3.0, 3.3)} <= set(points(axes))
    (axes,) = draw(result("curve")).axes
    assert (points(axes), axes.get_xlabel()) == ([(0, 1.5), (1e6, 2.5)] * 2, "training tokens")


def test_trees_are_drawn_over_nodes_with_a_star_at_the_fastest():
    above, below = draw(result("trees")).axes
    assert {(row["nodes"], row["tokens_per_second"]) for row in ROWS["trees"]} <= set(points(above))
    (star,) = (line for line in above.lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[8, 400]]
    (predicted,) = (line for line in below.lines if line.get_linestyle() == ":" and len(line.get_xdata()))
    assert predicted.get_xydata().tolist() == [[1, 1], [2, 1.6], [8, 2.6]]


def test_sizes_are_points_with_a_pareto_front():
    figure = draw(result("pareto"))
    fronts = [axes.lines[0].get_xydata().tolist() for axes in figure.axes]
    assert fronts[0] == [[2, 1.5], [8, 2.2], [30, 2.5]]  # medusa's full lm head is larger and worse than another
    assert fronts[1] == [[290, 2.5], [310, 2.2]]
    np.testing.assert_allclose(fronts[2], [[0.2, 0.75], [0.8, 1.1], [3, 1.25]])
    for axes, (x, y) in zip(figure.axes, [(24, 2.1), (300, 2.1), (2.4, 1.05)], strict=True):
        assert (x, y) in points(axes)
    names = ["Pareto front", "medusa, full", "medusa, shared", "amphista, full", "amphista, shared"]
    assert labels(figure.legends[0].get_texts()) == names


def test_the_front_is_pareto_optimal():
    for less_is_better in [True, False]:
        numbers = np.random.default_rng(0).integers(0, 6, (12, 2)).tolist()
        sign = -1 if less_is_better else 1
        expected = [
            (x, y)
            for x, y in map(tuple, numbers)
            if not any((sign * a >= sign * x and b >= y) and (a, b) != (x, y) for a, b in numbers)
        ]
        assert front([tuple(point) for point in numbers], less_is_better) == sorted(set(expected))


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_has_all_in_the_order_of_the_papers(tmp_path):
    sources = ["", "amphista figure 1", "medusa figure 5", "hydra table 1", "hydra figures 7 to 9"]
    sources += ["amphista table 3", "hydra figure 3", "", "", "medusa table 3", "hydra figure 2", "", ""]
    (tmp_path / "sub").mkdir()
    for at, (source, kind) in enumerate(zip(sources, ROWS, strict=True)):
        write_to(tmp_path / ("sub" if at % 2 else ".") / f"r{at // 2}.json", result(kind, source))
    results, _ = find_results(tmp_path)
    written = write_paper_report(results, tmp_path / "REPORT.md")
    text = (tmp_path / "REPORT.md").read_text()
    headings = [line[3:].rsplit(":", 1)[0] for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "Hydra figure 2", "Hydra figure 3", "Hydra figures 7 to 9", "Hydra table 1", "Medusa figure 5",
        "Medusa table 3", "Amphista figure 1", "Amphista table 3", "Some speed", "Some pareto",
        "Some tpu_program", "Some curve", "Some program",
    ]  # fmt: skip
    pictures = sorted((tmp_path / "figures").iterdir())
    assert len(pictures) == len(ROWS) == len(written) - 1  # of equal names, too
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{picture.name})" in text
    # The same again, to the byte.
    contents = {picture.read_bytes() for picture in pictures}
    for _, one in results[:3]:
        save_png(draw(one), tmp_path / "again.png", "output")
        assert (tmp_path / "again.png").read_bytes() in contents
    write_paper_report(results, tmp_path / "REPORT.md", pictures=False)
    assert (tmp_path / "REPORT.md").read_text() == text


def test_the_committed_report_matches_the_committed_results(tmp_path):
    """Text only: pictures may differ with the version of matplotlib."""
    results, _ = find_results(EXPERIMENTS / "results")
    write_paper_report(results, tmp_path / "REPORT.md", pictures=False)
    assert (tmp_path / "REPORT.md").read_text() == (EXPERIMENTS / "results" / "REPORT.md").read_text()
