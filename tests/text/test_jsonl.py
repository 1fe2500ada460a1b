"""JSON and JSONL files, read strictly and tolerantly."""

from __future__ import annotations

import gzip
import json

import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import json_lines, json_value, read_jsonl, shown

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
