"""Attacks by what a user may download and load: models, drafts, adapters, tokenizers. In processes with limits."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from attacks.commands import base, check_said
from attacks.forked import run
from attacks.registry import Fell, Place, attack

MEMORY, SECONDS = 4 << 30, 120  # of one command: addresses (a good one takes 2.3 GB of them), and time
CREATED = "created"  # the file
DECODING = ("--dtype", "float32", "--tree", "chain-2", "--max-new-tokens", 4)


def copy(place: Place) -> Path:
    """The tiny base, to be spoilt."""
    folder = place.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(base(place), folder))


def generated(folder: Path, *more: object) -> tuple:
    """The command that loads a base."""
    return ("generate", "--base", folder, *DECODING, "--draft", "lookup", "--prompt", "the tree", *more)


def drafted(place: Place, folder: Path) -> tuple:
    """The command that loads a draft."""
    return ("generate", "--base", base(place), *DECODING, "--draft", folder, "--prompt", "the tree")


def tried(place: Place, commands: dict[str, Callable[[], tuple]], codes=(0, 2)) -> int:
    """Prepare and run each, with limits; what fell is told together. None may make the file that hostile code makes."""
    falls = []
    for what, prepare in commands.items():
        try:
            code, err = run(prepare(), MEMORY, min(place.seconds, SECONDS), place.folder)
            check_said(code, err, codes)
        except Fell as error:
            falls.append(f"{what}: {error}")
    if falls:
        raise Fell(f"{len(falls)} of {len(commands)}: " + "; ".join(falls))
    if (place.folder / CREATED).exists():
        raise Fell("code in a file was run")
    return len(commands)


def edited(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- files that are none ----------------------------------------------------------------------------------------------

READ = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/x.jinja", "tree_b1.json",
)  # fmt: skip
SIZE = 20 << 30


def put(path: Path, kind: str) -> None:
    """Something else than a file, or one without end, under the name of a file."""
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


KINDS = ("pipe", "directory", "huge", "link to a pipe", "link to itself", "link to a directory")
KINDS += ("/dev/zero", "/dev/tty", "/etc/passwd", "/nowhere")


PARTS = 9  # seeds that together try every pair of them


@attack("files of a model that are none", count=PARTS)
def links(place: Place) -> int:
    """Pipes, links to devices and in circles, directories, 20 GB of nothing: in a base, each under each name."""

    def spoilt(name: str, kind: str) -> tuple:
        folder = copy(place)
        if name.startswith("pytorch") or name.endswith("index.json"):
            (folder / "model.safetensors").unlink()
        put(folder / name, kind)
        return generated(folder)

    pairs = [(name, kind) for name in READ for kind in KINDS][place.seed % PARTS :: PARTS]
    return tried(place, {f"{name}: {kind}": lambda pair=(name, kind): spoilt(*pair) for name, kind in pairs})


# --- what files say ---------------------------------------------------------------------------------------------------

NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "eos_token_id", "tie_word_embeddings",
    "rope_scaling", "model_type", "bos_token_id", "torch_dtype",
)  # fmt: skip
ODD = ("1000000000000000000", "2147483647", "1" + "0" * 400, "7" * 5000, "-1", "0", "1.5", "NaN", "Infinity", "-1e-300")
ODD += ('"x"', "null", "true", "[]", "{}", "[" * 100_000 + "]" * 100_000, '"' + "x" * 1_000_000 + '"', '"\\ud800"')


def said_of(folder: Path, name: str, value: str) -> None:
    """A field of a config.json as this JSON."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {name: "\0"}
    path.write_text(json.dumps(content).replace('"\\u0000"', value))


@attack("numbers in config.json", count=8)
def numbers(place: Place) -> int:
    """Sizes of 10^18, negative ones, no numbers, deep ones."""

    def spoilt(name: str, value: str) -> tuple:
        folder = copy(place)
        said_of(folder, name, value)
        return generated(folder)

    pairs = place.random.sample([(name, value) for name in NUMBERS for value in ODD], 24)
    return tried(place, {f"{name}: {value[:20]}": lambda pair=(name, value): spoilt(*pair) for name, value in pairs})


def header(content: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def headers() -> dict[str, bytes]:
    """Files of safetensors, by what is wrong with them."""
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
        "no JSON": header(b"\xff" * 100),
        "a list": header([name]),
        "null": header(None),
        "deep": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "deep metadata": header(b'{"__metadata__":' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
        "a name twice": header(twice.encode(), bytes(16)),
        "overlapping": header({name: a, "b": tensor(4, 12, [2])}, bytes(12)),
        "a hole": header({name: a, "b": tensor(16, 24, [2])}, bytes(24)),
        "beyond the end": header({name: tensor(0, 2**40, [2**38])}, bytes(8)),
        "backwards": header({name: tensor(8, 0, [2])}, bytes(8)),
        "negative": header({name: tensor(-8, 0, [2])}, bytes(8)),
        "of no such dtype": header({name: tensor(0, 8, [2], "F99")}, bytes(8)),
        "another product": header({name: tensor(0, 8, [3])}, bytes(8)),
        "a product of 2^80": header({name: tensor(0, 8, [2**40, 2**40])}, bytes(8)),
        "a product that is 0 in 64 bits": header({name: tensor(0, 0, [2**32, 2**32])}),
        "a negative size": header({name: tensor(0, 8, [-2])}, bytes(8)),
        "a size of 1.5": header({name: tensor(0, 8, [1.5])}, bytes(8)),
        "a thousand sizes": header({name: tensor(0, 8, [2] + [1] * 1000)}, bytes(8)),
        "more behind the end": header({name: a}, bytes(100)),
        "90 MB of blanks": header(b" " * 90_000_000 + b"{}"),
        "900,000 tensors": header(many),
        "a name of 10 MB": header({"x" * 10_000_000: a}, bytes(8)),
        "control characters": header({"a\nb\x1b[2J\u202e": a}, bytes(8)),
    }


@attack("headers of safetensors", count=1)
def safetensors(place: Place) -> int:
    found = headers()

    def spoilt(content: bytes) -> tuple:
        folder = copy(place)
        (folder / "model.safetensors").write_bytes(content)
        return generated(folder)

    return tried(place, {what: lambda x=content: spoilt(x) for what, content in found.items()}, codes=(2,))


@attack("indexes of shards", count=1)
def shards(place: Place) -> int:
    """Names that lead elsewhere, of what is no file, of nothing; millions of them."""
    outside = place.folder / "outside.safetensors"
    shutil.copy(base(place) / "model.safetensors", outside)
    names = ["../outside.safetensors", str(outside), "sub/../../outside.safetensors", "", ".", "..", "a\0b", "a\nb"]
    names += ["config.json", "model.safetensors.index.json", "missing.safetensors", "pipe", "model", "\ud800"]
    names.append("x" * 9000)
    maps = {repr(name)[:30]: {"model.norm.weight": name} for name in names}
    maps |= {"numbers": {"model.norm.weight": 3}, "a list": ["x"], "empty": {}, "text": "x"}
    maps |= {"a million files": {f"{n}": f"{n}.safetensors" for n in range(1_000_000)}}

    def spoilt(weight_map: object) -> tuple:
        folder = copy(place)
        (folder / "model.safetensors").unlink()
        (folder / "model").mkdir()
        os.mkfifo(folder / "pipe")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return generated(folder)

    return tried(place, {what: lambda x=content: spoilt(x) for what, content in maps.items()}, codes=(2,))
