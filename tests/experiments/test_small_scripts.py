"""Scripts that need no model: medusa's tables 6 to 8, draft lm heads, and mixed questions."""

from __future__ import annotations

import json
import sys
from collections import Counter

import jax.numpy as jnp
import mixed_questions as script
import pytest
from draft_lm_heads import LM_HEADS, drafter_for
from medusa_tables_6_to_8 import TABLES, main, product

from hydrajax.bench.questions.sets import read_questions
from hydrajax.bench.shapes import PRESETS
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama import Llama


def test_every_printed_intensity():
    """LLaMA-33B in float16 (hidden 6656, intermediate 17920, 52 heads of 128), 7 rows of 8 columns each."""
    for table in TABLES:
        assert len(table.printed) == 7
        for row, printed in table.printed.items():
            assert tuple(round(value, 2) for value in table.ours(row)) == printed, f"table {table.number}, row {row}"


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


MODEL = Llama(PRESETS["tiny"], jnp.dtype("float32"))


def test_heads_have_the_chosen_lm_head():
    assert drafter_for(MODEL, "hydra++", "low-rank").lm_head == LM_HEADS["low-rank"]
    assert drafter_for(MODEL, "medusa").lm_head.rank is None


def test_drafters_without_a_choice():
    for kind, title in [("eagle", "EAGLE"), ("eagle3", "EAGLE-3"), ("lookup", "Lookup")]:
        assert drafter_for(MODEL, kind).spec.supports_dynamic_tree == (kind != "lookup")
        with pytest.raises(HydrajaxError, match=f"^lm_head: got 'shared', expected full: {title} has no other"):
            drafter_for(MODEL, kind, "shared")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``run(*argv)``: the exit code of the script on a directory of two small question files."""
    categories = ("writing", "qa")
    questions = [{"question_id": at, "category": categories[at % 2], "turns": [f"Question {at}"]} for at in range(8)]
    (tmp_path / "spec_bench_question.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    lines = [
        {"task": task, "id": at, "history": [{"user": f"{task} {turn}", "bot": "."} for turn in range(turns)]}
        for at, (task, turns) in enumerate((("GR", 2), ("GR", 4), ("IC", 3)))
    ]
    (tmp_path / script.CONVERSATIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def call(*argv: str) -> int:
        monkeypatch.setattr(sys, "argv", ["mixed_questions.py", *argv])
        return script.main()

    return call


def test_categories_take_turns(run, tmp_path):
    output = tmp_path / "mixed.jsonl"
    assert run("--data", str(tmp_path), "--output", str(output), "--turns", "1", "--each", "2") == 0
    questions = read_questions(str(output))
    expected = {"writing": 1, "qa": 2, "edits of code": 2, "conversations": 2}
    assert Counter(one.category for one in questions) == expected
    assert [one.category for one in questions[:4]] == [*expected]
    edits = [one.turns[0] for one in questions if one.category == "edits of code"]
    for edit in edits:
        compile(edit.split("```python\n")[1].removesuffix("\n```"), "edit", "exec")  # a whole function
    conversations = [one.turns for one in questions if one.category == "conversations"]
    assert conversations == [("GR 0", "GR 1", "GR 2"), ("IC 0", "IC 1", "IC 2")]


def test_a_conversation_without_turns_is_named(run, tmp_path, capsys):
    (tmp_path / script.CONVERSATIONS).write_text('{"task": "GR", "history": 3}\n')
    assert run("--data", str(tmp_path), "--output", str(tmp_path / "mixed.jsonl")) == 2
    assert "mtbench101_multiturn.jsonl line 1: history" in capsys.readouterr().err
    assert not (tmp_path / "mixed.jsonl").exists()
