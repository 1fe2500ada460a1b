"""Whatever is in a file, a reader loads it or raises `HydrajaxError` with one line. Nothing else is raised, nothing is
run or written. (Not so of a pickle made to cost memory or time: torch unpacks it before we see it.)

Tiny directories of every format are damaged by a seeded generator, and by name where that found a bug.
"""

from __future__ import annotations

import collections
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from damage import (
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
from safetensors.numpy import load_file

from hydrajax.checkpoints.base import eos_ids, export_llama, load_llama
from hydrajax.checkpoints.fingerprint import fingerprint
from hydrajax.checkpoints.heads.export import export_heads
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.checkpoints.tensors import save_safetensors, save_torch
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.errors import HydrajaxError
from hydrajax.models.base import BoundBase, abstract_base
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama

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
    for name, (drafter, format, with_pt) in HEADS.items():
        params = random_like(jax.eval_shape(lambda drafter=drafter: drafter.init(jax.random.key(0), bound)))
        settings = {"format": format, "torch_file": with_pt, "base_fingerprint": record}
        export_heads(root / name, drafter, params, dtype=None, **settings)
        if with_pt:
            next((root / name).glob("*.safetensors")).unlink()

    medusa_2 = root / "medusa_2"
    heads = load_file(root / "medusa" / "medusa_lm_head.safetensors")
    tensors = load_file(medusa_2 / "model.safetensors") | {f"medusa_head.{name}": x for name, x in heads.items()}
    save_safetensors(medusa_2 / "model.safetensors", tensors)
    edit(medusa_2 / "config.json", medusa_num_layers=1)


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
