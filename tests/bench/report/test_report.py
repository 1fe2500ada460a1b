"""Tables of results and the Markdown report."""

from __future__ import annotations

import re

from helpers.report_examples import ROWS, result, write_to
from hydrajax.bench.report.markdown import section, write_report
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.results import Result
from hydrajax.bench.report.tables import cell, markdown_table, print_table

# --- tables -----------------------------------------------------------------------------------------------------------


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


TABLES = {
    "speed": "hydra / tree, 1, 64, 2.50, 311, 190 to 210, 1.27x, **no**",
    "trees": "hydra, 1, searched, T_8, 8, 2.60, 2.50, 400, 190 to 210, 1.27x",
    "categories": "qa, 10, 1.00x (τ 2.50), 1.90x (τ 2.50), yes",
    "quality": "gsm8k, exact match, greedy, hydra, 20, 31.50, 20.00 to 40.00, -1.50, -3.00 to +0.50, 2.50, 1.27x, yes",
    "accuracy": "hydra, 2, 20.0%, 60.0%",
    "steps": "chain-2, 1, 3, 2, 3, 2.5, 0.25, 0.125, 0.0625, 1.50",
    "prediction": "1, 512, 64, 3.3, 3, +10%, 9, 10, -10%",
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


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_has_every_result(tmp_path):
    for kind in ROWS:
        write_to(tmp_path / f"{kind}.json", result(kind))
    write_report(find_results(tmp_path)[0], tmp_path / "REPORT.md")
    headings = [line for line in (tmp_path / "REPORT.md").read_text().splitlines() if line.startswith("## ")]
    assert headings == [f"## Some {kind}" for kind in sorted(ROWS)]


def test_a_measured_time_of_zero_has_no_error(tmp_path):
    rows = [ROWS["prediction"][0] | {"step": 0.0}]
    _, _, cells = cells_of(section(result("prediction", rows=rows), "r.json"))
    assert cells[-3:] == ["9", "0", ""]


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
