"""PyTorch files are looked at before torch reads them: what it would do is limited by what a state dict needs.

With ``weights_only=True`` torch runs nothing that a file names, but a pickle of a hundred bytes can still have it hash
a tuple of tuples of the same tuples, for ever, or ask for a terabyte. So its program is read first, as `pickletools`
lists it, which does nothing of it: only what makes dictionaries of tensors may be named, only names and what was
called may be used twice, and the program is short. What is left takes time and memory in proportion to the length of
the file.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

LONGEST = 2 << 20  # bytes of a program; a tensor takes about 200
MOST_MEMBERS = 100_000  # of a zip: one for each storage, and a few more
TAIL = 56 + 20 + 22  # bytes of the records that end a zip as torch writes it
LEGACY = 5  # programs of a file of torch before 1.6: three about the file, the state dict, and the storages' names
NAMES = {
    "collections OrderedDict",
    *(f"torch._utils _rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3")),
    *(f"torch._utils _rebuild_{what}" for what in ("parameter", "parameter_with_state")),
}
# By the instruction that makes it: a name or text, a storage, and what was called, such as a tensor.
MAY_BE_USED_AGAIN = {"GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BINPERSID", "REDUCE"}


class RefusedPickle(Exception):
    """The file is none that torch has written for a state dict; the message says why."""


def starts_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_torch_file(path: Path) -> None:
    """Raises `RefusedPickle`, and `OSError`, `ValueError` or `zipfile.BadZipFile` for what is damaged."""
    if not starts_as_zip(path):
        with path.open("rb") as file:
            for _ in range(LEGACY):
                _check(file)
        return
    _check_directory(path)
    with zipfile.ZipFile(path) as members:
        found = members.infolist()
        # As torch looks for them: whole, and by small letters.
        names = {member.orig_filename.lower() for member in found}
        programs = [member for member in found if member.orig_filename.lower().endswith("/data.pkl")]
        if len(found) > MOST_MEMBERS or len(names) != len(found) or len(programs) != 1 or programs[0].extra:
            raise RefusedPickle("it is a zip, but not as torch writes one")
        if any(member.compress_type != zipfile.ZIP_STORED for member in found):
            raise RefusedPickle("it is a zip with compressed members, which torch does not write")
        if programs[0].file_size > LONGEST:
            raise RefusedPickle(f"its pickle has {programs[0].file_size} bytes, allowed are {LONGEST}")
        _check(io.BytesIO(members.read(programs[0])))


def _check_directory(path: Path) -> None:
    """Refuse a zip of which two readers may see different members, Python's here and torch's own afterwards.

    Its directory must lie right before the records that end the file, where Python looks, and where they say, which is
    where torch does; in the longer records (of zips beyond 4 GB, which torch always writes) and in the short one alike.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - TAIL, 0))
        tail = file.read().rjust(TAIL)
    long, locator, short = tail[:56], tail[56:76], tail[76:]
    _, *numbers, comment = struct.unpack("<4s4H2LH", short)
    ends = size - len(short)
    entries, length, begins = numbers[3:]
    same = short.startswith(b"PK\x05\x06") and comment == 0
    if locator.startswith(b"PK\x06\x07"):
        ends = size - TAIL
        _, rest, *_, wide_entries, wide_length, wide_begins = struct.unpack("<4sQ2H2L4Q", long)
        same &= long.startswith(b"PK\x06\x06") and rest == 44 and struct.unpack("<Q", locator[8:16])[0] == ends
        same &= entries in (wide_entries, 2**16 - 1) and length in (wide_length, 2**32 - 1)
        same &= begins in (wide_begins, 2**32 - 1)
        length, begins = wide_length, wide_begins
    if not same or begins + length != ends:
        raise RefusedPickle("it is a zip, but its directory is not where torch writes it")


def _check(file: BinaryIO) -> None:
    """One pickle, from where the file stands to its end."""
    start, before, kinds = file.tell(), "", {}
    for code, value, at in pickletools.genops(file):
        name = code.name
        if at is not None and at - start > LONGEST:
            raise RefusedPickle(f"its pickle has more than {LONGEST} bytes")
        if name == "PROTO" and value > 2:
            raise RefusedPickle(f"its pickle is of protocol {value}, torch writes 2")
        if name in ("GLOBAL", "STACK_GLOBAL", "INST") and not _is_known(name, value):
            raise RefusedPickle(
                f"it names {value if name == 'GLOBAL' else 'something'}, which no state dict of tensors needs"
            )
        if "PUT" in name:
            kinds[value] = before
        elif name in ("DUP", "MEMOIZE") or ("GET" in name and kinds.get(value) not in MAY_BE_USED_AGAIN):
            raise RefusedPickle("it uses a value twice that is neither a name nor a tensor")
        before = name


def _is_known(code: str, name: str) -> bool:
    """Besides `NAMES` those of storages and dtypes, such as ``torch FloatStorage`` and ``torch uint16``."""
    module, _, last = name.partition(" ") if code == "GLOBAL" else ("", "", "")
    return name in NAMES or (module in ("torch", "torch.storage") and (last.endswith("Storage") or last.islower()))
