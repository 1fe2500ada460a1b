"""Operational intensities against medusa's printed tables 6 to 8."""

from __future__ import annotations

from medusa_tables_6_to_8 import CANDIDATES, TABLES, main, product


def test_every_printed_intensity():
    """LLaMA-33B in float16 (hidden 6656, intermediate 17920, 52 heads of 128), 7 rows of 8 columns each."""
    for table in TABLES:
        assert len(table.printed) == 7
        for row, printed in table.printed.items():
            assert tuple(round(value, 2) for value in table.ours(row)) == printed, f"table {table.number}, row {row}"


def test_printed_cells_against_closed_forms():
    """Cells read from the paper a second time, and computed from table 5 with its own letters."""
    for number, row, candidates, printed in [
        (6, 128, 112, 40.73),  # the cell with the largest share of queries among what is moved
        (6, 1024, 64, 40.96),  # in the text: 41 times the intensity of one token
        (7, 64, 48, 33.76),
        (8, 8, 1, 7.99),  # not 8: activations count
        (8, 64, 112, 2893.91),
    ]:
        table = TABLES[number - 6]
        assert table.printed[row][CANDIDATES.index(candidates)] == printed
        h, i, n, d, q = 6656, 17_920, 52, 128, candidates
        if number == 8:
            b = row
            intensity = 2 * b * q * h * i / (2 * (b * q * (h + i) + h * i))
        else:
            b, s = (16, row) if number == 6 else (row, 1024)
            intensity = 2 * b * s * q * n * d / (2 * (b * s * q * n + b * (s + q) * n * d))
        assert round(intensity, 2) == printed


def test_table_5_is_one_formula_for_all_phases():
    """Prefill is q = s, decoding q = 1: qkv 2bsh + h², QKᵀ 2bsnd + bs²n and bsn + bsnd + bnd."""
    b, s, h, n, d = 3, 40, 512, 8, 64
    assert product("rd,df->rf", (b * s, h), (h, h)).bytes == 2 * (2 * b * s * h + h * h)
    for q in (1, s):
        scores = product("bnqd,bnsd->bnqs", (b, n, q, d), (b, n, s, d))
        assert scores.bytes == 2 * (b * (q + s) * n * d + b * q * s * n)
        assert (scores.flops, scores.rows) == (2 * b * s * q * n * d, q)


def test_the_script_prints_every_cell(capsys):
    assert main() == 0
    out = capsys.readouterr().out
    assert "168 of 168 equal" in out
    assert "2893.91" in out
    assert "…" not in out
