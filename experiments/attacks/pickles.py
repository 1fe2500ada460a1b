"""Attacks by PyTorch files: pickles and zips of a few bytes that would take gigabytes or for ever, or run something."""

from __future__ import annotations

import io
import zipfile

from attacks.hostile import copy, generated, tried
from attacks.registry import Place, attack

# What torch before 1.6 writes before the pickle itself.
BEFORE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\x0d\0\0\0little_endian\x88s."
NOTHING = 300_000_000


def pickles() -> dict[str, bytes]:
    """Programs of a few bytes that would take gigabytes, or for ever, or would run something."""
    laughs = b"K\x01\x85q\0" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))
    much, named = b"\x8a\x06" + (10**12).to_bytes(6, "little"), b"\x80\x02}X\x01\0\0\0a"
    rebuild, end = b"ctorch._utils\n_rebuild_tensor_v2\n(", b"\x85K\x01\x85\x89)tRs."
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + much + b"tQ"
    return {
        "laughs as a key": b"\x80\x02}" + laughs + b"K\x01s.",
        "laughs as a value": named + laughs + b"s.",
        "laughs as a counter": named + b"ccollections\nCounter\n]" + laughs + b"a\x85Rs.",
        "bytes": named + b"cbuiltins\nbytearray\n" + much + b"\x85Rs.",
        "a tensor": named + b"ctorch\nFloatTensor\n" + much + b"\x85Rs.",
        "a storage": named + rebuild + storage + b"K\0" + much + end,
        "encodings": named + b"c_codecs\nencode\nX\x01\0\0\0xX\x03\0\0\0hex\x86Rs.",
        "a memo of 4 billion": named + b"Nr\xff\xff\xff\xffs.",
        "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff",
        "a text of 2^60": b"\x80\x04\x8d" + bytes(7) + b"\x10",
        "a frame of 2^60": b"\x80\x04\x95" + bytes(7) + b"\x10}.",
        "deep": b"\x80\x02" + b"]" * 900_000 + b"a" * 899_999 + b".",
        "20 MB of dictionaries": b"\x80\x02" + b"}" * 20_000_000 + b".",
        "a system call": named + b"cposix\nsystem\nX\x0d\0\0\0touch created\x85Rs.",
        "eval": named + b"cbuiltins\neval\nX\x14\0\0\0open('created', 'w') \x85Rs.",
    }


def zipped(content: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file.getvalue()


@attack("PyTorch files", count=1)
def torch_files(place: Place) -> int:
    found = {}
    for what, program in pickles().items():
        found[what] = zipped({"x/data.pkl": program, "x/data/0": bytes(8), "x/version": b"3\n"})
        found[f"{what}, bare"] = program
        found[f"{what}, before torch 1.6"] = BEFORE + program + b"\x80\x02]."
    bombs = {
        "a bomb": {"x/data.pkl": bytes(NOTHING)},
        "of storages": {"x/data.pkl": b"\x80\x02}.", "x/data/0": bytes(NOTHING)},
    }
    found |= {what: zipped(content, zipfile.ZIP_DEFLATED) for what, content in bombs.items()}
    found["200,000 members"] = zipped({f"x/data/{n}": b"" for n in range(200_000)})

    # Python's zipfile reads the second of two zips, and torch the first, of the same length.
    other = pickles()["laughs as a key"]
    harmless = b"\x80\x02}.".ljust(len(other))
    other, harmless = (zipped({"x/data.pkl": program, "x/version": b"3\n"}) for program in (other, harmless))
    found["two in one"] = other[: other.rindex(b"PK\x05\x06")] + harmless

    def spoilt(content: bytes) -> tuple:
        folder = copy(place)
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        return generated(folder)

    commands = {what: lambda x=content: spoilt(x) for what, content in found.items()}
    return tried(place, commands, codes=(2,))
