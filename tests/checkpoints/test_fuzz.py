"""Whatever is in a file, a reader loads it or raises `HydrajaxError` with one line. Nothing else is raised, nothing is
run or written. (Not so of a pickle made to cost memory or time: torch unpacks it before we see it.)

Tiny directories of every format are damaged by a seeded generator, and by name where that found a bug.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hydrajax.checkpoints.draft import load_draft
from hydrajax.checkpoints.export import export_heads, export_llama
from hydrajax.checkpoints.fingerprint import fingerprint
from hydrajax.checkpoints.llama_hf import eos_ids, load_llama
from hydrajax.checkpoints.tensors import save_safetensors, save_torch
from hydrajax.config import LlamaConfig
from hydrajax.drafters.drafter import BoundBase
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.errors import HydrajaxError
from hydrajax.files import size_and_checksum
from hydrajax.models.llama import Llama, abstract_base

VOCAB, WIDTH = 6, 4
BASE = LlamaConfig(VOCAB, WIDTH, 6, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, max_positions=16)
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
BASES = (*FAMILIES, "shards", "bin", "bin_shards", "medusa_2")
HYDRA = HydraHeads(2, WIDTH, VOCAB, n_layers=2)
MEDUSA = MedusaHeads(2, WIDTH, VOCAB)
HEADS = {  # drafter, format, as .pt
    "hydra": (HYDRA, "hydra", False),
    "hydra_pt": (HYDRA, "hydra", True),
    "prefix": (WithPrefix(HYDRA, BASE), "hydra", False),
    "prefix_pt": (WithPrefix(HYDRA, BASE), "hydra", True),
    "medusa": (MEDUSA, "medusa", False),
    "medusa_pt": (MEDUSA, "medusa", True),
    "vllm": (MEDUSA, "vllm-medusa", False),
    "native": (HYDRA, "native", False),
    "native_prefix": (WithPrefix(MEDUSA, BASE), "native", False),
}
FORMATS = (*BASES, *HEADS)
DEFAULT, SLOW = 20, 700  # random cases per format
SECONDS, MEGABYTES = 5, 500  # of processor time and of more memory that one case may take
EMBEDDING = "model.embed_tokens.weight"
LONG = 10**4 * "7"  # digits: Python refuses to convert so many

# torch's of prototypes; what tensorstore's threads find after orbax has given up.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


# --- a directory of every format ------------------------------------------------------------------------------


def random_like(shapes):
    numbers = np.random.default_rng(0)
    return jax.tree.map(lambda x: numbers.standard_normal(x.shape).astype(x.dtype), shapes)


def split_in_two(directory: Path, stem: str, suffix: str, save) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[:5], names[5:])):
        save(directory / f"{stem}-{i}.{suffix}", {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, f"{stem}-{i}.{suffix}")
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_formats(root: Path) -> None:
    for name, extras in FAMILIES.items():
        model = Llama(BASE.replace(**extras))
        params = random_like(nn.unbox(abstract_base(model)))
        export_llama(root / name, model, params, dtype=None, eos_ids=(2, 3))
    for name in set(BASES) - set(FAMILIES):
        shutil.copytree(root / "llama", root / name)
    (root / "llama" / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    split_in_two(root / "shards", "model", "safetensors", save_safetensors)
    split_in_two(root / "bin_shards", "pytorch_model", "bin", save_torch)
    save_torch(root / "bin" / "pytorch_model.bin", load_file(root / "bin" / "model.safetensors"))
    (root / "bin" / "model.safetensors").unlink()

    bound = BoundBase(*load_llama(root / "llama"))
    record = fingerprint(root / "llama")
    for name, (drafter, format, torch_file) in HEADS.items():
        params = random_like(jax.eval_shape(lambda drafter=drafter: drafter.init(jax.random.key(0), bound)))
        settings = {"format": format, "torch_file": torch_file, "base_fingerprint": record}
        export_heads(root / name, drafter, params, dtype=None, **settings)
        if torch_file:
            next((root / name).glob("*.safetensors")).unlink()

    medusa_2 = root / "medusa_2"
    heads = load_file(root / "medusa" / "medusa_lm_head.safetensors")
    tensors = load_file(medusa_2 / "model.safetensors") | {f"medusa_head.{name}": x for name, x in heads.items()}
    save_safetensors(medusa_2 / "model.safetensors", tensors)
    edit(medusa_2 / "config.json", medusa_num_layers=1)


def edit(path: Path, remove=(), **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))


@pytest.fixture(scope="module")
def formats(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    write_formats(root)
    for name in FORMATS:
        assert all(loads for loads in outcomes(root / name, root / "llama").values()), name
    return root


@pytest.fixture
def copy(formats, tmp_path) -> Callable[[str], Path]:
    """``copy(format) -> Path``: a directory that a test may damage."""
    return lambda name: Path(shutil.copytree(formats / name, tmp_path / name))


# --- the four readers, watched --------------------------------------------------------------------------------

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.",
    "socket.connect",
    "os.mkdir",
    "os.rename",
)
seen: list[str] | None = None  # what Python's audit events say of the reader that runs, None while none runs


def audit(event: str, args: tuple) -> None:
    if seen is None:
        return
    if event.startswith(FORBIDDEN):
        seen.append(f"{event} {args}")
    if event == "open" and not isinstance(args[0], int):
        path, mode, flags = args
        if set(mode or "") & set("wax+") or (flags or 0) & WRITING:
            seen.append(f"opens {path} to write")


class TooSlow(BaseException):
    """No reader may swallow it."""


def too_slow(*_):
    raise TooSlow


@contextmanager
def bounded():
    """Within, more than `SECONDS` of processor time (or a minute) raises, and so does an allocation of over 4 GB."""
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 60)}
    before = [signal.signal(number, too_slow) for number, _ in timers.values()]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, limits[1]))
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds, 1)  # again every second: what a destructor raises is lost
    try:
        yield
    finally:
        for timer, (number, _), handler in zip(timers, timers.values(), before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcomes(directory: Path, base: Path | None = None, dtype=jnp.float32) -> dict[str, bool]:
    """Whether each reader of this format loads the directory; it must else refuse it properly.

    The directory's name is the format's. base: of heads that know theirs.
    """
    global seen
    readers: dict[str, Callable] = {}
    if directory.name in BASES:
        readers = {"base": lambda: load_llama(directory, dtype or jnp.bfloat16, int8=dtype is None)}
        readers |= {"fingerprint": lambda: fingerprint(directory), "eos": lambda: eos_ids(directory)}
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
            message.encode()  # no half of a surrogate pair, which no terminal prints
        finally:
            seen = None
        assert not events
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000
    assert sorted(directory.parent.rglob("*")) == files
    return loads


# The hook cannot be removed; without a reader running it does nothing.
sys.addaudithook(audit)


# --- random damage --------------------------------------------------------------------------------------------

NESTED = [depth * "[" + depth * "]" for depth in (10, 200, 900, 950, 960, 970, 980, 990, 1000, 10_000, 100_000)]
NUMBERS = (
    "-1 0 1 2 3 4 6 8 0.5 -0.0 1e308 1e-320 1e400 -1e400 NaN Infinity -Infinity 32769 2147483648 4294967296 10000000000"
    f" 9223372036854775808 18446744073709551616 {10**30} {-(10**30)} {10**400} {10**3000} {10**4299} {LONG}"
).split()
WORDS = re.findall(
    r"\S+",
    r"""
    x a\nb a\rb\u2028c \u0000 \ud800 1 2 nan inf linear llama3 yarn silu gelu mlp prefix-mlp llama mistral qwen3 hydra
    medusa float32 float64 bfloat16 float8_e4m3fn int8 int32 bool complex64 object S10 datetime64[s] f4,( 2f4 . .. ../x
    /etc/hostname config.json model-1.safetensors F64 BF16 I64 BOOL F8_E4M3 F8_E8M0 F4 C64 U16
    """,
)
VALUES = [
    *("null", "true", "false", "[]", "{}", "[null]", "[1, 2]", '{"a": [1]}', '{"quant_method": "a\\nb"}'),
    *(f'"{word}"' for word in ["", *WORDS, 300 * "x", LONG]),
    *NUMBERS,
    *NESTED,
    '["sliding_attention", "sliding_attention"]',
    '{"type": "linear", "factor": 1e-320}',
    '{"rope_type": "llama3", "factor": NaN, "low_freq_factor": NaN, "high_freq_factor": NaN}',
    '{"type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 4, "rope_theta": -1,'
    f' "original_max_position_embeddings": {10**400}}}',
]
FIELDS = re.findall(
    r"\S+",
    """
    rope_scaling rope_parameters rope_theta quantization_config head_dim layer_types max_window_layers model_type
    use_sliding_window sliding_window max_position_embeddings max_sequence_length attention_bias hidden_act num_heads
    tie_word_embeddings eos_token_id hidden_state_offset grounded_heads hydra_head_arch medusa_num_layers
    medusa_num_heads hydra_num_heads truncated_vocab_size original_lm_head medusa_fc_bias hydrajax drafter files
    hydrajax_draft base_model_name_or_path weight_map
    """,
)
NAMES = [
    *("", "x", "a\nb", "\ud800", "d2t", "fc.weight", "0.0.weight", "0.7.weight", "7.0.linear.weight", "x" * 1000),
    *(f"{prefix}0.{LONG}.weight" for prefix in ("", "medusa_head.")),
]
HOLE = "\N{REPLACEMENT CHARACTER}"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1, "U16": 2, "C64": 8, "F4": 0.5}
BYTES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1)
SHAPES = [(), (0,), (1,), (0, WIDTH), (VOCAB, WIDTH, 1), (VOCAB * WIDTH,), 100 * (1,), (2**40, 0)]


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flipped, overwritten, cut out, put in, repeated."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                del data[at : at + rng.choice((1, 8, 100, len(data)))]
            case 4:
                data[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
            case _:
                data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
    return bytes(data)


def places(tree, path=()) -> list[tuple]:
    """Every path into nested JSON, but the empty one."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def damaged_json(content: bytes, rng: random.Random, values: list[str] = VALUES) -> bytes:
    """Values replaced by any others, fields removed, renamed, added or doubled; now and then no JSON at all."""
    match rng.randrange(12):
        case 0:
            return damaged_bytes(content, rng)
        case 1:
            bad = (b"", b"\xff\xfe", b"\0\0\0\0", content + b"x", b'{"a":' * 20_000, b'{"x": 1, ' + content[1:])
            return rng.choice((*bad, *(value.encode() for value in VALUES)))
    tree, texts = json.loads(content), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        options = places(tree)
        if options and rng.random() < 0.8:
            *parents, last = rng.choice(options)
            at = tree
            for key in parents:
                at = at[key]
            old = at.pop(last)
            if rng.random() < 0.2:
                continue
            if rng.random() < 0.1 and isinstance(at, dict):
                at[rng.choice(NAMES)] = old
                continue
        else:
            at, last = tree, rng.choice(FIELDS)
        texts.append(rng.choice(values))
        at.insert(last, HOLE) if isinstance(at, list) else at.update({last: HOLE})
    pieces = json.dumps(tree).split(json.dumps(HOLE))
    return "".join(piece + text for piece, text in zip(pieces, [*texts, *texts, ""], strict=False)).encode()


def safetensors_parts(content: bytes) -> tuple[dict, bytes]:
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def safetensors_file(tensors: dict[str, tuple[str, tuple, bytes]]) -> bytes:
    """A whole file, of any names, dtypes and shapes."""
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Bytes, the header's length, its JSON; or a sound file of other tensors."""
    header, body = safetensors_parts(content)
    match rng.randrange(8):
        case 0:
            return damaged_bytes(content, rng)
        case 1:
            return damaged_bytes(content[:300], rng) + content[300:]
        case 2 | 3 | 4:
            text = damaged_json(json.dumps(header).encode(), rng)
            if rng.random() < 0.2:
                text = text[:-1] + b"," + text[1:]  # every name twice
            length = len(text) if rng.random() < 0.8 else rng.choice((0, 1, len(text) - 1, 2**27, 2**63, 2**64 - 1))
            return struct.pack("<Q", max(length, 0)) + text + body
    header.pop("__metadata__", None)
    tensors = {
        name: (x["dtype"], tuple(x["shape"]), body[slice(*x["data_offsets"])]) for name, x in sorted(header.items())
    }
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*tensors])
        dtype, shape, _ = tensors.pop(name)
        if rng.random() < 0.3:
            name = rng.choice(NAMES)
        if rng.random() < 0.5:
            shape = rng.choice(SHAPES)
        if rng.random() < 0.6:
            dtype = rng.choice([*BYTES])
        if rng.random() < 0.9:
            tensors[name] = dtype, shape, rng.randbytes(int(math.prod(shape) * BYTES[dtype]))
        if not tensors:
            break
    return safetensors_file(tensors)


class Call:
    """Pickled as a call of ``function``, whose result then gets ``state``."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


REBUILD = [getattr(torch._utils, name) for name in dir(torch._utils) if name.startswith("_rebuild")]
CALLED = [
    *(
        *REBUILD,
        torch.FloatTensor,
        torch.LongTensor,
        torch.nn.Parameter,
        torch.Size,
        torch.device,
        torch.UntypedStorage,
    ),
    *(collections.OrderedDict, collections.Counter, set, complex, bytearray, torch._tensor._rebuild_from_type_v2),
    *(os.system, os.mkdir, eval, exec, open, print, getattr, __import__),
]
DTYPES = [
    *(torch.complex64, torch.complex32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.float64),
    *(torch.float16, torch.bfloat16),
]


def any_object(rng: random.Random, tensor: torch.Tensor, depth: int = 0):
    """What a pickle may hold: constants, containers, tensors, calls of anything."""
    kind = rng.randrange(9 if depth < 4 else 4)
    if kind < 4:
        words = ("created", "open('created', 'w')", "touch created", "w", "items", "detach", "numpy", "cpu", "meta")
        ints = (0, 1, WIDTH, VOCAB, -1, 2**31, 2**62)
        constants = [None, True, 0.5, tensor, tensor.untyped_storage(), *ints, *words]
        return rng.choice([*constants, (VOCAB, WIDTH), (WIDTH, 1), torch.float32, torch.sparse_coo, {}, []])
    some = [any_object(rng, tensor, depth + 1) for _ in range(rng.randrange(6))]
    if kind == 4:
        return rng.choice((list, tuple))(some)
    if kind == 5:
        return {f"{i}": x for i, x in enumerate(some)}
    if kind == 6:
        return Call(rng.choice(CALLED), *some)
    state = rng.choice((any_object(rng, tensor, depth + 1), {"items": 3}, {"detach": 3, "numpy": 3}))
    return Call(rng.choice(CALLED), *some, state=state)


def hostile_tensors(tensor: torch.Tensor) -> dict[str, Callable]:
    """Leaves that torch unpickles and NumPy has no array for, or that are far larger than their file."""
    return {
        "sparse": tensor.to_sparse,
        "csr": lambda: (tensor if tensor.ndim == 2 else tensor[None]).to_sparse_csr(),
        "meta": lambda: tensor.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([tensor]),
        "quantized": lambda: torch.quantize_per_tensor(tensor.contiguous(), 0.1, 0, torch.qint8),
        "conjugate": lambda: torch.conj(torch.complex(tensor, tensor)),
        "negative": lambda: torch.conj(torch.complex(tensor, tensor)).imag,
        "parameter": lambda: torch.nn.Parameter(tensor),
        "parameter with a state": lambda: Call(
            torch._utils._rebuild_parameter_with_state, tensor, True, collections.OrderedDict(), {"detach": 3}
        ),
        "expanded": lambda: torch.zeros(1, 1).expand(VOCAB, WIDTH),
        "expanded far": lambda: torch.zeros(1, 1).expand(10**9, WIDTH),
        "scalar": lambda: torch.zeros(()),
        "empty": lambda: torch.zeros(0, WIDTH),
    } | {str(dtype): lambda dtype=dtype: tensor.to(dtype) for dtype in DTYPES}


def torch_file(state, new: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


def damaged_torch(content: bytes, rng: random.Random) -> bytes:
    """Bytes, entries of the zip, the pickle in it; or a sound file of other objects."""
    kind = rng.randrange(8)
    if kind == 0:
        return damaged_bytes(content, rng)
    if kind == 1:
        return content[:-500] + damaged_bytes(content[-500:], rng)  # the zip's directory
    if kind <= 3:
        with zipfile.ZipFile(io.BytesIO(content)) as old:
            entries = [[name, old.read(name)] for name in old.namelist()]
        one, other = rng.choice(entries), rng.choice(entries)
        match rng.randrange(5):
            case 0:
                one[1], other[1] = other[1], one[1]
            case 1:
                entries.remove(one)
            case 2:
                one[0] = rng.choice(("x", "../x", "/x", "archive/", "archive/constants.pkl"))
            case _:
                one = entries[0] if rng.random() < 0.6 else one  # the pickle
                one[1] = damaged_bytes(one[1], rng)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as new:
            for name, data in entries:
                new.writestr(name, data)
        return file.getvalue()
    state = torch.load(io.BytesIO(content))
    name = rng.choice(sorted(state))
    if kind == 4:
        leaves = hostile_tensors(state[name])
        state[name] = leaves[rng.choice([*leaves])]()
    elif kind == 5:
        state[rng.choice(NAMES)] = state.pop(name)
    elif kind == 6:
        state[name] = any_object(rng, state[name])
    else:
        state = any_object(rng, state[name])
    try:
        return torch_file(state, rng.random() < 0.8)
    except Exception:  # torch.save refuses some of them, too
        return damaged_bytes(content, rng)


def damage(directory: Path, rng: random.Random) -> None:
    """One file of the directory, now and then two."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "README.md")
    texts = [path for path in files if path.suffix == ".json"]
    chosen = {rng.choice(texts if rng.random() < 0.4 else files)}
    if rng.random() < 0.15:
        chosen.add(rng.choice(files))
    for path in sorted(chosen):
        if rng.random() < 0.04:
            path.unlink()
            match rng.randrange(4):
                case 0:
                    path.mkdir()
                case 1:
                    path.symlink_to(directory)
                case 2:
                    path.symlink_to(path)  # a loop
            continue
        kinds = {".json": damaged_json, ".safetensors": damaged_safetensors}
        kinds |= dict.fromkeys((".pt", ".bin"), damaged_torch)
        content = path.read_bytes()
        how = kinds.get(path.suffix, damaged_json if content.startswith(b"{") else damaged_bytes)
        path.write_bytes(how(content, rng))
    if (directory / "params").is_dir() and rng.random() < 0.7:
        forge_checksums(directory)


def forge_checksums(directory: Path) -> None:
    """Make ``config.json`` vouch for what is there now, where that can be done."""
    params = [path for path in (directory / "params").rglob("*") if path.is_file()]
    try:
        edit(
            directory / "config.json",
            files={str(path.relative_to(directory)): size_and_checksum(path) for path in params},
        )
    except (OSError, ValueError, TypeError, RecursionError):
        return


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
def test_random_damage(formats, tmp_path, name):
    try_at_random(formats, name, tmp_path, range(DEFAULT))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_much_random_damage(formats, tmp_path, name):
    try_at_random(formats, name, tmp_path, range(DEFAULT, DEFAULT + SLOW))


# --- by name --------------------------------------------------------------------------------------------------


def test_fingerprint_of_few_rows(formats):
    """Fewer than it hashes: both kinds of file give the same, and it depends on what is there."""
    assert fingerprint(formats / "llama") == fingerprint(formats / "bin") == fingerprint(formats / "shards")
    assert fingerprint(formats / "llama") == fingerprint(formats / "bin_shards") != fingerprint(formats / "qwen3")


HUGE = {
    "layers": ("mistral", {"num_hidden_layers": 10**8}),
    "more layers": ("mistral", {"num_hidden_layers": 10**10}),
    "heads": ("llama", {"num_attention_heads": 10**3000, "head_dim": 10**3000, "num_key_value_heads": None}),
    "vocabulary": ("llama", {"vocab_size": 10**12}),
    "window": ("mistral", {"sliding_window": 10**20, "max_position_embeddings": 10**30}),
    "context": (
        "llama",
        {
            "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 10**400}
        },
    ),
}


@pytest.mark.parametrize("what", HUGE)
def test_huge_number(copy, what):
    name, change = HUGE[what]
    directory = copy(name)
    edit(directory / "config.json", **change)
    assert not outcomes(directory)["base"]


@pytest.mark.parametrize("field", ["hydra_num_heads", "hydra_num_layers", "hidden_state_offset"])
@pytest.mark.parametrize("value", [10**9, 10**4000])
def test_huge_number_of_heads(copy, field, value):
    directory = copy("hydra")
    edit(directory / "config.json", **{field: value})
    assert not outcomes(directory)["draft"]


NATIVE = [{"n_heads": n} for n in (0, -1, 200, 10**9)] + [{"n_layers": n} for n in (0, -1, 10**9)]
NATIVE += [{"n_layers": 10**9, "share_blocks": False}, {"n_heads": 256, "n_layers": 256, "share_blocks": False}]
NATIVE += [{"a\nb": 1}]
NATIVE += [{"dtype": name} for name in ("int32", "bool", "object", "S10", "datetime64[s]", "2f4", "f4,f4", "f4,(")]
NATIVE += [{"dtype": {"names": ["a"], "formats": ["f4"]}}]


@pytest.mark.parametrize("change", NATIVE, ids=str)
def test_native_settings(copy, change):
    directory = copy("native")
    drafter = json.loads((directory / "config.json").read_text())["drafter"]
    edit(directory / "config.json", drafter=drafter | {"settings": drafter["settings"] | change})
    assert not outcomes(directory)["draft"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_scaling": {"type": "a\nb"}}),
        ("llama", {"rope_parameters": {"rope_type": "\ud800"}}),
        ("hydra", {"hydra_head_arch": "a\nb"}),
        ("hydra", {"base_model_name_or_path": "a\nb", "hydrajax": {"base": {"shapes": {}}}}),
        ("native", {"files": {"a\nb": [1, 2]}}),
        ("native", {"files": {"\ud800": [1, 2]}}),
    ],
)
def test_message_is_one_line(copy, formats, name, change):
    directory = copy(name)
    edit(directory / "config.json", **change)
    assert not all(outcomes(directory, formats / "llama").values())


@pytest.mark.parametrize("name", ["shards", "bin_shards"])
@pytest.mark.parametrize(
    "shard", ["", ".", "..", "/etc/hostname", "../llama", "a\0b", "a\nb", "\ud800", "x" * 10**5, "config.json", 3, None]
)
def test_index(copy, name, shard):
    directory = copy(name)
    index = next(directory.glob("*.index.json"))
    edit(index, weight_map=dict.fromkeys(json.loads(index.read_text())["weight_map"], shard))
    assert not outcomes(directory)["base"]


def test_name_in_two_shards(copy):
    directory = copy("shards")
    for path in directory.glob("*.safetensors"):
        save_safetensors(path, load_file(path) | {"a\nb": np.zeros(1, np.float32)})
    assert not outcomes(directory)["base"]


def reshape(path: Path, name: str, dtype: str, shape: tuple) -> None:
    """Another dtype and shape for one tensor of a .safetensors file, all zeros."""
    header, body = safetensors_parts(path.read_bytes())
    header.pop("__metadata__", None)
    tensors = {key: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for key, x in header.items()}
    tensors[name] = dtype, shape, bytes(int(math.prod(shape) * BYTES[dtype]))
    path.write_bytes(safetensors_file(tensors))


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("own", [True, False])
def test_safetensors_dtype(copy, dtype, own):
    """own: the heads keep the dtype of their file."""
    base, heads = copy("llama"), copy("medusa")
    reshape(base / "model.safetensors", EMBEDDING, dtype, (VOCAB, WIDTH))
    reshape(heads / "medusa_lm_head.safetensors", "0.1.weight", dtype, (VOCAB, WIDTH))
    float_file = dtype in ("F64", "F32", "F16", "BF16")
    assert outcomes(base)["base"] == float_file
    assert outcomes(heads, dtype=None if own else jnp.float32)["draft"] == float_file


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape[:4]))
def test_safetensors_shape(copy, shape):
    directory = copy("llama")
    reshape(directory / "model.safetensors", EMBEDDING, "F32", shape)
    assert not outcomes(directory)["base"]


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


@pytest.mark.parametrize("leaf", hostile_tensors(torch.zeros(1)))
def test_torch_leaf(copy, leaf):
    """The embedding of a base."""
    directory = copy("bin")
    path = directory / "pytorch_model.bin"
    state = torch.load(path)
    path.write_bytes(torch_file(state | {EMBEDDING: hostile_tensors(state[EMBEDDING])[leaf]()}))
    loads = outcomes(directory)["base"]
    assert leaf in EITHER or loads == (leaf in LOADS)


@pytest.mark.parametrize("rows", [10**9, 10**12])
def test_torch_tensors_larger_than_their_file(copy, rows):
    """A stride of 0 makes any matrix of one number."""
    directory = copy("bin")
    edit(directory / "config.json", vocab_size=rows)
    state = torch.load(directory / "pytorch_model.bin")
    state |= dict.fromkeys((EMBEDDING, "lm_head.weight"), torch.zeros(1, 1).expand(rows, WIDTH))
    torch.save(state, directory / "pytorch_model.bin")
    assert not any(outcomes(directory)[reader] for reader in ("base", "fingerprint"))


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(1)],
        {"a": {"b": torch.zeros(1)}},
        {EMBEDDING: 3},
        {3: torch.zeros(1)},
        Call(collections.OrderedDict, state={"items": 3}),
        Call(collections.Counter),
        {"a": Call(bytearray, 10**15)},
        {"a": Call(torch.FloatTensor, 10**15)},
    ],
    ids=lambda content: str(getattr(content, "reduced", content))[:30],
)
@pytest.mark.parametrize("new", [True, False])
def test_torch_content(copy, content, new):
    directory = copy("bin")
    (directory / "pytorch_model.bin").write_bytes(torch_file(content, new))
    assert not outcomes(directory)["base"]


@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_run(copy, tmp_path, new):
    directory, created = copy("bin"), tmp_path / "created"
    state = torch.load(directory / "pytorch_model.bin")
    for call in (
        Call(os.system, f"touch {created}"),
        Call(os.mkdir, str(created)),
        Call(open, str(created), "w"),
        Call(eval, f"open({str(created)!r}, 'w')"),
        Call(exec, f"open({str(created)!r}, 'w')"),
        Call(Path.touch, created),
    ):
        for content in (call, state | {EMBEDDING: call}, Call(collections.OrderedDict, state={"_metadata": call})):
            (directory / "pytorch_model.bin").write_bytes(torch_file(content, new))
            assert not outcomes(directory)["base"]
            assert not created.exists()
