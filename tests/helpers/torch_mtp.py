"""Bases with an MTP module in their files, and the module in torch from its published formulas.

The decoder layer with its attention and rotary embedding is transformers'. The formulas are those of DeepSeek-V3 2.2
and of the checkpoints' own code (MiMo's and GLM-4.5's layouts).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

VOCAB, WIDTH, LAYERS = 61, 32, 2
SETTINGS = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
    "rope_theta": 640.0, "tie_word_embeddings": False,
}  # fmt: skip
# By layout: the prefix, the names of the parts, which input comes first, and which hidden state is read.
LAYOUTS = {
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "hidden",
        "before the final norm",
    ),
    "nextn": (
        f"model.layers.{LAYERS}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "embedding",
        "after the final norm",
    ),
}


class Module:
    """A base with an MTP module.

    Attributes:
        base: transformers' model.
        tensors: the module's tensors by name in the file.
    """

    def __init__(self, layout: str):
        torch.manual_seed(0)
        self.layout = layout
        self.prefix, parts, self.first, self.reads = LAYOUTS[layout]
        config = Qwen2Config(**SETTINGS, initializer_range=0.2, attn_implementation="eager")
        self.base = Qwen2ForCausalLM(config).eval().requires_grad_(False)
        self.layer = Qwen2DecoderLayer(config, layer_idx=0).eval().requires_grad_(False)
        for named in (self.base, self.layer):
            for name, x in named.named_parameters():
                x.copy_(torch.randn_like(x) * 0.2 + (1.0 if "norm" in name else 0.0))
        self.weights = {name: 1 + 0.2 * torch.randn(WIDTH) for name in parts} | {
            parts[2]: 0.2 * torch.randn(WIDTH, 2 * WIDTH)
        }
        self.parts = parts
        own = {f"{name}.weight": x for name, x in self.weights.items()} | self.layer.state_dict()
        self.tensors = {f"{self.prefix}{name}": x for name, x in own.items()}

    def save(self, directory: Path, **changes) -> Path:
        """Write the base's directory with the module; ``changes`` are tensors (None removes) of the module."""
        directory.mkdir()
        tensors = self.base.state_dict() | self.tensors
        for name, x in changes.items():
            tensors[f"{self.prefix}{name}"] = x
        tensors = {name: x.contiguous() for name, x in tensors.items() if x is not None}
        save_file(tensors, directory / "model.safetensors")
        kind = {"mimo": "mimo", "nextn": "qwen2"}[self.layout]
        more = {"model_type": kind, "num_nextn_predict_layers": 1, "use_sliding_window": False}
        more |= {"attention_bias": True} if kind == "mimo" else {}
        (directory / "config.json").write_text(json.dumps(SETTINGS | more))
        return directory

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Return the base's hidden states that the module reads, ``[T, D]``."""
        seen = []
        hook = self.base.model.norm.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
        self.base(torch.tensor([tokens]))
        hook.remove()
        return seen[0 if self.reads == "before the final norm" else 1][0]

    def outputs(self, hidden: torch.Tensor, following: list[int]) -> torch.Tensor:
        """Return h' at every position; ``following[i]`` is the token after position i."""
        first, second, projection, last = self.parts
        embedding = normed(self.base.model.embed_tokens(torch.tensor(following)), self.weights[first])
        state = normed(hidden, self.weights[second])
        both = [embedding, state] if self.first == "embedding" else [state, embedding]
        x = (torch.cat(both, dim=-1) @ self.weights[projection].T)[None]
        places = torch.arange(len(following))[None]
        hides = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
        turned = self.base.model.rotary_emb(x, places)
        out = self.layer(x, attention_mask=hides, position_ids=places, position_embeddings=turned)
        return normed((out[0] if isinstance(out, tuple) else out)[0], self.weights[last])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs @ self.base.lm_head.weight.T

    def chain(self, tokens: list[int], guesses: list[int]) -> torch.Tensor:
        """Return logits ``[1 + guesses, V]`` for the tokens after ``tokens[-1]``, each after the guesses before it."""
        hidden, found = self.hidden(tokens[:-1]), []
        for k in range(len(guesses) + 1):
            following = tokens[1:] + guesses[:k]
            outputs = self.outputs(hidden, following)
            found.append(self.logits(outputs[-1]))
            hidden = torch.cat([hidden, outputs[-1:]])
        return torch.stack(found)

    def greedy_chain(self, tokens: list[int], n: int) -> list[int]:
        """Return n drafted tokens after ``tokens``."""
        guesses: list[int] = []
        for _ in range(n):
            guesses.append(int(self.chain(tokens, guesses)[-1].argmax()))
        return guesses


def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + SETTINGS["rms_norm_eps"]) * scale
