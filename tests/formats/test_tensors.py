"""PyTorch and safetensors files: the same parameters from both, no code executed, one line for every defect."""

import json
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

from helpers.draft_heads import identical
from helpers.released import refusal, save
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.tensors import SafetensorFiles, save_safetensors
from hydrajax.formats.torch_files import TorchFiles, save_torch

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
MAPS = Path("/proc/self/maps")
NEITHER = " has neither model.safetensors nor pytorch_model.bin, nor their .index.json"
KINDS = ["safetensors", "safetensors shards", "bin", "bin shards"]


@pytest.fixture
def write(base_config, tmp_path):
    """``write(state, kind, name="base") -> Path``: a directory with the tiny config.json and these tensors."""
    return lambda state, kind, name="base": save(tmp_path / name, state, base_config, kind)


def before_torch_1_6(folder: Path) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    return folder


def same_parameters(one: Path, other: Path, dtype=jnp.float32) -> None:
    """Bit for bit."""
    (model, params), (other_model, others) = load_llama(one, dtype), load_llama(other, dtype)
    assert model == other_model
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    identical(params, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_file_holds_the_same_parameters(base_state, write, dtype):
    cast = {name: tensor.to(dtype) for name, tensor in base_state.items()}
    one = write(cast, "safetensors", "one")
    for kind in KINDS[1:]:
        same_parameters(write(cast, kind, kind), one)
    same_parameters(before_torch_1_6(write(cast, "bin", "old")), one)
    if dtype is torch.bfloat16:
        same_parameters(write(cast, "bin"), one, jnp.bfloat16)


def test_a_whole_saved_state_dict_of_a_tied_model(llama_checkpoint, tmp_path):
    """torch.save writes the shared lm head under both names; an OrderedDict with torch's ``_metadata``."""
    directory = llama_checkpoint(tie_word_embeddings=True)
    state = LlamaForCausalLM.from_pretrained(directory).state_dict()
    assert "lm_head.weight" in state
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    torch.save(state, tmp_path / "pytorch_model.bin")
    same_parameters(tmp_path, directory)


@pytest.mark.parametrize("kind", ["safetensors", "safetensors shards"])
@pytest.mark.parametrize("damaged", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_safetensors_come_before_pytorch_files(base_state, write, tiny_checkpoint, kind, damaged):
    folder = write(base_state, kind)
    (folder / damaged).write_text("not a model")
    same_parameters(folder, tiny_checkpoint)


@pytest.mark.parametrize(("kind", "dtype"), [("safetensors", torch.float32), ("bin", torch.bfloat16)])
def test_parameters_do_not_change_with_the_file(base_state, write, kind, dtype):
    """Loaded files may be overwritten in place, as by training that saves into its initial directory."""
    folder = write({name: tensor.to(dtype) for name, tensor in base_state.items()}, kind)
    params = load_llama(folder, jnp.dtype(str(dtype).removeprefix("torch.")))[1]
    before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(params)]
    (path,) = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    for (name, leaf), old in zip(jax.tree.leaves_with_path(params), before, strict=True):
        assert np.asarray(leaf).tobytes() == old.tobytes(), jax.tree_util.keystr(name)


def mapped(folder: Path) -> set[str]:
    """The files of a directory that are mapped by this process."""
    return {line.split()[-1] for line in MAPS.read_text().splitlines() if f"{folder}/" in line}


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list mapped files")
@pytest.mark.parametrize(("kind", "most"), [("safetensors shards", 3), ("bin shards", 1)])
def test_only_the_files_of_one_parameter_are_mapped(base_state, write, kind, most):
    """Queries, keys and values can be in three shards. Tensors of torch's files are copied one by one."""
    folder = write(base_state, kind)
    seen = []
    load_llama(folder, on_progress=lambda done, total: seen.append((mapped(folder), done, total)))
    assert max(len(files) for files, _, _ in seen) <= most
    assert mapped(folder) == set()  # and afterwards none
    done = [done for _, done, _ in seen]
    assert done == sorted(set(done))
    assert {total for _, _, total in seen} == {done[-1]} == {sum(tensor.numel() for tensor in base_state.values())}


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_the_first_rows_of_a_tensor(tmp_path, kind):
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
        for rows in (1, 64, 65, 1000, None):
            part = files.read(name, rows)
            assert part.dtype == (ml_dtypes.bfloat16 if name == "half" else np.float32)
            np.testing.assert_array_equal(part.astype(np.float32), tensor[:rows].float().numpy(), err_msg=name)


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


def refused(directory: Path, *pieces: str) -> str:
    return refusal(lambda: load_llama(directory), "base", *pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_needed_in_its_shape_and_as_floats(base_state, write, kind):
    """And every file is needed as a whole."""
    for name, tensor in base_state.items():
        rest = {key: x for key, x in base_state.items() if key != name}
        refused(write(rest, kind), f"missing tensor '{name}'")
        shape = [*tensor.shape[:-1], tensor.shape[-1] + 1]
        wrong = write(rest | {name: torch.zeros(shape)}, kind)
        refused(wrong, f"{name}: got shape {shape}, expected {list(tensor.shape)}")
    refused(write(base_state | {"model.bias": torch.zeros(2)}, kind), "unexpected tensor 'model.bias'")
    for dtype, ours in (
        (torch.int8, "I8"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.complex64, "C64"),
    ):
        wrong = {Q: base_state[Q].to(dtype), NORM: base_state[NORM].to(dtype)}
        found = ours if kind.startswith("safetensors") else str(dtype).removeprefix("torch.")
        allowed = f"got dtype {found}, expected float64, float32, float16, bfloat16"
        refused(write(base_state | wrong, kind), f"{Q}: {allowed}", f"{NORM}: {allowed}")

    folder = write(base_state, kind)
    for path in sorted(path for path in folder.iterdir() if path.suffix != ".json"):
        content = path.read_bytes()
        # Cut to nothing, within the signature or the length, after it, within the names, within the data, by one byte.
        for keep in (0, 3, 4, 8, 200, len(content) // 2, int(0.99 * len(content)), -1):
            path.write_bytes(content[:keep])
            refused(folder, str(path), "damaged")
        path.unlink()
        refused(folder, str(folder), *(["missing from", path.name] if "shards" in kind else [NEITHER]))
        path.write_bytes(content)
    load_llama(folder)


@pytest.mark.parametrize("keep", [0, 3, 4, 200, 0.5, 0.99, -1])
def test_a_truncated_file_of_before_torch_1_6(base_state, write, keep):
    path = before_torch_1_6(write(base_state, "bin")) / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(path.parent, str(path), "damaged")


def test_a_file_with_more_bytes_than_there_are_addresses(base_state, write, monkeypatch):
    def safe_open(path, framework):
        raise MemoryError("Cannot allocate memory (os error 12)")

    directory = write(base_state, "safetensors")
    monkeypatch.setattr("hydrajax.formats.tensors.safe_open", safe_open)
    refused(directory, "cannot map ", "model.safetensors: not enough memory")


def test_a_header_that_names_more_tensors_than_any_model_has(base_state, write):
    folder = write(base_state, "safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**24 + 8) + b" " * (2**24 + 6) + b"{}")
    refused(folder, str(path), "header: got 16777224 bytes, expected at most 16777216")


@pytest.mark.parametrize("kind", ["safetensors shards", "bin shards"])
def test_an_index_that_is_wrong(base_state, write, kind):
    """A file elsewhere, even if it is there, no map, and a tensor in two shards."""
    folder = write(base_state, kind)
    (folder / "sub").mkdir()
    save_one = torch.save if kind.startswith("bin") else safetensors.torch.save_file
    for evil in (folder.parent / "evil.bin", folder / "sub" / "evil.bin", folder / "evil.bin"):
        save_one({Q: torch.zeros(32, 32)}, evil)
    (index,) = folder.glob("*.index.json")
    content = json.loads(index.read_text())
    outside = ["../evil.bin", f"{folder}/../evil.bin", str(folder.parent / "evil.bin"), "sub/evil.bin", "/etc/hostname"]
    odd = ["evil.bin\0", "..", ".", "", "a\nb", "\ud800", "x" * 10**5, "config.json", 3, None]
    for name in outside + odd:
        index.write_text(json.dumps({"weight_map": content["weight_map"] | {Q: name}}))
        refused(folder, "outside the directory" if name in outside else "")
    index.write_text("{}")
    refused(folder, index.name, "weight_map")
    index.write_text(json.dumps(content))
    read = torch.load if kind.startswith("bin") else safetensors.torch.load_file
    first, second, _ = sorted(folder.glob("*-of-*"))
    before, (twice, tensor) = read(second), next(iter(read(first).items()))
    save_one(before | {twice: tensor}, second)
    refused(folder, f"'{twice}'", first.name, second.name)
    save_one(read(first) | {"a\nb": tensor.clone()}, first)
    save_one(before | {"a\nb": tensor.clone()}, second)
    refused(folder, first.name, second.name)


ODD = [
    *([torch.zeros(2)], torch.zeros(2), {"state_dict": {Q: torch.zeros(32, 32)}}, {Q: torch.zeros(32, 32), "step": 3}),
    *({7: torch.zeros(2)}, {Q: [[1.0, 2.0]]}, None),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("zipped", [True, False])
def test_files_without_a_state_dict(base_state, write, zipped):
    folder = write(base_state, "bin")
    path = folder / "pytorch_model.bin"
    for content in ODD:
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        refused(folder, str(path), "must hold a state dict of tensors")
    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"PK\x03\x04", b"\x80\x02."):
        path.write_bytes(content)
        refused(folder, str(path), "damaged")
    for odd in (torch.eye(32).to_sparse(), torch.eye(32).to_sparse_csr(), torch.eye(32).to("meta")):
        torch.save(base_state | {Q: odd}, path)  # kinds of tensors that only torch's format has
        refused(folder, f"must hold dense tensors: got '{Q}'")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_slip_in_the_number_of_layers_is_refused_at_once(base_state, write, kind):
    folder = write(base_state, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    start = time.monotonic()
    refused(folder, str(folder), f"{len(base_state)} tensors", "1000000000 layers")
    assert time.monotonic() - start < 5
