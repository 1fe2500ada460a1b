"""Data settings to sequences, with files in a folder and a byte-level tokenizer; files of prompt and output ids."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.refusals import assert_refused
from hydrajax.train.data import dataset
from hydrajax.train.data.corpus import train_tokenizer
from hydrajax.train.data.dataset import read_generations
from hydrajax.train.losses import IGNORED
from hydrajax.train.run_config import DataConfig


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer([path.read_text() for path in sorted(texts.iterdir())], 290)


def build(config: DataConfig, tokenizer, seed: int = 0):
    """``(dataset, logged lines)``."""
    logged = []
    return dataset.build(config, tokenizer, seed, logged.append), logged


def settings(texts, **changes) -> DataConfig:
    return DataConfig(**({"files": (str(texts),), "format": "text", "rows": "stream", "length": 32} | changes))


def decoded(tokenizer, rows) -> str:
    return tokenizer.decode(rows.tokens.ravel())


def test_stream_holds_the_text_and_the_held_out_files_are_not_in_it(texts, tokenizer):
    found, logged = build(settings(texts, held_out=0.4), tokenizer)
    assert len(found.held_out_names) == 2
    files = {str(path): path.read_text() for path in sorted(texts.iterdir())}
    assert set(found.held_out_names) < set(files)
    for name, text in files.items():
        in_held_out = name in found.held_out_names
        beginning = text[:300]
        assert (beginning in decoded(tokenizer, found.held_out)) == in_held_out
        assert (beginning in decoded(tokenizer, found.train)) != in_held_out
    np.testing.assert_array_equal(found.train.labels, found.train.tokens)  # every token of a text is a target
    held = [files[name] for name in found.held_out_names]
    n_bytes, n_tokens = sum(len(t.encode()) for t in held), sum(len(tokenizer(t)["input_ids"]) for t in held)
    assert found.bytes_per_token == pytest.approx(n_bytes / n_tokens)
    assert logged[-1].startswith("data: 4 documents (")
    assert logged[-1].endswith("2 held out")
    everything, _ = build(settings(texts, held_out=0.0), tokenizer)
    assert (everything.held_out, everything.bytes_per_token) == (None, None)
    few, logged = build(settings(texts, limit=3, held_out=0.0), tokenizer)
    assert logged[-1].startswith("data: 3 documents")
    assert len(few.train.tokens) < len(everything.train.tokens)


def test_of_a_single_text_the_end_is_held_out(texts, tokenizer, tmp_path):
    text = max((path.read_text() for path in texts.iterdir()), key=len).replace("branch. ", "branch.\n")
    (tmp_path / "mine.txt").write_text(text)
    found, logged = build(settings(tmp_path / "mine.txt", held_out=0.25), tokenizer)
    assert found.held_out_names == [f"the end of {tmp_path / 'mine.txt'}"]
    first, last = decoded(tokenizer, found.train), decoded(tokenizer, found.held_out)
    cut = len(text) - len(text) // 4
    assert text.startswith(first[: cut // 2])
    beginning = text.index(last[:200])
    assert 0.7 * len(text) < beginning <= cut
    assert text[beginning - 1] == "\n"
    assert last[:200] not in first
    assert logged[-1].endswith("1 held out")
    assert build(settings(tmp_path / "mine.txt", held_out=0.0), tokenizer)[0].held_out is None


def test_a_new_tokenizer_has_never_seen_the_held_out_text(tmp_path):
    words = {f"{name}.txt": f"secret{name}" for name in "abcd"}  # letters only: a token never spans letters and digits
    for i, (name, word) in enumerate(words.items()):
        (tmp_path / name).write_text(f"{'ab' if i % 2 else 'ba'} mostly " + f"{word} " * 60)
    found, _ = build(settings(tmp_path, held_out=0.25, new_tokenizer=300), None)
    (held_out,) = found.held_out_names
    # Tokens are checked one by one: joined in arbitrary order, they could spell a word by chance.
    targets = {name for name, word in words.items() if any(word in token for token in found.tokenizer.get_vocab())}
    assert targets == set(words) - {Path(held_out).name}
    assert len(found.tokenizer) <= 300


def test_generations_train_on_what_the_base_wrote(tmp_path, tokenizer):
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"prompt_ids": [5, 6], "output_ids": [7, 8, 9]}))
    config = DataConfig(files=(str(path),), format="generations", length=8, held_out=0.0)
    rows = build(config, tokenizer)[0].train
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert rows.labels.tolist() == [[IGNORED, IGNORED, 7, 8, 9, IGNORED, IGNORED, IGNORED]]
    config = DataConfig(files=(str(path),), format="generations", length=8, held_out=0.0, targets="all")
    assert build(config, tokenizer)[0].train.labels[0].tolist() == [5, 6, 7, 8, 9, *[IGNORED] * 3]
    path.write_text(json.dumps({"prompt_ids": [5], "output_ids": [len(tokenizer)]}))
    message = "g.jsonl line 1: has a token id outside the tokenizer's vocabulary"
    assert_refused(build, (config, tokenizer, message))


def test_refused(texts, tokenizer, tmp_path):
    class Endless:
        eos_token_id = None

        def __call__(self, texts):
            return tokenizer(texts)

    (tmp_path / "empty.txt").write_text(" \n")
    assert_refused(
        build,
        (settings(texts, length=100_000), tokenizer, "data.length: got 100000, expected at most"),
        (settings(texts, files=("no/such/folder",)), tokenizer, "no/such/folder"),
        (settings(texts, limit=1, held_out=0.001), tokenizer, "data.held_out: too little to evaluate on"),
        (settings(tmp_path), tokenizer, "data.files: found no text"),
        (settings(texts), Endless(), "data.rows: stream needs a tokenizer with an end-of-text token"),
    )


def test_lines_in_order_with_their_place(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole = '{"prompt_ids": [1, 2], "output_ids": [3], "text": "ignored"}'
    first.write_text(whole + '\n\n{"prompt_ids": [], "output_ids": []}\n')
    second.write_text(json.dumps({"prompt_ids": [4], "output_ids": [5, 6]}))  # no newline at the end
    found = read_generations([first, second])
    assert [where for where, _, _ in found] == [f"{first} line 1", f"{first} line 3", f"{second} line 1"]
    assert [ids for _, ids, _ in found] == [([1, 2], [3]), ([], []), ([4], [5, 6])]


def test_answers_of_one_conversation_are_held_out_together(tmp_path):
    path, talks = tmp_path / "a.jsonl", [0, 1, 2, 0, 2, 3, None, None, 2]
    records = [{"prompt_ids": [1], "output_ids": [10 + row], "conversation": talk} for row, talk in enumerate(talks)]
    lines = [json.dumps({name: value for name, value in record.items() if value is not None}) for record in records]
    path.write_text("\n".join(lines))
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
        assert_refused(read_generations, ([path], f"line 2: {message}"))
    empty.write_text("\n")
    none = tmp_path / "none"
    assert_refused(read_generations, ([none], "data.files: no such file: ...none"), ([empty], "no generation in"))
