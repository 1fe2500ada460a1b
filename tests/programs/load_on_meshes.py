"""Load bases and draft heads on meshes; report if every slice is right and how much of the files was read.

Arguments: the folder for the directories and ``answer.json``; the bases besides ``llama``, and the drafts. What was
exported is compared with what each device holds.
"""

import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from helpers.every_format import heads_of, random_like
from helpers.programs import answer
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export import export_heads
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.load import load_draft
from hydrajax.formats.tensors import SafetensorFiles
from hydrajax.formats.torch_files import save_torch
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import Placement, make_mesh, placer

BASE = LlamaConfig(96, 32, 88, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=8, max_positions=64)
BASES = {
    "llama": BASE,
    "qkv_bias": BASE.replace(qkv_bias=True),
    "qk_norm": BASE.replace(qk_norm=True),
    "tied": BASE.replace(tied_lm_head=True),
    "undivided": BASE.replace(vocab_size=97, mlp_width=89),  # over their widths
}
HEADS = heads_of(BASE)
MESHES = {"model8": {"model": 8}, "data2_model4": {"data": 2, "model": 4}}  # 8 devices do not share 4 key-value heads


class Counted(np.ndarray):
    """A view of a mapped file; counts the bytes that are copied of it."""

    copied = 0

    def astype(self, dtype, **how):
        Counted.copied += self.nbytes * how.get("copy", True)
        return np.asarray(self).astype(dtype, **how)

    def __array_function__(self, function, types, args, settings):
        assert function is np.concatenate, function
        Counted.copied += sum(part.nbytes for part in args[0])
        return np.concatenate([np.asarray(part) for part in args[0]], *args[1:], **settings)


def compare(expected, found, dtype=np.float32) -> dict:
    """Return if all slices on all devices are right, and the float32 bytes of the different ones of each array."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    equal, needed, divided = True, 0, False
    for theirs, ours in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        theirs = np.asarray(theirs, dtype)
        equal &= ours.dtype == dtype
        equal &= all(
            np.asarray(part.data).tobytes() == theirs[part.index].tobytes() for part in ours.addressable_shards
        )
        parts = {str(part.index): part.data.size for part in ours.addressable_shards}
        needed += 4 * sum(parts.values())
        divided |= len(parts) > 1
    copied, Counted.copied = Counted.copied, 0
    return {"equal": bool(equal), "needed": needed, "divided": divided, "copied": copied}


def main(folder: Path, *names: str) -> dict:
    view = SafetensorFiles.view
    SafetensorFiles.view = lambda files, key: view(files, key).view(Counted)
    found, progress = {}, []
    meshes = {name: make_mesh(**sizes) for name, sizes in MESHES.items()}
    for name, config in BASES.items():
        if name not in ("llama", *names):
            continue
        model = Llama(config)
        expected = random_like(nn.unbox(abstract_base(model)))
        export_llama(folder / name, model, expected, dtype=None)
        for mesh_name, mesh in meshes.items():
            params = load_llama(folder / name, place=placer(mesh), on_progress=lambda *at: progress.append(at))[1]
            assert progress[-1][0] == progress[-1][1] == sum(x.size for x in jax.tree.leaves(expected))
            found[f"{name} {mesh_name}"] = compare(expected, params)
        if name == "llama":
            mesh = meshes["model8"]
            params = load_llama(folder / name, jnp.bfloat16, placer(mesh))[1]
            found["as_bfloat16"] = compare(expected, params, jnp.bfloat16)
            for case, sharded in (("draft_model", True), ("copied_draft_model", False)):
                place = Placement(mesh, shard_draft=sharded).place_draft_model
                found[case] = compare(expected, load_llama(folder / name, place=place, what="draft")[1])
            shutil.copytree(folder / name, folder / "bin")
            files = SafetensorFiles([folder / "bin" / "model.safetensors"], "base")
            save_torch(folder / "bin" / "pytorch_model.bin", {key: files.read(key) for key in files})
            (folder / "bin" / "model.safetensors").unlink()
            found["bin"] = compare(expected, load_llama(folder / "bin", place=placer(mesh))[1])
            bound, record = BoundBase(model, expected), fingerprint(folder / name)

    for name, (drafter, format, _) in HEADS.items():
        if name not in names:
            continue
        expected = random_like(jax.eval_shape(lambda drafter=drafter: drafter.init(jax.random.key(0), bound)))
        export_heads(folder / name, drafter, expected, dtype=None, format=format, base_fingerprint=record)
        for mesh_name, mesh in meshes.items():
            found[f"{name} {mesh_name}"] = compare(expected, load_draft(folder / name, BASE, mesh=mesh)[1])

    with (folder / "llama" / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    try:
        load_llama(folder / "llama", place=placer(meshes["model8"]))
    except HydrajaxError as error:
        found["truncated"] = str(error)
    return found


if __name__ == "__main__":
    answer(main)
