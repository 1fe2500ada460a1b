"""Check PyTorch files before torch reads them.

With ``weights_only=True`` torch runs no code that a file names, but a pickle of a hundred bytes can still make it hash
nested tuples for ever, or allocate a terabyte. So the pickle's program is first listed by `pickletools`, which executes
nothing: it must be short, name only what makes dictionaries of tensors, and reuse only names and results of calls. Time
and memory are then proportional to the file's length.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

LONGEST = 2 << 20  # bytes of a program; a tensor takes about 200
MOST_MEMBERS = 100_000  # of a zip: one per storage, and a few more
TAIL = 56 + 20 + 22  # bytes of the records that end a zip written by torch
LEGACY = 5  # programs in a file of torch before 1.6: three about the file, the state dict, and the storages' names
NAMES = {
    "collections OrderedDict",
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3")),
    *(f"torch._utils _rebuild_{kind}" for kind in ("parameter", "parameter_with_state")),
}
# Instructions whose result may be reused: names and texts, storages, and results of calls, such as tensors.
REUSABLE = {"GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BINPERSID", "REDUCE"}


class RefusedPickle(Exception):
    """Not a state dict saved by torch; the message is the reason."""


def starts_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_torch_file(path: Path) -> None:
    """Check a whole file.

    Raises:
        RefusedPickle: it is not as torch writes one.
        OSError, ValueError, zipfile.BadZipFile: it is damaged.
    """
    if not starts_as_zip(path):
        with path.open("rb") as file:
            for _ in range(LEGACY):
                _check_program(file)
        return
    _check_directory(path)
    with zipfile.ZipFile(path) as members:
        found = members.infolist()
        # torch compares whole names, ignoring case.
        names = {member.orig_filename.lower() for member in found}
        programs = [member for member in found if member.orig_filename.lower().endswith("/data.pkl")]
        if len(found) > MOST_MEMBERS or len(names) != len(found) or len(programs) != 1 or programs[0].extra:
            raise RefusedPickle("not a zip as torch writes it")
        if any(member.compress_type != zipfile.ZIP_STORED for member in found):
            raise RefusedPickle("a zip with compressed members, which torch does not write")
        if programs[0].file_size > LONGEST:
            raise RefusedPickle(f"pickle: got {programs[0].file_size} bytes, expected at most {LONGEST}")
        _check_program(io.BytesIO(members.read(programs[0])))


def _check_directory(path: Path) -> None:
    """Refuse a zip in which Python and torch may see different members.

    Python looks for the directory right before the records that end the file, and torch where these records point to.
    Both must agree, in the long records (zip64, which torch always writes) and in the short one.
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
        raise RefusedPickle("a zip whose directory is not where torch writes it")


def _check_program(file: BinaryIO) -> None:
    """Check one pickle, from the file's position to the pickle's end."""
    start, previous, kinds = file.tell(), "", {}
    for code, value, at in pickletools.genops(file):
        name = code.name
        if at is not None and at - start > LONGEST:
            raise RefusedPickle(f"pickle: got more than {LONGEST} bytes")
        if name == "PROTO" and value > 2:
            raise RefusedPickle(f"pickle protocol: got {value}, expected 2, as torch writes")
        if name in ("GLOBAL", "STACK_GLOBAL", "INST") and not _is_known(name, value):
            shown = value if name == "GLOBAL" else "something"
            raise RefusedPickle(f"it names {shown}, which no state dict of tensors needs")
        if "PUT" in name:
            kinds[value] = previous
        elif name in ("DUP", "MEMOIZE") or ("GET" in name and kinds.get(value) not in REUSABLE):
            raise RefusedPickle("it uses a value twice that is neither a name nor a tensor")
        previous = name


def _is_known(code: str, name: str) -> bool:
    """Return True for `NAMES`, storages (``torch FloatStorage``) and dtypes (``torch uint16``)."""
    module, _, last = name.partition(" ") if code == "GLOBAL" else ("", "", "")
    return name in NAMES or (module in ("torch", "torch.storage") and (last.endswith("Storage") or last.islower()))
