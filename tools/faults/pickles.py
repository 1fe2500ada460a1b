"""PyTorch files of a few bytes that would take gigabytes, never end, or run code."""

from __future__ import annotations

import io
import zipfile
from functools import partial

from tools.faults.models import copy_base, generate, run_cases
from tools.faults.registry import Trial, fault

# The header that torch before 1.6 writes.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\x0d\0\0\0little_endian\x88s."
ZEROS = 300_000_000  # bytes


def pickles() -> dict[str, bytes]:
    """Pickle programs by their effect."""
    doubling = b"K\x01\x85q\0" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))
    much, named = b"\x8a\x06" + (10**12).to_bytes(6, "little"), b"\x80\x02}X\x01\0\0\0a"
    rebuild, end = b"ctorch._utils\n_rebuild_tensor_v2\n(", b"\x85K\x01\x85\x89)tRs."
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + much + b"tQ"
    return {
        "exponential key": b"\x80\x02}" + doubling + b"K\x01s.",
        "exponential value": named + doubling + b"s.",
        "exponential counter": named + b"ccollections\nCounter\n]" + doubling + b"a\x85Rs.",
        "bytearray": named + b"cbuiltins\nbytearray\n" + much + b"\x85Rs.",
        "tensor": named + b"ctorch\nFloatTensor\n" + much + b"\x85Rs.",
        "storage": named + rebuild + storage + b"K\0" + much + end,
        "codec": named + b"c_codecs\nencode\nX\x01\0\0\0xX\x03\0\0\0hex\x86Rs.",
        "memo of 4 billion": named + b"Nr\xff\xff\xff\xffs.",
        "string of 4 GB": b"\x80\x02X\xff\xff\xff\xff",
        "string of 2^60": b"\x80\x04\x8d" + bytes(7) + b"\x10",
        "frame of 2^60": b"\x80\x04\x95" + bytes(7) + b"\x10}.",
        "nested": b"\x80\x02" + b"]" * 900_000 + b"a" * 899_999 + b".",
        "20 MB of dictionaries": b"\x80\x02" + b"}" * 20_000_000 + b".",
        "os.system": named + b"cposix\nsystem\nX\x0d\0\0\0touch created\x85Rs.",
        "eval": named + b"cbuiltins\neval\nX\x14\0\0\0open('created', 'w') \x85Rs.",
    }


def zipped(content: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file.getvalue()


@fault("pytorch-files")
def torch_files(trial: Trial) -> int:
    found = {}
    for what, program in pickles().items():
        found[what] = zipped({"x/data.pkl": program, "x/data/0": bytes(8), "x/version": b"3\n"})
        found[f"{what}, bare"] = program
        found[f"{what}, before torch 1.6"] = LEGACY + program + b"\x80\x02]."
    bombs = {
        "zip bomb": {"x/data.pkl": bytes(ZEROS)},
        "zip bomb of storages": {"x/data.pkl": b"\x80\x02}.", "x/data/0": bytes(ZEROS)},
    }
    found |= {what: zipped(content, zipfile.ZIP_DEFLATED) for what, content in bombs.items()}
    found["200,000 members"] = zipped({f"x/data/{n}": b"" for n in range(200_000)})

    # zipfile finds the second of two zips of equal length, torch the first.
    other = pickles()["exponential key"]
    harmless = b"\x80\x02}.".ljust(len(other))
    other, harmless = (zipped({"x/data.pkl": program, "x/version": b"3\n"}) for program in (other, harmless))
    found["two zips in one file"] = other[: other.rindex(b"PK\x05\x06")] + harmless

    def prepare(content: bytes) -> tuple:
        folder = copy_base(trial)
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        return generate(folder)

    return run_cases(trial, {what: partial(prepare, content) for what, content in found.items()}, codes=(2,))
