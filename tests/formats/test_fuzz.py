"""Readers load a damaged file or raise a one-line `HydrajaxError`; they raise nothing else, run and write nothing.

Tiny directories of every format are damaged by a seeded generator, and by name where that found a bug.
"""

import collections
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from safetensors.numpy import load_file

from helpers.damage import (
    BYTES,
    EMBEDDING,
    LONG,
    SHAPES,
    VOCAB,
    WIDTH,
    Call,
    damage,
    edit,
    hostile_tensors,
    safetensors_file,
    safetensors_parts,
    torch_file,
)
from helpers.every_format import BASE, BASES, FORMATS
from helpers.refusals import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.load import load_draft
from hydrajax.formats.tensors import save_safetensors

DEFAULT, SLOW = 12, 700  # random cases per format

# torch's of prototypes; what tensorstore's threads find after orbax has given up.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS, MEGABYTES = 5, 500  # limits of CPU time and additional memory per case
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FORBIDDEN = ("subprocess.", "socket.connect")
FORBIDDEN += tuple(f"os.{name}" for name in ("system", "exec", "posix_spawn", "fork", "mkdir", "rename"))
seen: list[str] | None = None  # audit events of the running reader, None without one


def audit(event: str, args: tuple) -> None:
    if seen is None:
        return
    if event.startswith(FORBIDDEN):
        seen.append(f"{event} {args}")
    if event == "open" and not isinstance(args[0], int):
        path, mode, flags = args
        # JAX caches slow compilations, which on a busy machine can be any, for later tests.
        is_compiled = str(path).startswith(str(jax.config.jax_compilation_cache_dir))
        if not is_compiled and (set(mode or "") & set("wax+") or (flags or 0) & WRITING):
            seen.append(f"opens {path} to write")


class TooSlow(BaseException):
    """An exception that no reader may catch."""


def too_slow(*_):
    raise TooSlow


@contextmanager
def bounded():
    """Raise inside the context after `SECONDS` of CPU time or a minute, and on allocations of over 4 GB."""
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 60)}
    before = [signal.signal(number, too_slow) for number, _ in timers.values()]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, limits[1]))
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds, 1)  # repeated every second, because exceptions in destructors are lost
    try:
        yield
    finally:
        for timer, (number, _), handler in zip(timers, timers.values(), before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcomes(directory: Path, base: Path | None = None, dtype=jnp.float32) -> dict[str, bool]:
    """Return whether each reader of this format loads the directory; otherwise it must raise the right error.

    The directory is named after the format. base: the base of heads that record it.
    """
    global seen
    readers: dict[str, Callable] = {}
    if directory.name in BASES:
        readers = {"base": lambda: load_llama(directory, dtype or jnp.bfloat16, quantize=None if dtype else "int8")}
        readers |= {"fingerprint": lambda: fingerprint(directory), "eos": lambda: Checkpoint(directory).eos_ids}
    if directory.name not in BASES or directory.name == "medusa_2":
        readers["draft"] = lambda: load_draft(directory, BASE, dtype, base_directory=base)
    loads, files = {}, sorted(directory.parent.rglob("*"))
    for name, reader in readers.items():
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen = events = []
        try:
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's of overflow, torch's of old pickles
                reader()
            loads[name] = True
        except HydrajaxError as error:
            message, loads[name] = str(error), False
            assert len(message.splitlines()) == 1, message
            message.encode()  # lone surrogates cannot be printed
        finally:
            seen = None
        assert not events, events
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000
    assert sorted(directory.parent.rglob("*")) == files
    return loads


# The hook cannot be removed; it does nothing unless a reader runs.
sys.addaudithook(audit)


@pytest.fixture
def copy(formats, tmp_path) -> Callable[[str], Path]:
    """``copy(format) -> Path``: a directory that a test may damage."""
    return lambda name: Path(shutil.copytree(formats / name, tmp_path / name))


def try_at_random(formats: Path, name: str, tmp_path: Path, cases: range) -> None:
    """Copy, damage, read; the format and the number of a case are its seed."""
    refused = 0
    for case in cases:
        rng, directory = random.Random(f"{name} {case}"), tmp_path / name
        shutil.copytree(formats / name, directory)
        damage(directory, rng)
        try:
            loads = outcomes(directory, rng.choice((None, formats / "llama")), rng.choice((jnp.float32, None)))
        except BaseException as error:
            error.add_note(f"case {case} of {name}")
            raise
        refused += not all(loads.values())
        shutil.rmtree(directory)
    assert refused > len(cases) // 4  # or it does little damage


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.quick("qwen3", "bin", "shards", "native_eagle3", "speculators", "deepspec", "vllm", "hydra_pt", "medusa_2")
def test_random_damage(formats, tmp_path, name):
    try_at_random(formats, name, tmp_path, range(DEFAULT))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_much_random_damage(formats, tmp_path, name):
    try_at_random(formats, name, tmp_path, range(DEFAULT, DEFAULT + SLOW))


LLAMA_3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
CHANGES = [  # the format, fields of config.json: huge numbers, and texts that would break a line
    ("mistral", {"num_hidden_layers": 10**8}),
    ("mistral", {"num_hidden_layers": 10**10}),
    ("llama", {"num_attention_heads": 10**3000, "head_dim": 10**3000, "num_key_value_heads": None}),
    ("llama", {"vocab_size": 10**12}),
    ("mistral", {"sliding_window": 10**20, "max_position_embeddings": 10**30}),
    ("llama", {"rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 10**400}}),
    *(("hydra", {field: 10**4000}) for field in ("hydra_num_heads", "hydra_num_layers", "hidden_state_offset")),
    ("native", {"n_layers": 10**9, "share_blocks": False}),
    ("native", {"num_draft_heads": 256, "n_layers": 256, "share_blocks": False}),
    ("native", {"a\nb": 1}),
    *(("native", {"dtype": name}) for name in ("datetime64[s]", "2f4", "f4,f4", "f4,(")),
    ("native", {"dtype": {"names": ["a"], "formats": ["f4"]}}),
    ("llama", {"rope_scaling": {"type": "a\nb"}}),
    ("llama", {"rope_parameters": {"rope_type": "\ud800"}}),
    ("hydra", {"hydra_head_arch": "a\nb"}),
    ("hydra", {"base_model_name_or_path": "a\nb", "hydrajax": {"base": {"shapes": {}}}}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=lambda x: str(x)[:40].encode("unicode_escape").decode())
def test_fields(copy, formats, name, change):
    directory = copy(name)
    if name == "native":
        drafter = json.loads((directory / "config.json").read_text())["drafter"]
        change = {"drafter": drafter | {"settings": drafter["settings"] | change}}
    edit(directory / "config.json", **change)
    assert not all(outcomes(directory, formats / "llama").values())


def reshape(path: Path, name: str, dtype: str, shape: tuple) -> None:
    """Another dtype and shape for one tensor of a .safetensors file, all zeros."""
    header, body = safetensors_parts(path.read_bytes())
    header.pop("__metadata__", None)
    tensors = {key: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for key, x in header.items()}
    tensors[name] = dtype, shape, bytes(int(math.prod(shape) * BYTES[dtype]))
    path.write_bytes(safetensors_file(tensors))


def test_safetensors_dtype(copy):
    """Also where the heads keep the dtype of their file."""
    base, heads = copy("llama"), copy("medusa")
    for dtype in BYTES:
        reshape(base / "model.safetensors", EMBEDDING, dtype, (VOCAB, WIDTH))
        reshape(heads / "medusa_lm_head.safetensors", "0.1.weight", dtype, (VOCAB, WIDTH))
        float_file = dtype in ("F64", "F32", "F16", "BF16")
        assert outcomes(base)["base"] == float_file, dtype
        for own in (None, jnp.float32):
            assert outcomes(heads, dtype=own)["draft"] == float_file, dtype


def test_safetensors_shape(copy):
    directory = copy("llama")
    for shape in SHAPES:
        reshape(directory / "model.safetensors", EMBEDDING, "F32", shape)
        assert not outcomes(directory)["base"], shape


@pytest.mark.parametrize("name", ["medusa", "medusa_2"])
def test_number_in_a_tensor_name(copy, name):
    directory = copy(name)
    edit(directory / "config.json", remove=["medusa_num_layers"], medusa_num_heads=2)
    path = next(directory.glob("*.safetensors"))
    tensors = {key.replace("0.1.weight", f"0.{LONG}.weight"): x for key, x in load_file(path).items()}
    save_safetensors(path, tensors)
    assert not outcomes(directory)["draft"]


LOADS = {"negative", "parameter", "torch.float64", "torch.float16", "torch.bfloat16"}
EITHER = {"expanded", "parameter with a state"}


def test_torch_leaf(copy):
    """The embedding of a base as each kind of tensor that torch has."""
    directory = copy("bin")
    path = directory / "pytorch_model.bin"
    state = torch.load(path)
    for leaf, make in hostile_tensors(state[EMBEDDING]).items():
        path.write_bytes(torch_file(state | {EMBEDDING: make()}))
        loads = outcomes(directory)["base"]
        assert leaf in EITHER or loads == (leaf in LOADS), leaf


@pytest.mark.parametrize("rows", [10**9, 10**12])
def test_torch_tensors_larger_than_their_file(copy, rows):
    """A stride of 0 makes any matrix of one number."""
    directory = copy("bin")
    edit(directory / "config.json", vocab_size=rows)
    state = torch.load(directory / "pytorch_model.bin")
    state |= dict.fromkeys((EMBEDDING, "lm_head.weight"), torch.zeros(1, 1).expand(rows, WIDTH))
    torch.save(state, directory / "pytorch_model.bin")
    assert not any(outcomes(directory)[reader] for reader in ("base", "fingerprint"))


CONTENTS = [
    *(Call(collections.OrderedDict, state={"items": 3}), Call(collections.Counter)),
    *({"a": Call(bytearray, 10**15)}, {"a": Call(torch.FloatTensor, 10**15)}),
]


@pytest.mark.parametrize("new", [True, False])
def test_torch_content(copy, new):
    """Others are in tests/formats/test_tensors.py."""
    directory = copy("bin")
    for content in CONTENTS:
        (directory / "pytorch_model.bin").write_bytes(torch_file(content, new))
        assert not outcomes(directory)["base"]


@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_run(copy, tmp_path, new):
    directory, created = copy("bin"), tmp_path / "created"
    path = directory / "pytorch_model.bin"
    state = torch.load(path)
    for call in (
        Call(os.system, f"touch {created}"),
        Call(os.mkdir, str(created)),
        Call(eval, f"open({str(created)!r}, 'w')"),
        Call(exec, f"open({str(created)!r}, 'w')"),
        Call(Path.touch, created),
        Call(open, str(created), "w"),
    ):
        hostile = call, state | {EMBEDDING: call}, Call(collections.OrderedDict, state={"_metadata": call})
        for content in (*(torch_file(one, new) for one in hostile), pickle.dumps({"evil": call})):
            path.write_bytes(content)
            assert not outcomes(directory)["base"]
            message = refusal(lambda: load_llama(directory), str(path), "more than tensors: ")
            assert not re.search("weights_only|safe_globals", message)  # torch's advice for running the code
            assert not created.exists()
    pickle.loads(content)["evil"].close()  # the trap is a trap
    assert created.exists()
