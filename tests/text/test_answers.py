"""Output files of generation: their lines, and atomic writing."""

import json
import os

import pytest

from helpers.outputs import read_answers
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import AnswerWriter, Generation, line_of

ANSWERS = [
    Generation([1, 5], [7, 8, 9], "tree 🌳\n\u2028é", 2, [2, 1], 3, 0.25, "stop"),
    Generation([4], [], None, 0, [], 0, 0.5),
    Generation([4], [9, 2], None, 1, [2], 2, 0.5, "length", [-0.25, -3.0e-7]),
    Generation([4], [9], None, 1, [1], 1, 0.5, "length", [-0.25], [[(9, -0.25), (3, -1.5)]]),
]


def write(path, answers=ANSWERS):
    with AnswerWriter(path) as writer:
        for answer in answers:
            writer.write(answer)


def test_the_fields_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, ANSWERS[:1])
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert json.loads(text) == {
        "prompt_ids": [1, 5], "output_ids": [7, 8, 9], "text": "tree 🌳\n\u2028é", "steps": 2,
        "accept_lengths": [2, 1], "new_tokens": 3, "wall_time": 0.25, "finish_reason": "stop",
    }  # fmt: skip
    assert "🌳" in text
    assert json.loads(json.dumps(line_of(ANSWERS[2])))["logprobs"] == [-0.25, -3.0e-7]


def test_lines_are_on_disk_as_they_come_but_not_under_the_final_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    with AnswerWriter(path) as writer:
        writer.write(ANSWERS[0])
        (partial,) = (p for p in tmp_path.iterdir() if p != path)
        assert partial.name.startswith(".a.jsonl.")
        assert read_answers(partial) == ANSWERS[:1]
        assert path.read_text() == "old"
        writer.write(ANSWERS[1])
    assert read_answers(path) == ANSWERS[:2]


def test_an_error_leaves_no_file(tmp_path, monkeypatch):
    def fail(error):
        with AnswerWriter(tmp_path / "a.jsonl") as writer:
            writer.write(ANSWERS[0])
            raise error

    for error in (KeyboardInterrupt, RuntimeError, HydrajaxError, SystemExit):
        with pytest.raises(error):
            fail(error)
        assert list(tmp_path.iterdir()) == []

    def full(*_):
        raise OSError(28, "No space left on device")

    def fill():
        with AnswerWriter(tmp_path / "a.jsonl") as writer:
            monkeypatch.setattr(writer._file, "flush", full)
            writer.write(ANSWERS[0])

    with pytest.raises(HydrajaxError, match=r"^output: cannot write .*a\.jsonl: No space left on device$"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_where_it_is_written(tmp_path, monkeypatch):
    """A link keeps pointing to its file, a new file has the usual permissions, a bare name is in this directory."""
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert read_answers(target) == ANSWERS
    monkeypatch.chdir(tmp_path)
    write("a.jsonl")
    assert read_answers("a.jsonl") == ANSWERS
    (tmp_path / "b").touch()
    assert (tmp_path / "a.jsonl").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_paths_that_cannot_be_written(tmp_path):
    for path, pattern in [
        (tmp_path, "is a directory, expected a file"),
        (tmp_path / "none" / "a.jsonl", "no such directory"),
        (os.devnull, "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot write .*: File name too long"),
    ]:
        with pytest.raises(HydrajaxError, match=f"^--results: .*{pattern}"):
            AnswerWriter(path, "--results")
    assert list(tmp_path.iterdir()) == []
