"""PyTorch files crafted to exhaust memory or time, or to look different to Python and torch, are refused at once."""

from __future__ import annotations

import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

from helpers.released import refusal
from hydrajax.formats.pickles import LONGEST
from hydrajax.formats.tensors import TorchFiles

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
MUCH = (10**12).to_bytes(6, "little")


def tensor(count: bytes, offset: bytes = b"K\0", shape: bytes = b"K\x02\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """A pickle program that makes a tensor of storage "0"."""
    return TENSOR + count + b"tQ" + offset + shape + stride + b"\x89)tR"


def named(value: bytes) -> bytes:
    return b"\x80\x02}X\x01\0\0\0a" + value + b"s."


MORE, TWICE = "damaged or holds more than tensors", "uses a value twice"
TWO = struct.pack("<2f", 1.5, -2.0)
LAUGHS = b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))  # ((x, x), (x, x)) and so on
PICKLES = {
    "laughs as a key": (b"\x80\x02}K\x01\x85q\0" + LAUGHS + b"K\x01s.", TWICE),
    "laughs as a set": (b"\x80\x02cbuiltins\nset\nK\x01\x85q\0" + LAUGHS + b"R.", "it names builtins set,"),
    "laughs as a tensor": (named(b"K\x01\x85q\0" + LAUGHS), TWICE),
    "a list in itself": (named(b"]q\0h\0a"), TWICE),
    "bytes": (named(b"c__builtin__\nbytearray\n\x8a\x06" + MUCH + b"\x85R"), "it names __builtin__ bytearray"),
    "encodings": (named(b"c_codecs\nencode\nX\x01\0\0\0xX\x03\0\0\0hex\x86R"), "it names _codecs encode"),
    "a tensor of its size": (named(b"ctorch\nFloatTensor\n\x8a\x06" + MUCH + b"\x85R"), "it names torch FloatTensor"),
    "a shape": (
        named(tensor(b"K\x02", shape=b"\x8a\x06" + MUCH + b"\x85", stride=b"K\0\x85")),
        "all numbers",
    ),
    "an offset": (named(tensor(b"K\x02", offset=b"K\x01")), MORE),
    "a negative offset": (named(tensor(b"K\x02", offset=b"J\xff\xff\xff\xff")), MORE),
    "a negative stride": (named(tensor(b"K\x02", stride=b"J\xff\xff\xff\xff\x85")), MORE),
    "true as a size": (named(tensor(b"K\x02", shape=b"\x88\x85")), MORE),
    "a text that is longer than the file": (b"\x80\x02X\xff\xff\xff\xff", MORE),
    "a frame": (b"\x80\x04\x95" + bytes(7) + b"\x7f}.", "protocol: got 4"),
    "a memo of 4 billion": (named(b"Nr\xff\xff\xff\xff"), "must hold a state dict"),
    "deep": (b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".", "must hold a state dict"),
    "a call of text": (named(b"X\x01\0\0\0a)R"), MORE),
    "a state of a function": (named(b"ctorch._utils\n_rebuild_tensor\n}b"), MORE),
    "a copy by OrderedDict": (named(b"ccollections\nOrderedDict\n]\x85R"), "must hold a state dict"),
    "long": (b"\x80\x02" + b"N0" * LONGEST + b".", "expected at most"),
}


def zipped(path: Path, members: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, content in members:
            file.writestr(name, content)
    return path


def refused(path: Path, *pieces: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        refusal(lambda: TorchFiles([path], "base"), "base", str(path), *pieces)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 3


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_that_costs_more_than_its_length(tmp_path, what):
    program, reason = PICKLES[what]
    refused(zipped(tmp_path / "x.pt", [("x/data.pkl", program), ("x/data/0", TWO), ("x/version", b"3\n")]), reason)


def test_what_is_refused_is_close_to_what_is_read(tmp_path):
    """The programs above differ from this valid one only in the named detail."""
    members = [("x/data.pkl", named(tensor(b"K\x02"))), ("x/data/0", TWO), ("x/version", b"3\n")]
    path = zipped(tmp_path / "x.pt", members)
    assert TorchFiles([path], "base").read("a").tolist() == [1.5, -2.0]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zips_that_are_not_as_torch_writes_them(tmp_path):
    good = [("x/data.pkl", named(tensor(b"K\x02"))), ("x/data/0", TWO), ("x/version", b"3\n")]
    bomb = [("x/data.pkl", named(tensor(b"\x8a\x04\0\0\0\x01"))), ("x/data/0", bytes(2**26))]
    for members, kind, reason in [
        (bomb, zipfile.ZIP_DEFLATED, "compressed"),
        (good + good[:1], zipfile.ZIP_STORED, "not a zip as torch writes it"),
        ([*good, ("y/data.pkl", b"\x80\x02}.")], zipfile.ZIP_STORED, "not a zip as torch writes it"),
        (good[:1], zipfile.ZIP_STORED, "damaged"),
    ]:
        refused(zipped(tmp_path / "x.pt", members, kind), reason)


def test_a_zip_that_is_another_to_torch(tmp_path):
    """Python reads the directory before the end record, torch where that points to: here two zips of one length."""
    harmless, other = (
        zipped(tmp_path / name, [("x/data.pkl", named(value)), ("x/version", b"3\n")]).read_bytes()
        for name, value in (("harmless", b"K\x05"), ("other", b"K\x07"))
    )
    path = tmp_path / "x.pt"
    path.write_bytes(other[: other.rindex(b"PK\x05\x06")] + harmless)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("x/data.pkl") == named(b"K\x05")
    assert torch.load(path, weights_only=True) == {"a": 7}  # the trap is a trap
    refused(path, "whose directory is not where torch writes it")


def test_zips_with_longer_records_that_disagree(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path)
    content = path.read_bytes()
    assert TorchFiles([path], "base").read("a").tolist() == [1.0, 1.0]
    for place in (-98 + 40, -98 + 48, -42 + 8, -22 + 12, -22 + 16, -2):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        refused(path, "whose directory is not where")


def test_files_before_torch_1_6(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    count = struct.pack("<q", 2)
    assert content[-16:-8] == count
    for number in (2**40, -1, 2**62, 1):
        path.write_bytes(content[:-16] + struct.pack("<q", number) + content[-8:])
        refused(path, "storage ")
    path.write_bytes(pickle.dumps({"a": 1}, 2) * 5)
    refused(path, "damaged")
