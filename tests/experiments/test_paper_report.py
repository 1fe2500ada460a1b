"""Pictures of every kind of result, and the report in the order of the papers."""

import numpy as np
import pytest
from common import write_result
from paper_figures import draw, front
from paper_report import TABLES, write_paper_report
from score import quality_rows

from helpers.report_examples import RATE, ROWS, result, write_to
from helpers.scripts import EXPERIMENTS
from hydrajax.bench.report.drawing import save_png
from hydrajax.bench.report.outputs import find_results
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile


def test_tables_hold_the_rows():
    for kind, row in {
        "acceptance": "medusa, typical, epsilon 0.2, 3.00, 2.000",
        "prediction": "1, 512, 64, 3.3, 3, +10%, 9, 10, -10%",
        "overhead": "hydra_pp, 1.2, 0.6, 1.4, 20, 18",
        "quality": "gsm8k, exact match, greedy, hydra, 20, 31.50, 20.00 to 40.00, -1.50, -3.00 to +0.50, 2.50, 1.27x, "
        "yes",
        "pareto": "amphista, shared, 8, 0.5, 2.20, 310, 190 to 210, 1.27x, yes, 0.80, 1.10x",
        "program": "hydra++, 8, 512, 64, 627, 19.5, 24.00, 12.00, 2.000, 2 (403 MB), 34, no",
    }.items():
        columns, cells = TABLES[kind](ROWS[kind])
        assert row in [", ".join(map(str, line)) for line in cells]
        assert {len(line) for line in (columns, *cells)} == {row.count(", ") + 1}


def test_scores_over_all_questions_give_quality():
    """Shares times 100."""
    figures = {"questions": 3, "mean": 0.25, "low": 0.0, "high": 0.5, "difference": -0.01}
    figures |= {"difference_low": None, "difference_high": None}
    arguments = {"set": "some/HumanEval.jsonl.gz", "rule": "typical", "epsilon": 0.1, "temperature": None}
    results = {"hydra": {"overall": {"questions": 3, **RATE, "equal": None}}}
    scores = {"metrics": {"pass@1": 100}, "results": {"hydra": {"code": {}, "overall": {"pass@1": figures}}}}
    assert quality_rows({"arguments": arguments, "results": results, "scores": scores}) == [
        {"set": "HumanEval.jsonl.gz", "metric": "pass@1", "rule": "typical, epsilon 0.1", "name": "hydra"}
        | {"questions": 3, "score": 25.0, "low": 0.0, "high": 50.0, "difference": -1.0}
        | {"difference_low": None, "difference_high": None, "tokens_per_step": 2.5, "speedup": 1.27, "equal": None}
    ]


# Some of the numbers that each picture shows.
SHOWN = {
    "quality": (31.5, 20.0, 40.0),
    "speed": (200.4, 311.0, 2.5),
    "overhead": (1.2, 0.3, 0.6, 0.25, 1.4, 1.8),
    "steps": (0.25, 2.5, 0.125, 0.0625, 2.0),
    "categories": (1.0, 1.9),
    "program": (1.25, 1.5, 2.0),
    "tpu_program": (2.5 / 2.1,),  # a program that does not fit has no bar
    "acceptance": (0.1, 3.5, 0.2, 3.0, 2.0),
    "accuracy": (1, 0.1, 5, 0.5, 0.2, 0.6),
    "prediction": (10.0, 9.0, 3.0, 3.3),
    "curve": (0, 1.5, 1e6, 2.5),
    "trees": (500, 300, 400, 290, 100, 1.6, 2.6),
    "pareto": (24, 2.1, 300, 2.4, 1.05),
}


def test_a_wrong_row_is_not_written(tmp_path):
    wrong = pytest.raises(HydrajaxError, match=r"rows\[0\]: field name is missing")
    with wrong, WholeFile(tmp_path / "r.json", "--output") as file:
        write_result(file, result("speed", rows=[{}]))
    assert not list(tmp_path.iterdir())


def test_pictures_show_the_rows():
    assert SHOWN.keys() == ROWS.keys()
    for kind, expected in SHOWN.items():
        figure, shown = draw(result(kind)), set()
        for axes in figure.axes:
            shown |= {round(x, 6) for line in axes.lines for x in line.get_xydata().ravel().tolist()}
            bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes.patches]
            shown |= {round(float(x), 6) for bar in bars for x in bar}
        assert shown >= {round(x, 6) for x in expected}, kind
    rows = [ROWS["speed"][0] | {"batch": batch, "tokens_per_second": rate} for batch, rate in ((4, 400.0), (1, 200.0))]
    left, right = (axes.lines[0].get_xydata().tolist() for axes in draw(result("speed", rows=rows)).axes)
    assert (left, right) == ([[1, 200], [4, 400]], [[1, 5], [4, 10]])  # over batches; ms for a token of each row
    above, _ = draw(result("trees")).axes
    (star,) = (line for line in above.lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[8, 400]]  # the fastest


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


@pytest.mark.slow
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
