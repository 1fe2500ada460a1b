"""LoRA adapters in PEFT's format, and their merge into a transformers model in torch."""

import json
import re
from pathlib import Path

import safetensors.torch
import torch

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "lora_dropout": 0.1}


def linear_layers(model, targets) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a transformers model whose names end in one of the targets."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets
    }


def write_lora(folder: Path, model, targets=LAYERS, ranks=None, **changes) -> Path:
    """Write a LoRA directory for a transformers model, with noise in A and B. As in PEFT, it contains a copy of an
    adapted lm head.

    ranks: ranks of layers by a part of their names; other layers have ``r``. changes: to ``adapter_config.json``.
    """
    generator, tensors = torch.Generator().manual_seed(3), {}
    config = CONFIG | {"target_modules": list(targets)} | changes
    for name, layer in linear_layers(model, targets).items():
        rank = next((rank for part, rank in (ranks or {}).items() if part in name), config["r"])
        for letter, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    if "lm_head" in targets:
        tensors["base_model.model.lm_head.base_layer.weight"] = model.lm_head.weight.detach().clone()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def apply_lora(model, folder: Path):
    """Add s B A to every layer with tensors in the directory; s is alpha / r (rsLoRA: alpha / sqrt(r))."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    layers = dict(model.named_modules())
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name, b = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"), tensors[key.replace("_A", "_B")]
        alpha, rank = config["lora_alpha"], a.shape[0]
        for pattern, other in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                alpha = other
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        with torch.no_grad():
            layers[name].weight += scale * (b @ a)
    return model
