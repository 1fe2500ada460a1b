"""Seeds: where beginnings are cut, which files are read as what, and which seed is written at which temperature."""

import json
from collections import Counter

import numpy as np

from helpers.refusals import assert_refused
from hydrajax.train.data.packing import all_targets
from hydrajax.train.distill.seeds import cut, read_seeds, temperature_of

NAMES = ["short", "long", "exact", "nearly"]


def documents():
    """Ids that say where they come from: document * 1000 + place."""
    return [all_targets(np.arange(length) + 1000 * i) for i, length in enumerate((5, 30, 12, 11))]


def test_beginnings_are_stretches_of_long_enough_documents():
    seeds, _, conversations = cut(NAMES, documents(), 300, 12, seed=0)
    prompts = np.stack([seed.ids for seed in seeds])
    assert not conversations
    assert (prompts.shape, prompts.dtype) == ((300, 12), np.int32)
    assert (np.diff(prompts, axis=1) == 1).all()
    # 20 places, of which 19 in document 1: every place is as likely as another, the last one included.
    assert set(prompts[:, 0].tolist()) == {*range(1000, 1019), 2000}
    assert 1 <= (prompts[:, 0] == 2000).sum() <= 40
    for seed in seeds:
        assert (seed.source, seed.index) == (NAMES[seed.ids[0] // 1000], seed.ids[0] % 1000)
    few, again, many, other = (
        [(seed.source, seed.index) for seed in cut(NAMES, documents(), n, 12, seed).seeds]
        for n, seed in ((5, 1), (5, 1), (20, 1), (20, 2))
    )
    assert few == again == many[:5]  # it depends on the seed and its number alone
    assert many != other
    assert_refused(cut, (NAMES, documents(), 3, 31, 0, "prompt_tokens: got 31, longer than every document"))


def test_temperatures_are_shared_out_evenly_and_not_in_turn():
    given = [0, 0.7, 1]
    found = [temperature_of(number, given, seed=3) for number in range(300)]
    assert Counter(found) == {0: 100, 0.7: 100, 1: 100}
    assert all(sorted(found[start : start + 3]) == given for start in range(0, 300, 3))
    assert len({tuple(found[start : start + 3]) for start in range(0, 300, 3)}) == 6
    assert found != [temperature_of(number, given, seed=4) for number in range(300)]


SHAREGPT = {
    "conversations": [{"from": who, "value": text} for who, text in (("human", "a"), ("gpt", "x"), ("human", "b"))]
}
MESSAGES = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]}
ALPACA = {"instruction": "d", "input": "e", "output": "x"}


def test_of_a_conversation_only_what_the_user_says_is_kept(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (SHAREGPT, {"no": "record"}, MESSAGES, ALPACA)))
    found, bad = read_seeds(str(path))
    assert [(seed.turns, seed.system, seed.index) for seed in found.seeds] == [
        (("a", "b"), None, 1),
        (("c",), "s", 3),
        (("d\n\ne",), None, 4),
    ]
    assert {seed.source for seed in found.seeds} == {"talks.jsonl"}
    assert [where for where, _ in bad] == [f"{path} line 2"]
    assert found.conversations


def test_questions(tmp_path):
    asked = tmp_path / "mt_bench_question.jsonl"
    asked.write_text('{"question_id": 81, "category": "x", "turns": ["a", "b"]}\n')
    by_name, by_path = (read_seeds(*names)[0] for names in (("mt_bench", str(tmp_path)), (str(asked),)))
    assert by_name == by_path
    assert by_name.seeds[0][:2] == ("mt_bench_question.jsonl", 81)
    assert by_name.seeds[0].turns == ("a", "b")
    unanswered = tmp_path / "unanswered.json"
    unanswered.write_text('[{"instruction": "d", "input": "e"}]')
    assert read_seeds(str(unanswered))[0].seeds[0].turns == ("d\n\ne",)


def test_refused_files(tmp_path):
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"text": "a"}\n')
    assert_refused(
        read_seeds,
        ("none.jsonl", "seeds: got none.jsonl, expected a file, org/name or one of mt_bench, "),
        (str(strange), "strange.jsonl line 1: got the fields text, expected one of turns"),
    )
