"""Draft heads for the tiny checkpoint as plain torch modules, saved as files of Medusa-2 and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from helpers.released import WIDTH, Medusa, VLLMMedusa, refusal
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase

VOCAB = 96  # of the tiny checkpoint


class Medusa2(nn.Module):
    """The heads under their name in a Medusa-2 model."""

    def __init__(self, n_heads: int, n_layers: int):
        super().__init__()
        self.medusa_head = Medusa(n_heads, n_layers, VOCAB)

    def forward(self, aux_hidden_states):
        return self.medusa_head(aux_hidden_states)


def vllm(n_heads: int, n_layers: int, bias: bool) -> VLLMMedusa:
    return VLLMMedusa(n_heads, n_layers, VOCAB, bias=bias)


def randomise(module: nn.Module) -> nn.Module:
    """Return weights in the nonlinear range of SiLU."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.eval()


def save(directory: Path, state: dict, config: dict, kind: str = "safetensors") -> Path:
    """Write ``config.json`` and weights. kind: ``safetensors``, ``bin``, or shards of either with their index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stem, suffix = ("pytorch_model", "bin") if kind.startswith("bin") else ("model", "safetensors")
    write = torch.save if suffix == "bin" else save_file
    state = {name: tensor.clone() for name, tensor in state.items()}
    if not kind.endswith("shards"):
        write(state, directory / f"{stem}.{suffix}")
        return directory
    names, weight_map = sorted(state), {}
    for shard in range(3):  # every third name, so that each head spans several files
        file = f"{stem}-{shard + 1:05}-of-00003.{suffix}"
        write({name: state[name] for name in names[shard::3]}, directory / file)
        weight_map |= dict.fromkeys(names[shard::3], file)
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def medusa_2_config(base_config: dict, n_heads: int, n_layers: int) -> dict:
    return base_config | {"medusa_num_heads": n_heads, "medusa_num_layers": n_layers}


def vllm_config(n_heads: int, n_layers: int, **more) -> dict:
    """Return the config of the released heads."""
    return {
        "architectures": ["MedusaModel"],
        "hidden_size": WIDTH,
        "model_type": "medusa",
        "num_heads": n_heads,
        "num_hidden_layers": n_layers,
        "transformers_version": "4.41.2",
        "truncated_vocab_size": None,
        "vocab_size": VOCAB,
    } | more


def refused(directory: Path, base: BoundBase, *pieces: str, **options) -> str:
    return refusal(lambda: load_draft(directory, base.config, **options), "draft", *pieces)
