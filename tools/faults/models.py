"""Malformed model directories: special files, config values, safetensors headers, shard indexes. With limits."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tools.faults.commands import check_exit, run_limited
from tools.faults.fixtures import base
from tools.faults.registry import Failure, Trial, fault

MEMORY, SECONDS = 4 << 30, 120  # limits of a command; a good one needs 2.3 GB of addresses
CREATED = "created"  # the file that code in these files would create
DECODING = ("--dtype", "float32", "--tree", "chain-2", "--max-new-tokens", 4)


def copy_base(trial: Trial) -> Path:
    """A fresh copy of the tiny base, to be damaged."""
    folder = trial.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(base(trial), folder))


def generate(folder: Path, *more: object) -> tuple:
    """The command that loads a base. Its last argument but ``more`` is the prompt."""
    return ("generate", "--base", folder, *DECODING, "--draft", "lookup", "--prompt", "the tree", *more)


def run_cases(trial: Trial, commands: Mapping[str, Callable[[], tuple]], codes=(0, 2)) -> int:
    """Prepare and run each command with limits. Raises one `Failure` for all that failed."""
    failures = []
    for what, prepare in commands.items():
        try:
            check_exit(*run_limited(prepare(), MEMORY, min(trial.timeout, SECONDS), trial.folder), codes)
        except Failure as error:
            failures.append(f"{what}: {error}")
    if failures:
        raise Failure(f"{len(failures)} of {len(commands)}: " + "; ".join(failures))
    if (trial.folder / CREATED).exists():
        raise Failure("code from a file was executed")
    return len(commands)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- special files ----------------------------------------------------------------------------------------------------

NAMES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/x.jinja", "tree_b1.json",
)  # fmt: skip
KINDS = ("pipe", "directory", "huge", "link to a pipe", "link to itself", "link to a directory")
KINDS += ("/dev/zero", "/dev/tty", "/etc/passwd", "/nowhere")
SIZE = 20 << 30
SHARES = 9  # seeds that together cover every pair of name and kind


def put(path: Path, kind: str) -> None:
    """Replace a file by something that is not a regular file, or by a sparse file of 20 GB."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    pipe = path.parent.parent / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(SIZE)
        case _:
            targets = {"link to a pipe": pipe, "link to itself": path, "link to a directory": path.parent}
            path.symlink_to(targets.get(kind, kind))


@fault("model-special-files", seeds=SHARES)
def special_files(trial: Trial) -> int:
    def prepare(name: str, kind: str) -> tuple:
        folder = copy_base(trial)
        if name.startswith("pytorch") or name.endswith("index.json"):
            (folder / "model.safetensors").unlink()
        put(folder / name, kind)
        return generate(folder)

    pairs = [(name, kind) for name in NAMES for kind in KINDS][trial.seed % SHARES :: SHARES]
    return run_cases(trial, {f"{name}: {kind}": partial(prepare, name, kind) for name, kind in pairs})


# --- config.json ------------------------------------------------------------------------------------------------------

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "eos_token_id", "tie_word_embeddings",
    "rope_scaling", "model_type", "bos_token_id", "torch_dtype",
)  # fmt: skip
VALUES = ("1000000000000000000", "2147483647", "1" + "0" * 400, "7" * 5000, "-1", "0", "1.5", "NaN", "Infinity")
VALUES += ("-1e-300", '"x"', "null", "true", "[]", "{}", "[" * 100_000 + "]" * 100_000, '"' + "x" * 1_000_000 + '"')
VALUES += ('"\\ud800"',)


@fault("config-values", seeds=8)
def config_values(trial: Trial) -> int:
    """Huge, negative, nested and wrongly typed values."""

    def prepare(name: str, value: str) -> tuple:
        folder = copy_base(trial)
        path = folder / "config.json"
        content = json.loads(path.read_text()) | {name: "\0"}
        path.write_text(json.dumps(content).replace('"\\u0000"', value))  # the value need not be valid JSON
        return generate(folder)

    pairs = trial.random.sample([(name, value) for name in FIELDS for value in VALUES], 24)
    return run_cases(trial, {f"{name}: {value[:20]}": partial(prepare, name, value) for name, value in pairs})


# --- weights ----------------------------------------------------------------------------------------------------------


def header(content: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def headers() -> dict[str, bytes]:
    """Safetensors files by their defect."""
    a, name = tensor(0, 8, [2]), "model.norm.weight"
    twice = json.dumps({name: a})[:-1] + "," + json.dumps({name: tensor(8, 16, [2])})[1:]
    many = {f"model.layers.{n}.mlp.up_proj.weight": tensor(0, 0, [0]) for n in range(900_000)}
    return {
        "length 2^60": header({}, length=2**60),
        "length 2^64 - 1": header({}, length=2**64 - 1),
        "length 0": header(b""),
        "length beyond the file": header({name: a}, length=10**6),
        "empty": b"",
        "three bytes": b"abc",
        "not JSON": header(b"\xff" * 100),
        "list": header([name]),
        "null": header(None),
        "nested": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "nested metadata": header(b'{"__metadata__":' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
        "duplicate name": header(twice.encode(), bytes(16)),
        "overlap": header({name: a, "b": tensor(4, 12, [2])}, bytes(12)),
        "hole": header({name: a, "b": tensor(16, 24, [2])}, bytes(24)),
        "offset beyond the end": header({name: tensor(0, 2**40, [2**38])}, bytes(8)),
        "offsets reversed": header({name: tensor(8, 0, [2])}, bytes(8)),
        "negative offset": header({name: tensor(-8, 0, [2])}, bytes(8)),
        "unknown dtype": header({name: tensor(0, 8, [2], "F99")}, bytes(8)),
        "wrong product": header({name: tensor(0, 8, [3])}, bytes(8)),
        "product of 2^80": header({name: tensor(0, 8, [2**40, 2**40])}, bytes(8)),
        "product that is 0 in 64 bits": header({name: tensor(0, 0, [2**32, 2**32])}),
        "negative size": header({name: tensor(0, 8, [-2])}, bytes(8)),
        "size of 1.5": header({name: tensor(0, 8, [1.5])}, bytes(8)),
        "a thousand sizes": header({name: tensor(0, 8, [2] + [1] * 1000)}, bytes(8)),
        "bytes after the end": header({name: a}, bytes(100)),
        "90 MB of blanks": header(b" " * 90_000_000 + b"{}"),
        "900,000 tensors": header(many),
        "name of 10 MB": header({"x" * 10_000_000: a}, bytes(8)),
        "control characters": header({"a\nb\x1b[2J\u202e": a}, bytes(8)),
    }


@fault("safetensors-headers")
def safetensors(trial: Trial) -> int:
    def prepare(content: bytes) -> tuple:
        folder = copy_base(trial)
        (folder / "model.safetensors").write_bytes(content)
        return generate(folder)

    return run_cases(trial, {what: partial(prepare, content) for what, content in headers().items()}, codes=(2,))


@fault("shard-indexes")
def shards(trial: Trial) -> int:
    """Shards outside the directory, missing, special, and a million of them."""
    outside = trial.folder / "outside.safetensors"
    shutil.copy(base(trial) / "model.safetensors", outside)
    names = ["../outside.safetensors", str(outside), "sub/../../outside.safetensors", "", ".", "..", "a\0b", "a\nb"]
    names += ["config.json", "model.safetensors.index.json", "missing.safetensors", "pipe", "model", "\ud800"]
    names.append("x" * 9000)
    maps = {repr(name)[:30]: {"model.norm.weight": name} for name in names}
    maps |= {"number": {"model.norm.weight": 3}, "list": ["x"], "empty": {}, "text": "x"}
    maps |= {"a million files": {f"{n}": f"{n}.safetensors" for n in range(1_000_000)}}

    def prepare(weight_map: object) -> tuple:
        folder = copy_base(trial)
        (folder / "model.safetensors").unlink()
        (folder / "model").mkdir()
        os.mkfifo(folder / "pipe")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return generate(folder)

    return run_cases(trial, {what: partial(prepare, content) for what, content in maps.items()}, codes=(2,))
