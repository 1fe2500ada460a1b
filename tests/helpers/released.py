"""Released draft heads as plain torch modules with the official parameter names, and their files.

The modules follow the formulas of docs/design.md 4 and the layout of vLLM.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaModel

from helpers.refusals import refusal  # noqa: F401

WIDTH, VOCAB = 32, 96  # of the tiny checkpoint


class Block(nn.Module):
    """R(x) + SiLU(W x + b): R is linear if the block maps several vectors to one, else the identity."""

    def __init__(self, slots: int = 1):
        super().__init__()
        self.linear = nn.Linear(slots * WIDTH, WIDTH)
        self.res_connection = nn.Linear(slots * WIDTH, WIDTH) if slots > 1 else nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


def blocks(count: int, shared: bool) -> list[Block]:
    return [Block()] * count if shared else [Block() for _ in range(count)]


class Hydra(nn.Module):
    """The released heads. embed: the base's embedding; a module adds it to the state dict, like the official copy.
    prefix: a one-layer LLaMA or None. shared: one repeated block.
    """

    def __init__(
        self, n_heads: int, n_layers: int, vocab: int, embed: Callable, *, grounded=True, prefix=None, shared=False
    ):
        super().__init__()
        self.grounded, self.input_embed_fn = grounded, embed
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for k in range(n_heads):
            layers = [Block(k + 2)] if grounded else []
            layers += blocks(n_layers - len(layers), shared)
            lm_head = nn.Linear(WIDTH, vocab)
            if prefix is not None:  # dropout before every block and the lm head shifts the indices
                layers = [module for layer in layers for module in (nn.Dropout(0.2), layer)]
                lm_head = nn.Sequential(nn.Dropout(0.2), lm_head)
            self.hydra_mlp.append(nn.Sequential(*layers))
            self.hydra_lm_head.append(lm_head)
        if prefix is not None:
            self.prefix_embeding_layer = prefix

    def forward(self, aux_hidden_states, tokens):
        if hasattr(self, "prefix_embeding_layer"):
            aux_hidden_states = self.prefix_embeding_layer(inputs_embeds=aux_hidden_states).last_hidden_state
        inputs, logits = aux_hidden_states, []
        for k, (mlp, lm_head) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            if self.grounded:  # head k at position t reads tokens t+1 ... t+1+k
                inputs = torch.cat([inputs, self.input_embed_fn(torch.roll(tokens, -(k + 1), dims=1))], dim=-1)
            logits.append(lm_head(mlp(inputs)))
        return torch.stack(logits)


def one_layer(config) -> LlamaModel:
    """The prefix layer of Hydra++. config: the base's, of transformers."""
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 1})
    config._attn_implementation = "eager"
    return LlamaModel(config)


class Medusa(nn.ModuleList):
    """Heads of Medusa v1 and text-generation-inference: blocks, then an lm head without bias."""

    def __init__(self, n_heads: int, n_layers: int, vocab: int, *, shared: bool = False):
        lm_head = {"in_features": WIDTH, "out_features": vocab, "bias": False}
        super().__init__(nn.Sequential(*blocks(n_layers, shared), nn.Linear(**lm_head)) for _ in range(n_heads))

    def forward(self, aux_hidden_states, tokens=None):
        return torch.stack([head(aux_hidden_states) for head in self])


class VLLMResidualBlock(nn.Module):
    def __init__(self, n_layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(n_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class VLLMMedusa(nn.Module):
    """vllm/model_executor/models/medusa.py, without its parallel layers and padding."""

    def __init__(self, n_heads: int, n_layers: int, vocab: int, *, bias: bool):
        super().__init__()
        self.blocks = nn.ModuleList(VLLMResidualBlock(n_layers, bias) for _ in range(n_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(WIDTH, vocab, bias=False) for _ in range(n_heads))

    def forward(self, aux_hidden_states, tokens=None):
        pairs = zip(self.blocks, self.lm_heads, strict=True)
        return torch.stack([lm_head(block(aux_hidden_states)) for block, lm_head in pairs])


class Medusa2(nn.Module):
    """The heads under their name in a Medusa-2 model."""

    def __init__(self, n_heads: int, n_layers: int):
        super().__init__()
        self.medusa_head = Medusa(n_heads, n_layers, VOCAB)

    def forward(self, aux_hidden_states, tokens=None):
        return self.medusa_head(aux_hidden_states)


def vllm(n_heads: int, n_layers: int, bias: bool) -> VLLMMedusa:
    return VLLMMedusa(n_heads, n_layers, VOCAB, bias=bias)


def randomise(module: nn.Module) -> nn.Module:
    """Return weights in the nonlinear range of SiLU; the base's embedding stays."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.startswith("input_embed_fn"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    return module.eval()


def save(directory: Path, state: dict, config: dict, kind: str = "safetensors") -> Path:
    """Write ``config.json`` and the tensors. kind: ``safetensors``, ``bin``, or shards of either with their index.

    ``bin`` means ``.pt`` for released Hydra and Medusa heads, as their official code saves them.
    """
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    suffix = kind.split()[0]
    stem = "pytorch_model" if suffix == "bin" else "model"
    if "hydra_num_heads" in config or ("medusa_num_heads" in config and "model_type" not in config):
        stem = "hydra_lm_head" if "hydra_num_heads" in config else "medusa_lm_head"
        suffix = "pt" if suffix == "bin" else suffix
    write = save_file if suffix == "safetensors" else torch.save
    if suffix == "safetensors":  # which refuses tensors that share memory
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


def hydra_config(n_heads: int, n_layers: int, arch: str = "mlp", grounded: bool = True) -> dict:
    config = {"hydra_num_heads": n_heads, "hydra_num_layers": n_layers, "hydra_head_arch": arch}
    return config | {"grounded_heads": grounded, "hidden_state_offset": 0}


def medusa_config(n_heads: int, n_layers: int) -> dict:
    return {"medusa_num_heads": n_heads, "medusa_num_layers": n_layers}


def vllm_config(n_heads: int, n_layers: int, **more) -> dict:
    sizes = {"num_heads": n_heads, "num_hidden_layers": n_layers, "hidden_size": WIDTH, "vocab_size": VOCAB}
    return {"architectures": ["MedusaModel"], "model_type": "medusa", "truncated_vocab_size": None} | sizes | more
