"""Files of prompt and output ids."""

from __future__ import annotations

import json

from helpers.refusals import assert_refused
from hydrajax.train.data import dataset
from hydrajax.train.data.generations import read
from hydrajax.train.run_config import DataConfig


def test_lines_in_order_with_their_place(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(
        '{"prompt_ids": [1, 2], "output_ids": [3], "text": "ignored"}\n\n{"prompt_ids": [], "output_ids": []}\n'
    )
    second.write_text(json.dumps({"prompt_ids": [4], "output_ids": [5, 6]}))  # no newline at the end
    found = read([first, second])
    assert [where for where, _, _ in found] == [f"{first} line 1", f"{first} line 3", f"{second} line 1"]
    assert [ids for _, ids, _ in found] == [([1, 2], [3]), ([], []), ([4], [5, 6])]


def test_answers_of_one_conversation_are_held_out_together(tmp_path):
    path, talks = tmp_path / "a.jsonl", [0, 1, 2, 0, 2, 3, None, None, 2]
    path.write_text(
        "".join(
            json.dumps({"prompt_ids": [1], "output_ids": [10 + row]} | ({} if talk is None else {"conversation": talk}))
            + "\n"
            for row, talk in enumerate(talks)
        )
    )
    config = DataConfig(files=(str(path),), format="generations", held_out=0.5)
    seen = set()
    for seed in range(8):
        parts = dataset.parts(config, seed, lambda line: None)[:2]
        train, held_out = ([item.content.ids[1][0] - 10 for item in part] for part in parts)
        assert sorted(train + held_out) == list(range(9))
        sides = [{row in held_out for row, talk in enumerate(talks) if talk == number} for number in range(4)]
        assert all(len(side) == 1 for side in sides)
        assert len({talks[row] if talks[row] is not None else 10 + row for row in held_out}) == 3  # of 6
        seen.add((6 in held_out, 7 in held_out))
    assert len(seen) > 2  # lines without a conversation are split


def test_bad_files(tmp_path):
    path, empty = tmp_path / "a.jsonl", tmp_path / "empty"
    for line, message in (
        ('{"prompt_ids": [1], ', "is not JSON"),
        ('{"output_ids": [1]}', "field prompt_ids is missing"),
        ('{"prompt_ids": [1]}', "field output_ids is missing"),
        ('{"prompt_ids": "12", "output_ids": [1]}', "prompt_ids: got ..., expected a list of token ids"),
        ('{"prompt_ids": [1.0], "output_ids": [1]}', "prompt_ids: got "),
        ('{"prompt_ids": [true], "output_ids": [1]}', "prompt_ids: got "),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "prompt_ids: got "),
        ('{"prompt_ids": [1], "output_ids": [2147483648]}', "output_ids: got "),
    ):
        path.write_text('{"prompt_ids": [1], "output_ids": [2]}\n' + line)
        assert_refused(read, ([path], f"line 2: {message}"))
    empty.write_text("\n")
    none = tmp_path / "none"
    assert_refused(read, ([none], "data.files: no such file: ...none"), ([empty], "no generation in"))
