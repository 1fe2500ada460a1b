"""Reading conversations and texts in every format, and the records that are left out."""

import gzip
import json
import sys
import types

import pytest

from helpers.refusals import assert_refused
from hydrajax.train.data.conversations import (
    BadRecord,
    Conversation,
    DialogueTurn,
    holds_conversations,
    read_conversations,
    read_dataset,
    read_texts,
    summary,
)

ASKED = (DialogueTurn("user", "q"), DialogueTurn("assistant", "a"))

SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "input": "", "output": "a"}
MESSAGES = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def write(path, *records, **settings):
    """Write JSONL or a JSON list, depending on the suffix. Records that are text are written unchanged in JSONL."""
    if path.name.endswith(".jsonl"):
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    else:
        path.write_text(json.dumps(records, **settings), encoding="utf-8")
    return path


def messages_of(tmp_path, record):
    (conversation,), bad = read_conversations(write(tmp_path / "one.jsonl", record))
    assert bad == []
    return conversation.messages


def test_a_json_list_and_lines(tmp_path):
    for indent in (None, 2):
        path = write(tmp_path / "c.json", SHAREGPT, ALPACA, MESSAGES, MESSAGES["messages"], indent=indent)
        assert read_conversations(path) == ([Conversation(ASKED, f"{path} record {n}") for n in (1, 2, 3, 4)], [])
    path = write(tmp_path / "c.jsonl", SHAREGPT, "", "  \r", ALPACA, MESSAGES, MESSAGES["messages"])
    assert read_conversations(str(path)) == ([Conversation(ASKED, f"{path} line {n}") for n in (1, 4, 5, 6)], [])
    path = tmp_path / "one.json"  # a file that is one conversation
    for indent in (None, 1):
        path.write_text(json.dumps(MESSAGES["messages"], indent=indent))
        assert read_conversations(path)[0] == [Conversation(ASKED, f"{path} record 1")]


def test_gzip_byte_order_mark_and_several_paths(tmp_path):
    packed, marked = tmp_path / "a.jsonl.gz", tmp_path / "b.json"
    packed.write_bytes(gzip.compress(json.dumps(ALPACA).encode()))
    marked.write_bytes(b"\xef\xbb\xbf" + json.dumps([ALPACA], indent=1).encode())
    conversations, _ = read_conversations([marked, packed])
    assert [c.where for c in conversations] == [f"{marked} record 1", f"{packed} record 1"]


def test_a_folder_holds_json_and_jsonl_files_in_sorted_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("sub/b.json", "z.jsonl", ".hidden.json", "a.json"):
        write(tmp_path / name, ALPACA, ALPACA)
    (tmp_path / "readme.md").write_text("no JSON")
    conversations, bad = read_conversations(tmp_path)
    names = [c.where.removeprefix(f"{tmp_path}/") for c in conversations]
    assert names == [
        *("a.json record 1", "a.json record 2", "sub/b.json record 1", "sub/b.json record 2"),
        *("z.jsonl line 1", "z.jsonl line 2"),
    ]
    assert bad == []


def turns(*pairs):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


RECORDS = [
    (turns(("user", "q"), ("chatgpt", "a"), ("human", "r"), ("bing", "b")), "user q assistant a user r assistant b"),
    (turns(("system", "s"), ("gpt", "x"), ("gpt", "y"), ("human", "q"), ("bard", "a")), "system s user q assistant a"),
    (turns(("system", " "), ("human", "q"), ("assistant", "a")), "user q assistant a"),
    ({"instruction": "q", "input": "i", "output": "a"}, "user q\n\ni assistant a"),
    ({"instruction": "q", "response": "a"}, "user q assistant a"),
    ({"prompt": "q", "response": "a", "input": "no Alpaca"}, "user q assistant a"),
    ({"prompt": "q", "completion": "a"}, "user q assistant a"),
    ({"question": "q", "answer": "a"}, "user q assistant a"),
    ({"history": [{"user": "q", "bot": "a"}, {"user": "r", "bot": "b"}]}, "user q assistant a user r assistant b"),
    ({"messages": [{"role": "system", "content": "s"}, *MESSAGES["messages"]]}, "system s user q assistant a"),
]


def test_messages_of_records(tmp_path):
    """Text is kept as it is."""
    for record, expected in RECORDS:
        assert " ".join(f"{role} {content}" for role, content in messages_of(tmp_path, record)) == expected
    text = "  two\r\n\tlines, naïve 🌲\u2028 "
    wanted = DialogueTurn("user", text), DialogueTurn("assistant", text)
    assert messages_of(tmp_path, {"prompt": text, "response": text}) == wanted


BAD = [
    ("{'prompt': 'a'}", "is not JSON: Expecting property name"),
    ("5", "got 5, expected a JSON object"),
    ({}, "got no field, expected a record in a known format"),
    ({"text": "a", "id": 1}, 'got fields "text, id", expected a record in a known format'),
    ({"conversations": "a"}, 'conversations: got "a", expected a list'),
    (turns(), "has no assistant message after a user message"),
    (turns(("gpt", "a")), "has no assistant message after a user message"),
    (turns(("human", "q"), ("human", "r"), ("gpt", "a")), "conversations 2: user follows user, user and assistant"),
    (turns(("human", "q"), ("system", "s"), ("gpt", "a")), "conversations 2: a system message must come first"),
    (turns(("human", "q"), (["gpt"], "a")), 'conversations 2: from: got ["gpt"], expected one of system, human, '),
    (turns(("human", "q"), ("gpt", None)), "conversations 2: got null, expected text"),
    (turns(("human", "q"), ("gpt", " \n")), "conversations 2: is empty"),
    ({"conversations": [{"role": "user"}]}, 'conversations 1: got fields "role", expected fields from and value'),
    ({"messages": [{"role": "user", "content": [{"text": "q"}]}]}, "messages 1: got ["),
    ({"instruction": "q", "input": 3, "output": ""}, "output: is empty"),
    ({"history": [{"user": "q"}]}, 'history 1: got fields "user", expected fields user and bot'),
    ('{"prompt": "\\ud800", "response": "a"}', "prompt: is not valid UTF-8 or Unicode text"),
]


def test_bad_records_are_left_out_by_line(tmp_path):
    """A file with such a record alone is refused, in one line that can be printed."""
    for record, reason in BAD:
        path = write(tmp_path / "c.jsonl", ALPACA, record, ALPACA)
        conversations, (bad,) = read_conversations(path)
        assert [c.where for c in conversations] == [f"{path} line 1", f"{path} line 3"]
        assert bad.where == f"{path} line 2"
        assert bad.reason.startswith(reason)
        assert "\n" not in bad.reason
        assert len(bad.reason) < 250
        alone = write(tmp_path / "alone.jsonl", record)
        message = f"found no conversation in...alone.jsonl; 1 left out, the first: ...{reason}"
        assert_refused(read_conversations, (alone, message))


def test_bad_lines_hide_no_others(tmp_path):
    path, good = tmp_path / "c.jsonl", json.dumps(ALPACA).encode()
    path.write_bytes(b"# comment\n" + good + b'\n{"prompt": "caf\xe9", "response": "a"}\n' + good)
    conversations, (comment, latin) = read_conversations(path)
    assert [c.where for c in conversations] == [f"{path} line 2", f"{path} line 4"]
    assert comment.where == f"{path} line 1"
    assert latin == BadRecord(f"{path} line 3", "prompt: is not valid UTF-8 or Unicode text")


def test_a_file_cut_short_is_one_bad_record(tmp_path):
    good, path = write(tmp_path / "a.json", ALPACA), tmp_path / "b.json"
    path.write_text(json.dumps([SHAREGPT] * 3, indent=2)[:-20])
    conversations, (bad,) = read_conversations([good, path])
    assert len(conversations) == 1
    assert bad.where == f"{path} record 1"
    assert bad.reason.startswith("is not JSON: ")


def test_a_named_format_takes_nothing_else(tmp_path):
    path = write(tmp_path / "c.json", SHAREGPT, ALPACA, MESSAGES, {"question": "q", "answer": "a"})
    for format in ("sharegpt", "alpaca", "messages"):
        conversations, bad = read_conversations(path, format)
        assert len(conversations) == 1
        assert all(f"expected a record in {format} format" in reason for _, reason in bad)
        assert len(bad) == 3


def test_files_that_cannot_be_read(tmp_path):
    assert_refused(
        read_conversations,
        (tmp_path, "csv", "data.format: got 'csv', expected auto, sharegpt, alpaca, messages"),
        (tmp_path / "none.json", "data.files: no such file: ...none.json"),
        (tmp_path, "found no conversation in"),
        (write(tmp_path / "empty.jsonl", ""), "found no conversation in"),
    )


def test_summary():
    bad = [BadRecord(f"f line {n}", "is empty") for n in (3, 5, 8)]
    assert summary([1, 2], []) == "2 conversations"
    assert summary([1], bad[:2]) == "1 conversations, 2 records left out: f line 3: is empty; f line 5: is empty"
    assert summary([], bad, "texts", most=1) == "0 texts, 3 records left out: f line 3: is empty; ..."


def test_texts_of_files_and_folders(tmp_path):
    for name, content in {
        "b.py": b"x = 1\r\n",
        "a/deep/c.md": "# naïve".encode(),
        "a/d.txt.gz": gzip.compress(b"packed"),
        "mark.txt": b"\xef\xbb\xbfmarked",
        ".git/config": b"no",
        "a/.hidden": b"no",
        "latin.txt": b"caf\xe9",
        "zeros.bin": b"a\0b",
        "empty.py": b" \n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    texts, skipped = read_texts(tmp_path)
    assert [(t.name.removeprefix(f"{tmp_path}/"), t.text) for t in texts] == [
        ("a/d.txt.gz", "packed"),
        ("a/deep/c.md", "# naïve"),
        ("b.py", "x = 1\r\n"),
        ("mark.txt", "marked"),
    ]
    assert [(where.removeprefix(f"{tmp_path}/"), reason) for where, reason in skipped] == [
        (".git", "is hidden"),
        ("a/.hidden", "is hidden"),
        ("empty.py", "is empty"),
        ("latin.txt", "is binary or not UTF-8 text"),
        ("zeros.bin", "is binary or not UTF-8 text"),
    ]
    # Named files are read, in the given order.
    texts, _ = read_texts([tmp_path / "b.py", tmp_path / "a/.hidden"])
    assert [t.text for t in texts] == ["x = 1\r\n", "no"]
    assert_refused(
        read_texts,
        (tmp_path / "empty.py", "data.files: found no text in ...empty.py; 1 left out, ... is empty"),
        (tmp_path / "none.txt", "data.files: no such file: ...none.txt"),
    )


def test_data_sets(monkeypatch):
    """Their rows are records; no remote code runs."""
    calls = []

    def load_dataset(*args, **settings):
        calls.append((args, settings))
        if args == ("a/b",):
            raise ConnectionError("no route to host\nand much more")
        nulls = {"conversations": None, "messages": None}
        return [{**ALPACA, **nulls}, {**nulls, "text": "x"}, {**SHAREGPT, "messages": None}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    conversations, bad = read_dataset("some/name", "train[:3]")
    assert conversations == [Conversation(ASKED, "some/name record 1"), Conversation(ASKED, "some/name record 3")]
    assert bad == [BadRecord("some/name record 2", 'got fields "text", expected a record in a known format')]
    assert calls == [(("some/name",), {"split": "train[:3]"})]
    assert_refused(read_dataset, ("a/b", "data.dataset: cannot load 'a/b', split 'train': no route to host"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_refused(read_dataset, ("a/b", "data.dataset: data sets by name need datasets: pip install datasets"))


def test_a_data_set_by_the_real_package(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "local").mkdir()
    write(tmp_path / "local" / "train.jsonl", {**MESSAGES, "id": 1}, {"messages": MESSAGES["messages"][:1], "id": 2})
    conversations, bad = read_dataset(str(tmp_path / "local"))
    assert [c.messages for c in conversations] == [ASKED]
    assert [reason for _, reason in bad] == ["has no assistant message after a user message"]
    assert_refused(read_dataset, (str(tmp_path / "local"), "test", "cannot load ...local', split 'test': "))


def test_conversations_without_an_answer(tmp_path):
    """They are read as seeds. The first record tells a file of conversations from a file of questions."""
    asked, questions = tmp_path / "asked.jsonl", tmp_path / "questions.jsonl"
    asked.write_text('{"messages": [{"role": "user", "content": "q"}]}\n{"messages": []}\n')
    questions.write_text('\n{"question_id": 1, "turns": ["q", "r"]}\n')
    found, bad = read_conversations(asked, answered=False)
    assert [conversation.messages for conversation in found] == [(DialogueTurn("user", "q"),)]
    assert [reason for _, reason in bad] == ["has no user message"]
    assert_refused(read_conversations, (asked, "has no assistant message"))
    assert [holds_conversations(path) for path in (asked, questions)] == [True, False]
