"""Measure time and peak memory of loading 4-bit checkpoints, and how damaged ones are refused.

    python experiments/load_low_bits.py --output experiments/results/load_low_bits.json

Writes made-up weights in the shape of LLaMA 3 8B, with as many layers as fit into ``--gigabytes``: a GGUF file (Q4_0
and Q4_1, embedding and lm head Q8_0) and an AWQ checkpoint in shards. Each is loaded with ``--quantize int4`` in a new
process, as in `load_memory.py`. Then a few bytes of the files are damaged in turn and ``hydrajax generate`` is run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from load_memory import drop_from_cache, in_processes
from safetensors.numpy import save_file

from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config
from hydrajax.files import WholeFile
from hydrajax.lowbit import gguf
from hydrajax.models.layout import shapes
from hydrajax.models.llama_config import LlamaConfig

VALUES = 1 << 22  # random numbers, which all tensors repeat
GROUP = 128  # of AWQ
SHARDS = 4
CUT = 1 << 20  # bytes that a truncated file lacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of each checkpoint (default %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="width of the model (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=128_256, help="tokens (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=("gguf", "awq"), default=["gguf", "awq"])
    parser.add_argument("--dtype", default="float32", help="of what is not quantised (default %(default)s)")
    parser.add_argument("--directory", type=Path, help="directory of the checkpoints (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    report = []
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            directory = Path(folder)
            config = config_of(args.width, args.vocabulary, args.gigabytes * 1e9, kind)
            base = (write_gguf if kind == "gguf" else write_awq)(directory, config)
            size = sum(path.stat().st_size for path in weights(directory))
            drop_from_cache(directory, *weights(directory))
            load = {"quantize": "int4", "dtype": args.dtype, "discard": False}
            found = in_processes(gguf.described(base, "base") if kind == "gguf" else base, load)[0]
            found |= {"kind": kind, "file_bytes": size, "layers": config.n_layers}
            found["peak_over_file"] = round(found["peak_bytes"] / size, 3)
            print(
                f"{kind}: {size / 1e9:.2f} GB, {config.n_layers} layers, {found['device_bytes'] / 1e9:.2f} GB loaded; "
                f"peak {found['peak_bytes'] / 1e9:.2f} GB ({found['peak_over_file']} of the file), "
                f"{found['seconds']:.0f} s",
                flush=True,
            )
            found["damaged"] = []
            for name, damaged in damages(directory, kind, config):
                with damaged:
                    found["damaged"].append({"damage": name} | refusal(base, directory))
                print(found["damaged"][-1], flush=True)
            report.append(found)
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_json(report)


def config_of(width: int, vocabulary: int, n_bytes: float, kind: str) -> LlamaConfig:
    """Return a LLaMA 3 of this width whose file has about this many bytes."""
    shape = LlamaConfig(vocabulary, width, width * 7 // 2, 1, width // 128, max(1, width // 512), 128)
    one, two = (
        sum(stored_bytes(kind, name, size) for name, size in shapes(base_layout(shape.replace(n_layers=n))).items())
        for n in (1, 2)
    )
    return shape.replace(n_layers=max(1, round(1 + (n_bytes - one) / (two - one))))


def gguf_type(name: str, size: tuple[int, ...]) -> GGMLQuantizationType:
    if len(size) == 1:
        return GGMLQuantizationType.F32
    if "embed" in name or "lm_head" in name:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.Q4_1 if "down_proj" in name else GGMLQuantizationType.Q4_0


def stored_bytes(kind: str, name: str, size: tuple[int, ...]) -> float:
    numbers = int(np.prod(size))
    if kind == "gguf":
        return numbers / 32 * {"F32": 128, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[gguf_type(name, size).name]
    return numbers * (0.5 + 2.5 / GROUP if "proj" in name else 2)


def write_gguf(directory: Path, config: LlamaConfig) -> Path:
    values = np.random.default_rng(0).standard_normal((VALUES // config.width, config.width)).astype(np.float32) * 0.02
    ours = {theirs: name for name, theirs in (gguf.TENSORS | gguf.LAYER_TENSORS).items()}
    writer = GGUFWriter(directory / "model.gguf", "llama")
    for name, value in {
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "block_count": config.n_layers,
        "head_count": config.n_heads,
        "head_count_kv": config.n_kv_heads,
        "layer_norm_rms_eps": config.norm_eps,
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("no_vocab")
    tensors, blocks = shapes(base_layout(config)), {}
    for name, size in tensors.items():
        kind = gguf_type(name, size)
        if kind not in blocks:
            blocks[kind] = quants.quantize(values, kind).reshape(-1).view(np.uint8)
        stem, part = name.rsplit(".", 1)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        theirs = f"blk.{layer[1]}.{ours[layer[2]]}" if layer else ours[stem]
        stored = quants.quant_shape_to_byte_shape(size, kind) if len(size) > 1 else size
        dtype = np.uint8 if len(size) > 1 else np.float32
        n_bytes = int(np.prod(stored)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(f"{theirs}.{part}", stored, np.dtype(dtype), n_bytes, kind if len(size) > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size in tensors.items():
        kind = gguf_type(name, size)
        n_bytes = round(stored_bytes("gguf", name, size))
        writer.write_tensor_data(np.resize(blocks[kind], n_bytes))
    writer.close()
    return directory / "model.gguf"


def write_awq(directory: Path, config: LlamaConfig) -> Path:
    random = np.random.default_rng(0)
    words = random.integers(-(2**31), 2**31, VALUES).astype(np.int32)
    floats = (random.standard_normal(VALUES) * 0.02).astype(np.float16)
    scales = (random.random(VALUES) * 0.004 + 0.002).astype(np.float16)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    fields = from_llama_config(config, "load_low_bits") | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = shapes(base_layout(config))
    most = sum(stored_bytes("awq", name, size) for name, size in tensors.items()) / SHARDS
    weight_map, shard = {}, {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        weight_map.update(dict.fromkeys(shard, name))
        save_file(shard, directory / name)
        shard.clear()

    for name, size in tensors.items():
        if "proj" in name:
            layer, (outputs, inputs) = name.removesuffix(".weight"), size
            shard[f"{layer}.qweight"] = np.resize(words, (inputs, outputs // 8))
            shard[f"{layer}.qzeros"] = np.resize(words, (inputs // GROUP, outputs // 8))
            shard[f"{layer}.scales"] = np.resize(scales, (inputs // GROUP, outputs))
        else:
            shard[name] = np.resize(floats, size)
        if sum(x.nbytes for x in shard.values()) > most:
            flush()
    if shard:
        flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def weights(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.safetensors"), *directory.glob("*.gguf")])


def damages(directory: Path, kind: str, config: LlamaConfig) -> Iterator[tuple[str, contextlib.AbstractContextManager]]:
    """Yield names of damages and contexts in which the files have them."""
    first, last = (weights(directory)[i] for i in (0, -1))
    yield "truncated", truncated(last)
    yield "header", replaced(first, b"GGUF", b"GGUE") if kind == "gguf" else replaced(first, b"{", b"[")
    if kind == "gguf":
        name, inputs = b"ffn_up.weight\x02\0\0\0", (config.width, config.width // 2)
        yield "shape", replaced(last, *(name + x.to_bytes(8, "little") for x in inputs))
    else:
        yield "missing shard", renamed(last)
        zeros = [config.width // GROUP, config.width // 8]
        yield "shape", replaced(last, *(f'"shape":[{a},{b}]'.encode() for a, b in (zeros, zeros[::-1])))


@contextlib.contextmanager
def truncated(path: Path) -> Iterator[None]:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - CUT)
        end = file.read()
        file.truncate(size - CUT)
    yield
    with path.open("r+b") as file:
        file.seek(size - CUT)
        file.write(end)


@contextlib.contextmanager
def replaced(path: Path, before: bytes, after: bytes) -> Iterator[None]:
    """Replace the first occurrence in a file's header by as many bytes."""
    with path.open("r+b") as file:
        at = file.read(1 << 20).index(before)
        file.seek(at)
        file.write(after)
    yield
    with path.open("r+b") as file:
        file.seek(at)
        file.write(before)


@contextlib.contextmanager
def renamed(path: Path) -> Iterator[None]:
    path.rename(path.with_suffix(".away"))
    yield
    path.with_suffix(".away").rename(path)


def refusal(base: Path, directory: Path) -> dict:
    """Run ``hydrajax generate`` with the damaged base. Return the exit code, lines on stderr and seconds."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n')
    command = [sys.executable, "-m", "hydrajax", "generate", "--base", str(base), "--quantize", "int4"]
    command += ["--draft", "lookup", "--prompts", str(prompts), "--output", str(directory / "out.jsonl")]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "1000"})
    lines = done.stderr.strip().replace(str(directory), "DIR").splitlines()
    return {"code": done.returncode, "lines": lines, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
