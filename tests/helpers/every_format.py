"""Tiny directories of every supported format: bases of all families and heads in all layouts."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from safetensors.numpy import load_file

from helpers.damage import VOCAB, WIDTH, edit
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.gemma4_assistant import AssistantSettings, Gemma4Assistant
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.peagle import PEagle, PEagleSettings
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.tensors import save_safetensors
from hydrajax.formats.torch_files import save_torch
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig

BASE = LlamaConfig(VOCAB, WIDTH, 6, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, max_positions=16)
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
BASES = (*FAMILIES, "shards", "bin", "bin_shards", "medusa_2")


def heads_of(base: LlamaConfig) -> dict[str, tuple]:
    """Return a drafter of every kind and format: the drafter, the format, and whether its file is a .pt."""
    hydra = HydraHeads(2, base.width, base.vocab_size, n_layers=2)
    hydra_plus_plus = dataclasses.replace(hydra, hidden_state_offset=1).with_prefix(base, 5)
    medusa = MedusaHeads(2, base.width, base.vocab_size)
    some = Vocabulary(range(1, base.vocab_size, 2))
    eagle3 = dataclasses.replace(Eagle3.for_base(base, np.float32), vocabulary=some)
    mimo = MTP(base.replace(n_layers=1), embedding_first=False, before_final_norm=True)
    mtp = MTP.for_base(base, np.float32)
    dflash = dataclasses.replace(DFlash.for_base(base, np.float32, BlockSettings(2, 4, (0, 1))), windows=(3, 0))
    dspark = DSpark.for_base(base, np.float32, DSparkSettings(1, 3, (0,), markov_rank=2, markov="gated"))
    amphista = dataclasses.replace(AmphistaHeads.for_base(base, np.float32), num_draft_heads=2)
    assistant = Gemma4Assistant.for_base(base, np.float32, AssistantSettings(layers=1))
    return {
        "hydra": (hydra, "hydra", False),
        "hydra_pt": (hydra, "hydra", True),
        "prefix": (hydra_plus_plus, "hydra", False),
        "prefix_pt": (hydra_plus_plus, "hydra", True),
        "medusa": (medusa, "medusa", False),
        "medusa_pt": (medusa, "medusa", True),
        "vllm": (medusa, "vllm-medusa", False),
        "native": (hydra, "native", False),
        "native_prefix": (medusa.with_prefix(base), "native", False),
        "native_amphista": (amphista, "native", False),
        "eagle": (Eagle.for_base(base, np.float32), "eagle", False),
        "speculators": (eagle3, "speculators", False),
        "native_eagle3": (eagle3, "native", False),
        "mimo": (mimo, "mimo-mtp", False),
        "nextn": (mtp, "nextn", False),
        "qwen_mtp": (mtp, "qwen-mtp", False),
        "native_mtp": (mimo, "native", False),
        "gemma4_assistant": (assistant, "gemma4-assistant", False),
        "dflash": (dflash, "dflash", False),
        "jetspec": (JetSpec.for_base(base, np.float32, BlockSettings(1, 4)), "jetspec", False),
        "muse_assistant": (dataclasses.replace(dflash, both_ways=True, plain_logits=True), "muse-assistant", False),
        "deepspec": (dspark, "deepspec", False),
        "peagle": (PEagle.for_base(base, np.float32, PEagleSettings(2, 3, (0,))), "p-eagle", False),
        "native_dspark": (dspark, "native", False),
    }


HEADS = heads_of(BASE)
FORMATS = (*BASES, *HEADS)


def random_like(shapes):
    numbers = np.random.default_rng(0)
    return jax.tree.map(lambda x: numbers.standard_normal(x.shape).astype(x.dtype), shapes)


@functools.cache
def params_of(drafter, base: Path) -> dict:
    """Return random bits as a drafter's parameters, also subnormal numbers and negative zeros, but all finite."""
    bound, random = BoundBase(*load_llama(base)), np.random.default_rng(0)

    def draw(leaf):
        bits = random.integers(0, 2**32, leaf.shape, np.uint32).view(np.float32)
        return np.where(np.isfinite(bits), bits, np.float32(-0.0))

    return jax.tree.map(draw, jax.eval_shape(lambda: drafter.init(jax.random.key(0), bound)))


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

    record = fingerprint(root / "llama")
    for name, (drafter, format, with_pt) in HEADS.items():
        params = params_of(drafter, root / "llama")
        settings = {"format": format, "torch_file": with_pt, "base_fingerprint": record}
        export_heads(root / name, drafter, params, dtype=None, **settings)
        if with_pt:
            next((root / name).glob("*.safetensors")).unlink()

    medusa_2 = root / "medusa_2"
    heads = load_file(root / "medusa" / "medusa_lm_head.safetensors")
    tensors = load_file(medusa_2 / "model.safetensors") | {f"medusa_head.{name}": x for name, x in heads.items()}
    save_safetensors(medusa_2 / "model.safetensors", tensors)
    edit(medusa_2 / "config.json", medusa_num_layers=1)
