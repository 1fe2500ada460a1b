"""The other programs of cpu_peers.py: which are installed, what they can decode, and their processes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peer_files import GGUF_TYPES, ctranslate2_directory, gguf_file

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.formats.checkpoint import Checkpoint

GREEDY, LOOKUP, DRAFT_MODEL = "greedy", "prompt lookup", "draft model"


@dataclass(frozen=True)
class Program:
    """A program that decodes the same base.

    Attributes:
        title: its name in the table.
        package: what pip installs.
        module: its Python module.
        script: ours, which runs it in a process.
        kinds: its name of each of our types that it computes in: a type of GGUF files, or CTranslate2's.
        drafts: its ways to draft.
        rows: it can time a forward pass.
        features: a Python statement that prints the instruction sets that the package was compiled for.
    """

    title: str
    package: str
    module: str
    script: str
    kinds: Mapping[str, str]
    drafts: tuple[str, ...] = ()
    rows: bool = True
    features: str = ""

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def build(self) -> str:
        """Return the package, its version, and the widest vectors that it was compiled for, if it tells."""
        done = subprocess.run([sys.executable, "-c", self.features], capture_output=True, text=True)
        found = re.findall(r"((?:AVX|AMX)\w*) = 1", done.stdout)
        return f"{self.package} {version(self.package)}" + (f" with {found[-1]}" if found else "")

    def name(self, dtype: str) -> str:
        """Return the name in this type, as in tables."""
        return f"{self.title} {self.kinds[dtype]}"


LLAMA_CPP_FEATURES = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
OPENVINO_KINDS = {"float32": "F16", "int8": "Q8_0", "int4": "Q4_0"}  # it reads no F32
PROGRAMS = (
    Program("llama.cpp", "llama-cpp-python", "llama_cpp", "llama_cpp_peer.py", GGUF_TYPES, features=LLAMA_CPP_FEATURES),
    Program(
        "llama.cpp server", "xllamacpp", "xllamacpp", "xllamacpp_peer.py", GGUF_TYPES, (LOOKUP, DRAFT_MODEL), rows=False
    ),
    Program("OpenVINO", "openvino-genai", "openvino_genai", "openvino_peer.py", OPENVINO_KINDS, (LOOKUP,)),
    Program("CTranslate2", "ctranslate2", "ctranslate2", "ctranslate2_peer.py", {"float32": "float32", "int8": "int8"}),
    Program("transformers", "torch", "torch", "transformers_peer.py", {"float32": "float32"}, (LOOKUP, DRAFT_MODEL)),
)


@dataclass(frozen=True)
class Variant:
    """A program with a base in one type.

    Attributes:
        name: of both, as in tables.
        model: the base's file or directory.
        float32: it computes in float32, so its tokens must be ours.
        kind: the program's name of the type.
        drafts: what it drafts with, by name: `LOOKUP` itself or the path of a draft model; None without a draft.
    """

    program: Program
    name: str
    model: Path
    float32: bool
    kind: str
    drafts: Mapping[str, str | None]


def variants(
    program: Program, types: Sequence[str], folder: Path, base: Path, draft_model: Path | None = None
) -> Iterator[Variant]:
    """Yield a program in each of these types that it has, after the base was converted for it.

    A GGUF file is given to the programs that read it as it is, in its own type.

    Args:
        folder: for converted files.
        base: a Hugging Face directory or a GGUF file.
        draft_model: a Hugging Face directory, for programs that take draft models.
    """
    is_gguf, reads_gguf = base.suffix == ".gguf", program.kinds.get("int8") == "Q8_0"
    if is_gguf and not reads_gguf and program.module != "torch":
        return
    if is_gguf and reads_gguf:
        kind = type_of(base)
        yield Variant(program, f"{program.title} {kind}", base, False, kind, drafts_of(program, None))
        return
    for dtype in types:
        if (kind := program.kinds.get(dtype)) is None:
            continue
        if kind == "F16" and (is_gguf or Checkpoint(base).dtype not in ("F16", "float16")):
            continue  # it would round the weights
        drafted = None if draft_model is None else converted(program, draft_model, folder / "draft_model", kind)
        model = converted(program, base, folder, kind)
        yield Variant(program, program.name(dtype), model, dtype == "float32", kind, drafts_of(program, drafted))


def drafts_of(program: Program, draft_model: Path | None) -> dict[str, str | None]:
    """Return the ways to draft of a program, without a draft first."""
    found = {GREEDY: None, LOOKUP: LOOKUP, DRAFT_MODEL: None if draft_model is None else str(draft_model)}
    return {way: draft for way, draft in found.items() if way == GREEDY or (way in program.drafts and draft)}


def converted(program: Program, source: Path, folder: Path, kind: str) -> Path:
    """Return a Hugging Face directory, or a GGUF file, as the program reads it."""
    if program.module == "torch":
        return source
    return (ctranslate2_directory if program.module == "ctranslate2" else gguf_file)(source, folder, kind)


def type_of(file: Path) -> str:
    """Return llama.cpp's name of the type of most of a GGUF file's matrices."""
    from gguf import GGUFReader, LlamaFileType

    value = GGUFReader(file).get_field("general.file_type").contents()
    return LlamaFileType(value).name.removeprefix("MOSTLY_").removeprefix("ALL_")


class Peer:
    """A program's process, started at the first request."""

    def __init__(self, variant: Variant, draft: str | None, threads: int, context: int, vocabulary: int):
        settings = {"model": str(variant.model), "kind": variant.kind, "float32": variant.float32, "draft": draft}
        settings |= {"threads": threads, "context": context, "vocabulary": vocabulary}
        script = Path(__file__).with_name(variant.program.script)
        self.name, self._command = variant.name, [sys.executable, str(script), json.dumps(settings)]
        self._process: subprocess.Popen | None = None

    def decode(self, prompt: np.ndarray, new_tokens: int) -> np.ndarray:
        """Return the greedy ids."""
        return np.array(self._ask(prompt=prompt.tolist(), new_tokens=new_tokens)["tokens"], np.int32)

    def time_rows(self, rows: int, context: int, steps: int) -> float | None:
        """Return the milliseconds of a forward pass over ``rows`` tokens; None if the program cannot time it."""
        return self._ask(rows=rows, context=context, steps=steps)["ms"]

    def close(self) -> None:
        """End the process; the next request starts another one."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._errors.close()
            self._process = None

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (close() closes it)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
            self._process = subprocess.Popen(self._command, **pipes, text=True)
            self._answer()
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.communicate()  # closes its pipes
        self._errors.seek(0)
        last = ([text for text in self._errors.read().splitlines() if text.strip()] or ["no message"])[-1]
        code, self._process = self._process.returncode, None
        raise HydrajaxError(f"{self.name}: its process ended with {code}: {one_line(last)}")
