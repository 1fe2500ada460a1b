"""PyTorch and safetensors files: the same parameters from both, no code executed, one line for every defect."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import LlamaForCausalLM

from helpers.released import refusal
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.tensors import SafetensorFiles, save_safetensors
from hydrajax.formats.torch_files import TorchFiles, save_torch

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="module")
def state(tiny_checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of the tiny checkpoint, as transformers reads them."""
    return LlamaForCausalLM.from_pretrained(tiny_checkpoint).state_dict()


@pytest.fixture
def save(tiny_checkpoint, tmp_path):
    """``save(state, kind, **torch_save) -> Path``: a directory with the tiny config.json and a state dict in the file
    or files of that kind, "safetensors" or "bin", or "3 shards" of the latter.
    """

    def write(state: dict, kind: str, name: str | None = None, **torch_save) -> Path:
        folder = tmp_path / (name or kind.replace(" ", "_"))
        folder.mkdir(exist_ok=True)
        shutil.copy(tiny_checkpoint / "config.json", folder)
        if kind == "safetensors":
            safetensors.torch.save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
        elif kind == "bin":
            torch.save(state, folder / "pytorch_model.bin", **torch_save)
        else:
            names = [f"pytorch_model-{i + 1:05}-of-00003.bin" for i in range(3)]
            shards = {shard: dict(list(state.items())[i::3]) for i, shard in enumerate(names)}
            for shard, part in shards.items():
                torch.save(part, folder / shard, **torch_save)
            weight_map = {name: shard for shard, part in shards.items() for name in part}
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return folder

    return write


def same_parameters(one: Path, other: Path, dtype=jnp.float32) -> None:
    """Bit for bit."""
    (model, params), (other_model, others) = load_llama(one, dtype), load_llama(other, dtype)
    assert model == other_model
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(others), strict=True):
        assert mine.dtype == theirs.dtype == dtype
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes(), jax.tree_util.keystr(path)


def refused(directory: Path, *pieces: str) -> str:
    """Loading fails with a message about ``base``."""
    return refusal(lambda: load_llama(directory), "base", *pieces)


# --- the same parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "torch_save"),
    [("bin", {}), ("3 shards", {}), ("bin", {"_use_new_zipfile_serialization": False})],
    ids=["single", "sharded", "before torch 1.6"],
)
def test_pytorch_files_hold_what_safetensors_hold(state, save, kind, torch_save, dtype):
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    files = save(cast, kind, **torch_save), save(cast, "safetensors")
    same_parameters(*files)
    if dtype is torch.bfloat16:
        same_parameters(*files, jnp.bfloat16)


def test_a_whole_saved_state_dict_of_a_tied_model(llama_checkpoint, tmp_path):
    """torch.save writes the shared lm head under both names; an OrderedDict with torch's ``_metadata``."""
    directory = llama_checkpoint(tie_word_embeddings=True)
    state = LlamaForCausalLM.from_pretrained(directory).state_dict()
    assert "lm_head.weight" in state
    shutil.copy(directory / "config.json", tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    same_parameters(tmp_path, directory)


@pytest.mark.parametrize("damaged", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_safetensors_come_before_pytorch_files(state, save, damaged):
    folder = save(state, "safetensors", "both")
    alone = save(state, "safetensors", "alone")
    (folder / damaged).write_text("not a model")
    same_parameters(folder, alone)


def test_sharded_safetensors_come_before_a_pytorch_file(state, save, tiny_checkpoint, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    model.save_pretrained(tmp_path / "both", max_shard_size="40KB")
    (tmp_path / "both" / "pytorch_model.bin").write_text("not a model")
    same_parameters(tmp_path / "both", tiny_checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_parameters_do_not_change_with_the_file(state, save, kind, dtype):
    """Loaded files may be overwritten in place, as by training that saves into its initial directory."""
    folder = save({name: tensor.to(dtype) for name, tensor in state.items()}, kind)
    params = load_llama(folder, jnp.dtype(str(dtype).removeprefix("torch.")))[1]
    before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(params)]
    (path,) = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    for (name, leaf), old in zip(jax.tree.leaves_with_path(params), before, strict=True):
        assert np.asarray(leaf).tobytes() == old.tobytes(), jax.tree_util.keystr(name)


# --- one at a time --------------------------------------------------------------------------------------------


def mapped(folder: Path) -> set[str]:
    """The files of a directory that are mapped by this process."""
    return {line.split()[-1] for line in MAPS.read_text().splitlines() if f"{folder}/" in line}


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list mapped files")
@pytest.mark.parametrize(("kind", "most"), [("safetensors", 2), ("bin", 1)])
def test_only_the_files_of_one_parameter_are_mapped(state, save, tiny_checkpoint, tmp_path, kind, most):
    """Queries, keys and values can be in two shards. Tensors of torch's files are copied one by one."""
    if kind == "bin":
        folder = save(state, "3 shards")
    else:
        folder = tmp_path / "shards"
        LlamaForCausalLM.from_pretrained(tiny_checkpoint).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob(f"*.{kind}"))) >= 3
    seen = []
    params = load_llama(folder, on_progress=lambda done, total: seen.append(mapped(folder)))[1]
    assert max(map(len, seen)) <= most
    assert mapped(folder) == set()  # and afterwards none
    assert len(params) == 5


def test_progress_counts_every_number_once(state, tiny_checkpoint):
    seen = []
    load_llama(tiny_checkpoint, on_progress=lambda done, total: seen.append((done, total)))
    size = sum(tensor.numel() for tensor in state.values())
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == size


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_the_first_rows_of_a_tensor(tmp_path, kind, rows):
    """All rows if there are fewer."""
    torch.manual_seed(0)
    tensors = {
        "long": torch.randn(70, 3),
        "half": torch.randn(70, 2, 2).to(torch.bfloat16),
        "short": torch.randn(5, 3),
        "vector": torch.randn(40),
        "view": torch.randn(3, 70).T,
    }
    files = opened(tmp_path, tensors, kind)
    for name, tensor in tensors.items():
        part = files.read(name, rows)
        expected = tensor[:rows].float().numpy()
        assert part.dtype == (ml_dtypes.bfloat16 if name == "half" else np.float32)
        np.testing.assert_array_equal(part.astype(np.float32), expected, err_msg=name)
        np.testing.assert_array_equal(files.read(name).astype(np.float32), tensor.float().numpy(), err_msg=name)


def opened(folder: Path, tensors: dict[str, torch.Tensor], kind: str):
    path = folder / f"tensors.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return SafetensorFiles([path], "base")
    torch.save(tensors, path)
    return TorchFiles([path], "base")


def test_no_other_rows_are_read(tmp_path):
    files = opened(tmp_path, {"long": torch.zeros(2**20, 4)}, "safetensors")
    peaks = []
    for read in (lambda: files.read("long", 64), lambda: files.read("long")):
        tracemalloc.start()
        read()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 2**20
    assert peaks[1] >= 2**24  # so that the measure is one


# --- what is written ------------------------------------------------------------------------------------------

PATTERNS = np.arange(2**16, dtype=np.uint16)  # every half there is, with its zeros, denormals, infinities and NaNs
WRITTEN = {
    "bfloat16": PATTERNS.view(ml_dtypes.bfloat16).reshape(256, 256),
    "float16": PATTERNS.view(np.float16).reshape(256, 256),
    "float32": np.random.default_rng(0).integers(0, 2**32, (40, 30), np.uint32).view(np.float32),
    "float64": np.random.default_rng(1).integers(0, 2**63, (3, 2, 5), np.uint64).view(np.float64),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "transposed bfloat16": PATTERNS[:12].view(ml_dtypes.bfloat16).reshape(3, 4).T,
    "every other": np.arange(12, dtype=np.float32)[::2],
    "of jax": jnp.arange(6, dtype=jnp.bfloat16),
    "scalar": np.float32(3.5).reshape(()),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_written_tensors_come_back_bit_for_bit(tmp_path, kind):
    """Written files are read by torch's own readers and by ours."""
    path = tmp_path / f"tensors.{kind}"
    arrays = {name: np.asarray(array) for name, array in WRITTEN.items()}
    if kind == "safetensors":
        save_safetensors(path, arrays)
        theirs, ours = safetensors.torch.load_file(path), SafetensorFiles([path], "base")
    else:
        assert save_torch(path, arrays) is True
        theirs, ours = torch.load(path, weights_only=True), TorchFiles([path], "base")
    assert theirs.keys() == set(ours) == arrays.keys()
    for name, array in arrays.items():
        torchs, mine = theirs[name], ours.read(name)
        assert str(torchs.dtype) == f"torch.{array.dtype}"
        assert ours.dtype(name) == str(array.dtype)
        assert tuple(torchs.shape) == ours.shape(name) == array.shape == mine.shape
        assert mine.dtype == array.dtype
        same_width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[array.itemsize]
        assert torchs.contiguous().view(same_width).numpy().tobytes() == array.tobytes() == mine.tobytes(), name


# --- damaged and foreign files --------------------------------------------------------------------------------


def test_missing_files(tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin", ".index.json")


def test_missing_shard(state, save):
    folder = save(state, "3 shards")
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    refused(folder, "pytorch_model-00002-of-00003.bin", "pytorch_model.bin.index.json", "missing from", str(folder))


def test_a_file_with_more_bytes_than_there_are_addresses(state, save, monkeypatch):
    def safe_open(path, framework):
        raise MemoryError("Cannot allocate memory (os error 12)")

    directory = save(state, "safetensors")
    monkeypatch.setattr("hydrajax.formats.tensors.safe_open", safe_open)
    refused(directory, "cannot map ", "model.safetensors: not enough memory")


def test_a_header_that_names_more_tensors_than_any_model_has(state, save):
    folder = save(state, "safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**24 + 8) + b" " * (2**24 + 6) + b"{}")
    refused(folder, str(path), "header: got 16777224 bytes, expected at most 16777216")


@pytest.mark.parametrize("name", ["../evil.bin", "{folder}/../evil.bin", "sub/evil.bin", "evil.bin\0", ".."])
def test_index_that_names_a_file_elsewhere(state, save, name):
    folder = save(state, "3 shards")
    (folder / "sub").mkdir()
    for evil in (folder.parent / "evil.bin", folder / "sub" / "evil.bin", folder / "evil.bin"):
        torch.save({Q: torch.zeros(32, 32)}, evil)
    index = folder / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][Q] = name.format(folder=folder)
    index.write_text(json.dumps(content))
    refused(folder, "pytorch_model.bin.index.json")


def test_tensor_in_two_shards(state, save):
    folder = save(state, "3 shards")
    first, second, _ = sorted(folder.glob("*.bin"))
    twice, tensor = next(iter(torch.load(first).items()))
    torch.save(torch.load(second) | {twice: tensor}, second)
    refused(folder, f"'{twice}'", first.name, second.name)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0, 3, 4, 200, 0.5, 0.99, -1])
def test_truncated_file(state, save, keep, zipped):
    """Cut to nothing, within the signature, after it, within the names, within the data, and by one byte."""
    folder = save(state, "bin", _use_new_zipfile_serialization=zipped)
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(folder, str(path), "damaged")


def test_truncated_shard(state, save):
    folder = save(state, "3 shards")
    path = folder / "pytorch_model-00003-of-00003.bin"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, path.name, "damaged")


class Hostile:
    """Unpickled, it opens a file for writing."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("how", ["zip", "before torch 1.6", "pickle", "among tensors"])
def test_no_code_is_run(state, save, tmp_path, how):
    trace = tmp_path / "executed"
    evil = Hostile(trace)
    folder = save(state | {"evil": evil} if how == "among tensors" else {"evil": evil}, "bin")
    path = folder / "pytorch_model.bin"
    if how == "before torch 1.6":
        torch.save({"evil": evil}, path, _use_new_zipfile_serialization=False)
    elif how == "pickle":
        path.write_bytes(pickle.dumps({"evil": evil}))
    message = refused(folder, str(path), "more than tensors: ")
    assert not re.search("weights_only|safe_globals", message)  # torch's advice for running the code
    assert not trace.exists()
    if how == "zip":  # the trap is a trap
        torch.load(path, weights_only=False)["evil"].close()
        assert trace.exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(2)],
        torch.zeros(2),
        {"state_dict": {Q: torch.zeros(32, 32)}},
        {Q: torch.zeros(32, 32), "step": 3},
        {7: torch.zeros(2)},
        {Q: [[1.0, 2.0]]},
        None,
    ],
    ids=["list", "tensor", "nested", "with a number", "numbered", "lists", "nothing"],
)
def test_file_without_a_state_dict(save, content, zipped):
    folder = save(content, "bin", _use_new_zipfile_serialization=zipped)
    refused(folder, str(folder / "pytorch_model.bin"), "must hold a state dict of tensors")


def test_other_files_under_the_name(save, state):
    folder = save(state, "bin")
    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"PK\x03\x04", b"\x80\x02."):
        (folder / "pytorch_model.bin").write_bytes(content)
        refused(folder, str(folder / "pytorch_model.bin"), "damaged")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_missing_unexpected_and_misshapen_tensors(state, save, kind):
    rest = {name: tensor for name, tensor in state.items() if name != Q}
    refused(save(rest, kind), f"missing tensor '{Q}'")
    refused(save(state | {"model.bias": torch.zeros(2)}, kind), "unexpected tensor 'model.bias'")
    wrong = {Q: torch.zeros(32, 16), NORM: torch.tensor(1.0)}
    refused(
        save(state | wrong, kind), f"{Q}: got shape [32, 16], expected [32, 32]", f"{NORM}: got shape [], expected [32]"
    )


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.int32, ("int32", "I32")),
        (torch.int8, ("int8", "I8")),
        (torch.bool, ("bool", "BOOL")),
        (torch.float8_e4m3fn, ("float8_e4m3fn", "F8_E4M3")),
        (torch.complex64, ("complex64", "C64")),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_tensors_that_are_not_floats(state, save, kind, dtype, names):
    folder = save(state | {Q: torch.ones(32, 32).to(dtype), NORM: torch.ones(32).to(dtype)}, kind)
    found = names[kind == "safetensors"]
    allowed = "expected float64, float32, float16, bfloat16"
    refused(folder, f"{Q}: got dtype {found}, {allowed}", f"{NORM}: got dtype {found}, {allowed}")


@pytest.mark.parametrize("kind", ["sparse", "compressed", "meta"])
def test_tensors_that_are_no_plain_arrays(state, save, kind):
    """Kinds of tensors that only torch's format has."""
    plain = torch.eye(32)
    odd = {"sparse": plain.to_sparse, "compressed": plain.to_sparse_csr, "meta": lambda: plain.to("meta")}[kind]()
    refused(save(state | {Q: odd}, "bin"), f"must hold dense tensors: got '{Q}'")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_slip_in_the_number_of_layers_is_refused_at_once(state, save, kind):
    folder = save(state, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    start = time.monotonic()
    refused(folder, str(folder), f"{len(state)} tensors", "1000000000 layers")
    assert time.monotonic() - start < 5
