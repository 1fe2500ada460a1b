"""Question sets: the released formats, whole sets where they are at hand, and what is refused."""

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from helpers.refusals import assert_refused
from hydrajax.bench.questions.sets import FILES, NOT_FETCHED, Question, read_questions, select
from hydrajax.bench.questions.summary import acceptance_lengths


@pytest.fixture(scope="module")
def released() -> Path:
    """The folder of released question files: ``$HYDRAJAX_PROMPTS`` or ``../shared/prompts``."""
    project = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("HYDRAJAX_PROMPTS") or project.parent / "shared" / "prompts")
    if not (folder / FILES["mt_bench"]).is_file():
        pytest.skip(f"no question files in {folder}; set HYDRAJAX_PROMPTS")
    return folder


RELEASED = {
    "mt_bench": (80, {2: 80}, (81, "writing")),
    "spec_bench": (480, {2: 80, 1: 400}, (81, "writing")),
    "alpaca": (805, {1: 805}, (1, "alpaca")),
    "humaneval": (164, {1: 164}, ("HumanEval/0", "humaneval")),
    "gsm8k": (1319, {1: 1319}, (1, "gsm8k")),
}


def test_released_files(released):
    """Spec-Bench has thirteen categories and holds MT-bench."""
    for name, (count, turns, first) in RELEASED.items():
        questions = read_questions(name, released)
        assert len({question.question_id for question in questions}) == len(questions) == count
        assert Counter(len(question.turns) for question in questions) == turns
        assert (questions[0].question_id, questions[0].category) == first
    questions = read_questions("spec_bench", released)
    sizes = Counter(question.category for question in questions)
    assert sorted(sizes.values()) == [10] * 8 + [80] * 5
    assert set(read_questions("mt_bench", released)) <= set(questions)


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_every_field_that_holds_text(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"question_id": 7, "category": "a", "turns": ["one", "two"], "reference": ["x"]},
        {"question": "how?", "answer": "so"},
        {"instruction": "do", "input": "this"},
        {"instruction": "do", "input": ""},
        {"task_id": "T/5", "prompt": "def f():\n"},
        {"prompt_id": 9, "prompt": ["one", "two"]},
        {"id": "ab1", "article": "Rain fell. {x}\n", "highlights": "It rained."},
        {"document": "Snow.", "prompt": "What fell?"},
    )
    asked = "Summarise this article in a few sentences.\n\nRain fell. {x}\n\nSummary:"
    assert read_questions(str(path)) == [
        Question(7, "a", ("one", "two")), Question(2, "mine", ("how?",)), Question(3, "mine", ("do\n\nthis",)),
        Question(4, "mine", ("do",)), Question("T/5", "mine", ("def f():\n",)), Question(9, "mine", ("one", "two")),
        Question("ab1", "mine", (asked,)), Question(8, "mine", ("What fell?",)),
    ]  # fmt: skip
    assert [question.record.get("highlights") for question in read_questions(str(path))[-2:]] == ["It rained.", None]


def test_other_containers(tmp_path):
    records = [{"instruction": "first"}, {"instruction": "zweite ß"}]
    for name in ("mine.json", "mine.json.gz", "mine.jsonl.gz"):
        text = json.dumps(records) if ".jsonl" not in name else "\n\n".join(map(json.dumps, records))
        content = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
        expected = [Question(1, "mine", ("first",)), Question(2, "mine", ("zweite ß",))]
        assert read_questions(str(tmp_path / name)) == expected


SPEED = [  # made up, in the form of nvidia/SPEED-Bench
    {"question_id": f"{number:032}", "category": category, "sub_category": "a", "source": "b", "src_id": "c"}
    | {"difficulty": "", "multiturn": len(turns) > 1, "turns": turns}
    for number, (category, turns) in enumerate([("qa", ["one", "two"]), ("coding", ["def f():"]), ("qa", ["three"])])
]


def test_speed_bench_in_the_forms_that_its_scripts_write(tmp_path):
    parquet.write_table(pa.Table.from_pylist(SPEED), tmp_path / "test.parquet")
    said = [[{"role": "user", "content": turn} for turn in record["turns"]] for record in SPEED]
    bare = [{name: value for name, value in record.items() if name != "turns"} for record in SPEED]
    lines = write(tmp_path / "a.jsonl", *(one | {"messages": own} for one, own in zip(bare, said, strict=True)))
    wanted = [Question(record["question_id"], record["category"], tuple(record["turns"])) for record in SPEED]
    for name in (f"speed-bench:{tmp_path / 'test.parquet'}", f"speed-bench:{lines}", str(lines)):
        assert read_questions(name) == wanted
    placeholder = {"turns": [f"{NOT_FETCHED} USING SPECDEC_BENCH\n\nTranslate: {{question}}"]}
    parquet.write_table(pa.Table.from_pylist([SPEED[0] | placeholder]), tmp_path / "raw.parquet")
    message = "raw.parquet row 1: turns: got a placeholder; SPEED-Bench's scripts fetch its text (docs/usage.md)"
    assert_refused(read_questions, (f"speed-bench:{tmp_path / 'raw.parquet'}", message))
    assert_refused(read_questions, (f"speed-bench:{tmp_path / 'no.parquet'}", "set: no such file: "))


def test_acceptance_lengths_are_means_of_questions_and_of_categories():
    steps = {SPEED[0]["question_id"]: [3, 1, 2], SPEED[1]["question_id"]: [4], SPEED[2]["question_id"]: [1, 1, 1, 5]}
    answers = {"a": {id_: {"choices": [{"accept_lengths": lengths}]} for id_, lengths in steps.items()}}
    questions = [Question(record["question_id"], record["category"], ("x",)) for record in SPEED]
    assert acceptance_lengths(answers, questions) == (["Model", "coding", "qa", "Overall"], [["a", 4, 2, 3]])
    assert acceptance_lengths(answers, questions[:1]) == (["Model", "qa", "Overall"], [["a", 2, 2]])


def test_refused_records(tmp_path):
    path = tmp_path / "bad.jsonl"
    for record, message in (
        ({"text": "x"}, "got the fields text, expected one of turns, messages, question, instruction, prompt"),
        ({}, "got the fields none, expected"),
        ({"turns": []}, "turns: got [], expected text or a list of texts, none empty"),
        ({"turns": ["a", " "]}, 'turns: got ["a", " "], expected text or a list'),
        ({"turns": ["a", 3]}, 'turns: got ["a", 3], expected text or a list'),
        ({"prompt": ""}, 'prompt: got "", expected text'),
        ({"messages": "a"}, 'messages: got "a", expected a user\'s messages, none empty'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: got ..., expected a user's messages"),
        ({"prompt": "x", "question_id": 1.5}, "question_id: got 1.5, expected an integer or text"),
        ({"prompt": "x", "question_id": True}, "question_id: got true, expected an integer"),
        ({"prompt": "x", "question_id": 1}, "question_id: 1 occurs twice"),
        ({"prompt": "x", "category": 4}, "category: got 4, expected text"),
    ):
        write(path, {"question_id": 1, "prompt": "fine"}, record)
        assert_refused(read_questions, (str(path), f"line 2: {message}"))


def test_refused_files(tmp_path):
    for name, content, message in (
        ("a.json", b'{"prompt": "x"}', "a.json: got ..., expected a list of objects"),
        ("a.json", b"[3]", "a.json item 1: got 3, expected a JSON object"),
        ("a.json", b"[", "a.json: is not JSON"),
        ("a.json", b"\xff", "a.json: is not UTF-8 text"),
        ("a.jsonl", b"[", "a.jsonl line 1: is not JSON"),
        ("a.parquet", b"[", "set: cannot read ...a.parquet: "),
        ("a.jsonl", b"\n", "has no questions"),
        ("a.jsonl.gz", b"plain", "cannot read ...a.jsonl.gz: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"abc" * 99, mtime=0)[:-9], "cannot read ...a.jsonl.gz: "),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n{', mtime=0), "a.jsonl.gz line 2: is not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        assert_refused(read_questions, (str(tmp_path / name), message))


def test_refused_names(tmp_path):
    assert_refused(
        read_questions,
        ("mt_bench", "data: the set mt_bench needs the directory of mt_bench_"),
        ("mt_bench", tmp_path / "none", "data: no such directory"),
        *((name, tmp_path, f"set: no such file: ...{FILES[name]}") for name in FILES),
        ("none.jsonl", "set: no such file: none.jsonl"),
        ("mtbench", "set: got 'mtbench', expected mt_bench, ...FILE.jsonl and org/name"),
    )


def test_hub_datasets(monkeypatch):
    asked, test = [], [{"question": "how?"}]

    def load_dataset(name, config=None):
        asked.append((name, config))
        if config == "gone":
            raise ValueError("no such\nconfiguration")
        return {"train": [{"question": "not this"}], "test": test} if config else {"train": test, "validation": []}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_questions("org/name:main") == [Question(1, "org/name", ("how?",))]
    assert read_questions("org/name::train") == [Question(1, "org/name", ("how?",))]
    assert asked == [("org/name", "main"), ("org/name", None)]
    assert_refused(
        read_questions,
        ("org/name", "org/name: got split None, expected one of train, validation; add :config"),
        ("org/name:main:dev", "got split dev, expected one of train, test"),
        ("org/name:gone", "no such file: ...; loading it from the Hub failed: no such configuration"),
    )
    test[0] = {"answer": 3}
    assert_refused(read_questions, ("org/name:main", "org/name row 1: got the fields answer, expected one of"))


def test_select():
    questions = [Question(n, "ab"[n % 2], ("x",)) for n in range(6)]
    assert [q.question_id for q in select(questions)] == [0, 1, 2, 3, 4, 5]
    assert [q.question_id for q in select(questions, ["b"], 2)] == [1, 3]
    assert [q.question_id for q in select(questions, per_category=1)] == [0, 1]
    assert [q.question_id for q in select(questions, ["a"], 3, per_category=2)] == [0, 2]
    assert_refused(select, (questions, ["a", "c"], "categories: got 'c', expected a, b"))
