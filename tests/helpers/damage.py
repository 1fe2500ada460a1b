"""Randomly damaged files of every format, by seed, for tests of the readers."""

import collections
import io
import json
import math
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from hydrajax.files import size_and_checksum

VOCAB, WIDTH = 6, 4  # of the tiny models
EMBEDDING = "model.embed_tokens.weight"
LONG = 10**4 * "7"  # more digits than Python converts

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


def edit(path: Path, remove=(), **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, remove, insert or repeat bytes."""
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
    """Yield every path into nested JSON except the empty one."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def damaged_json(content: bytes, rng: random.Random, values: list[str] = VALUES) -> bytes:
    """Replace values; remove, rename, add or double fields; sometimes write invalid JSON."""
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
    """Return a valid file with random names, dtypes and shapes."""
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage bytes, the length or the JSON of the header; or write a valid file of other tensors."""
    header, body = safetensors_parts(content)
    match rng.randrange(8):
        case 0:
            return damaged_bytes(content, rng)
        case 1:
            return damaged_bytes(content[:300], rng) + content[300:]
        case 2 | 3 | 4:
            text = damaged_json(json.dumps(header).encode(), rng)
            if rng.random() < 0.2:
                text = text[:-1] + b"," + text[1:]  # duplicate names
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
    """An object that pickles as a call of ``function`` and sets ``state`` on the result."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


DTYPES = [
    *(torch.complex64, torch.complex32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.float64),
    *(torch.float16, torch.bfloat16),
]


def hostile_tensors(tensor: torch.Tensor) -> dict[str, Callable]:
    """Return leaves that torch unpickles but NumPy cannot represent, or that are far larger than their file."""
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
    """Damage bytes, zip entries or the pickle; or write a valid file of other objects."""
    kind = rng.randrange(6)
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
    else:
        state[rng.choice(NAMES)] = state.pop(name)
    try:
        return torch_file(state, rng.random() < 0.8)
    except Exception:  # torch.save also rejects some of them
        return damaged_bytes(content, rng)


def damage(directory: Path, rng: random.Random) -> None:
    """Damage one file of the directory, sometimes two."""
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
                    path.symlink_to(path)  # a link loop
            continue
        kinds = {".json": damaged_json, ".safetensors": damaged_safetensors}
        kinds |= dict.fromkeys((".pt", ".bin"), damaged_torch)
        content = path.read_bytes()
        how = kinds.get(path.suffix, damaged_json if content.startswith(b"{") else damaged_bytes)
        path.write_bytes(how(content, rng))
    if (directory / "params").is_dir() and rng.random() < 0.7:
        forge_checksums(directory)


def forge_checksums(directory: Path) -> None:
    """Update the checksums in ``config.json`` to the current files where possible."""
    params = [path for path in (directory / "params").rglob("*") if path.is_file()]
    try:
        edit(
            directory / "config.json",
            files={str(path.relative_to(directory)): size_and_checksum(path) for path in params},
        )
    except (OSError, ValueError, TypeError, RecursionError):
        return
