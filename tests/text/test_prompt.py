"""Prompt files, and the JSON lines that they are read from."""

import gzip
import io
import json
import re
from collections import UserDict
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import BatchEncoding

from helpers import letters
from hydrajax.cli.prompt_files import read_prompts
from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import json_lines, json_value, read_jsonl, shown
from hydrajax.text.prompt import Prompt, items

GOOD = {"a": "é\u2028"}  # U+2028 ends a line for Python, and not in JSON lines
LINE = json.dumps(GOOD, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", ["f.jsonl", "f.jsonl.gz"])
def test_objects_with_their_place(tmp_path, name):
    path = tmp_path / name
    content = b"\xef\xbb\xbf" + LINE + b"\r\n\n  \n" + LINE  # a byte order mark, blank lines, no newline at the end
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert list(read_jsonl(path, "--x")) == [(f"{path} line 1", GOOD), (f"{path} line 4", GOOD)]


BAD = [
    (b"[1]", r"got \[1\], expected a JSON object"),
    (b"{", r'is not JSON: Expecting .*; found "\{"'),
    (b"{} {}", "is not JSON: Extra data"),
    (b'"text"', 'got "text", expected a JSON object'),
    (b"null", "got null, expected a JSON object"),
    (b'{"a": "\xff"}', r"is not UTF-8 text \(byte 8 of the line\)"),
    (b"[" * 100_000, "is not JSON: "),
    (b"9" * 5000, "is not JSON: Exceeds the limit"),
]


def test_a_bad_line_is_raised_by_the_strict_reader_and_a_value_of_the_tolerant_one(tmp_path):
    path = tmp_path / "f.jsonl"
    for line, message in BAD:
        path.write_bytes(b"\n".join((LINE, line, LINE)))
        with pytest.raises(HydrajaxError, match=f"^{path} line 2: {message}") as refusal:
            list(read_jsonl(path, "--x"))
        assert len(str(refusal.value)) < 400
        values = [value for _, value in json_lines(path.read_bytes(), path)]
        assert values[::2] == [GOOD, GOOD]
        assert values[1] in ([1], "text", None) or isinstance(values[1], HydrajaxError)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(HydrajaxError, match=r"^--x: no such file: "):
        read_jsonl(tmp_path / "none", "--x")
    with pytest.raises(HydrajaxError, match=r"^--x: cannot read .*: Is a directory$"):
        read_jsonl(tmp_path, "--x")
    packed = tmp_path / "f.gz"
    whole = gzip.compress(LINE * 99)
    for content in (b"plain", whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:]):
        packed.write_bytes(content)
        with pytest.raises(HydrajaxError, match=r"^--x: cannot read .*f\.gz: \w"):
            read_jsonl(packed, "--x")
    packed.write_bytes(gzip.compress(bytes(2**26 + 2**24)))
    with pytest.raises(HydrajaxError, match=r"^--x: .*f\.gz: \d+ bytes unpack to more than \d+, which no text does$"):
        read_jsonl(packed, "--x")

    def read_bytes(self):
        raise MemoryError

    monkeypatch.setattr("pathlib.Path.read_bytes", read_bytes)
    with pytest.raises(HydrajaxError, match=r"^--x: cannot read .*: not enough memory$"):
        read_jsonl(packed, "--x")


def test_values():
    assert json_value(b"[1, 2]") == [1, 2]
    assert "(byte 1 of the file)" in str(json_value(b"\xff", "file"))
    assert shown({"a": object}) == '{"a": "<class \'object\'>"}'
    assert shown("x" * 100) == '"' + "x" * 56 + "..."


class Tokenizer:
    """Stands in for one of transformers: a letter is its code, <s> is 1."""

    chat_template = None

    def encode(self, text, verbose=True, add_special_tokens=True):
        return [1, *map(ord, text)]


class ChatTokenizer(Tokenizer):
    chat_template = "..."

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert not return_dict
        (message,) = messages
        assert message["role"] == "user"
        return [1, 2, *map(ord, message["content"]), 3]


def write(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_three_fields(tmp_path):
    lines = [
        {"prompt_ids": [3, 1, 2], "question_id": 7},
        {"prompt": "ab"},
        {"turns": ["cd", "ef"], "category": "math", "reference": ["x"]},
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, lines)))
    prompts = read_prompts(path)
    assert prompts == [
        Prompt([3, 1, 2], f"{path} line 1: prompt_ids"),
        Prompt("ab", f"{path} line 2: prompt"),
        Prompt("cd", f"{path} line 3: turns", chat=True),
    ]
    assert [prompt.ids(Tokenizer()) for prompt in prompts] == [[3, 1, 2], [1, 97, 98], [1, 99, 100]]
    assert [prompt.ids(ChatTokenizer()) for prompt in prompts] == [[3, 1, 2], [1, 97, 98], [1, 2, 99, 100, 3]]


REFUSED = [
    ("{'prompt': 'a'}", r"is not JSON: .*column 2.*; found \"\{'prompt': 'a'\}\""),
    ("[1, 2]", r"got \[1, 2\], expected a JSON object"),
    ("{}", "got the fields none, expected exactly one of prompt_ids, prompt, turns"),
    ('{"question": "a", "answer": "b"}', "got the fields question, answer, expected exactly one of prompt_ids"),
    ('{"prompt": "a", "turns": ["b"]}', "got the fields prompt, turns, expected exactly one of"),
    ('{"prompt": ["a"]}', r'prompt: got \["a"\], expected text'),
    ('{"prompt": null}', "prompt: got null, expected text"),
    ('{"turns": "a"}', 'turns: got "a", expected a list of one or more texts'),
    ('{"turns": []}', r"turns: got \[\], expected a list of one or more texts"),
    ('{"turns": ["a", 2]}', r'turns: got \["a", 2\], expected a list of one or more texts'),
    ('{"prompt_ids": 5}', "prompt_ids: got 5, expected a list of integers"),
    ('{"prompt_ids": "5"}', 'prompt_ids: got "5", expected a list of integers'),
    ('{"prompt_ids": [1, true]}', r"prompt_ids: got \[1, true\], expected a list of integers"),
    ('{"prompt_ids": [1.0]}', r"prompt_ids: got \[1\.0\], expected a list of integers"),
    ('{"prompt_ids": [[1]]}', r"prompt_ids: got \[\[1\]\], expected a list of integers"),
]


def test_what_is_refused(tmp_path):
    for line, pattern in REFUSED:
        path = write(tmp_path, '{"prompt": "fine"}\n' + line + "\n")
        with pytest.raises(HydrajaxError, match=f"^{re.escape(str(path))} line 2: {pattern}") as refusal:
            read_prompts(path)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 400


def test_ids_of_a_prompt():
    assert Prompt(np.array([3, 4], np.int32), "p").ids(None) == [3, 4]
    for wrong in ([True], [1.0], ["1"], [None], np.array([1.5])):
        with pytest.raises(HydrajaxError, match=r"p: got .*, expected a list of integers"):
            Prompt(wrong, "p").ids(None)
    for text, tokenizer, message in (
        ("a", None, "p: got text, but the base has no tokenizer"),
        ("", Tokenizer(), "p: is empty"),  # although this tokenizer would add <s>
        ("\udcff", Tokenizer(), "p: is not valid Unicode text"),
    ):
        with pytest.raises(HydrajaxError, match=message):
            Prompt(text, "p").ids(tokenizer)


def test_a_text_file_is_one_prompt_without_its_last_line_break(tmp_path):
    path, packed = tmp_path / "p.txt", tmp_path / "p.txt.gz"
    for content, text in (
        ("Once upon\n a time\n", "Once upon\n a time"),
        ("Once", "Once"),
        ("two\n\n", "two\n"),
        ("\ufeffé\r\n", "é"),
        ('{"prompt": "a"}\n', '{"prompt": "a"}'),
    ):
        path.write_bytes(content.encode())
        assert read_prompts(path) == [Prompt(text, str(path))]
        packed.write_bytes(gzip.compress(content.encode()))
        assert read_prompts(packed) == [Prompt(text, str(packed))]


@pytest.fixture
def stdin(monkeypatch):
    """``stdin(content)``: bytes or text that waits on standard input."""

    def wait(content):
        content = content if isinstance(content, bytes) else content.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    return wait


def test_standard_input_is_text_or_json_lines(stdin):
    stdin("Once upon\n{a} time\n")
    assert read_prompts("-") == [Prompt("Once upon\n{a} time", "standard input")]
    stdin('\ufeff\n  {"prompt": "a"}\n\n{"prompt_ids": [3]}\n')
    assert read_prompts("-") == [
        Prompt("a", "standard input line 2: prompt"),
        Prompt([3], "standard input line 4: prompt_ids"),
    ]


def test_empty_and_damaged_text(tmp_path, stdin):
    path = tmp_path / "p.txt"
    for nothing in (b"", b" \n\n"):
        path.write_bytes(nothing)
        with pytest.raises(HydrajaxError, match=r"^prompts: .*p\.txt is empty, expected some text$"):
            read_prompts(path)
        stdin(nothing)
        with pytest.raises(HydrajaxError, match=r"^--questions: standard input is empty, expected some text$"):
            read_prompts("-", "--questions")
    path.write_bytes(b"ab\xff")
    with pytest.raises(HydrajaxError, match=r"^prompts: .*p\.txt is not UTF-8 text \(byte 3 of the file\)$"):
        read_prompts(path)
    stdin('{"prompt": ')
    with pytest.raises(HydrajaxError, match=r"^standard input line 1: is not JSON"):
        read_prompts("-")


def test_a_tokenizer_that_fails(monkeypatch):
    """The tokenizers library fails with no `Exception`, such as of a pattern without end."""
    prompt, tokenizer = Prompt("a", "--prompt"), Tokenizer()
    for error in (BaseException("Regex search error"), TypeError("Regex search error"), KeyboardInterrupt()):
        monkeypatch.setattr(tokenizer, "encode", Mock(side_effect=error))
        expected, message = KeyboardInterrupt, "^$"
        if not isinstance(error, KeyboardInterrupt):
            expected, message = HydrajaxError, "^--prompt: the tokenizer failed: Regex search error$"
        with pytest.raises(expected, match=message):
            prompt.ids(tokenizer)


def test_items_have_an_order():
    """Those of a tokenizer's result are the names of its fields."""
    for given, named in (
        (UserDict(a=1), r"a mapping \(UserDict\)"),
        (SimpleNamespace(keys=list), r"a mapping \(SimpleNamespace\)"),  # such as a table of pandas
        ({"a"}, r"\{'a'\}"),
        (bytearray(b"a"), r"bytearray\(b'a'\)"),
    ):
        with pytest.raises(HydrajaxError, match=f"^prompts: got {named}, expected a list$"):
            items(given, "prompts", "a list")
    with pytest.raises(HydrajaxError, match=r"^prompts: got a mapping \(BatchEncoding\), .*; pass its input_ids$"):
        letters.model().generate(BatchEncoding({"input_ids": [[1, 2]]}))
