"""Random small models of every family, in transformers and here (float32)."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MuseGlimmerConfig,
    PreTrainedConfig,
)

from helpers import family_settings, gemma4_settings, latent_settings
from helpers.family_settings import SHARED, VOCAB, example
from helpers.lab import quick_jit
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.attention import causal_mask
from hydrajax.models.cache import append, init_cache
from hydrajax.models.llama import Llama
from hydrajax.models.packed_forward import run_base

FAMILIES = family_settings.FAMILIES | family_settings.EXPERT_FAMILIES | family_settings.HYBRID_FAMILIES
FAMILIES |= gemma4_settings.FAMILIES | latent_settings.FAMILIES
COVERED = ("mistral", "qwen2", "gemma4_unified_text")  # by examples of families that read more settings
EXAMPLES = {name: example(family) for name, family in FAMILIES.items() if name not in COVERED}
HYBRIDS = family_settings.HYBRID_FAMILIES.keys()
EXPERTS = family_settings.EXPERT_FAMILIES.keys() | latent_settings.FAMILIES.keys()
BIAS = ("e_score_correction_bias", "expert_bias")
MUSE_VISION = {
    "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 2,
    "pos_emb_height": 2, "pos_emb_width": 2,
}  # fmt: skip
TOLERANCE = 1e-4
N_TOKENS, N_CACHED = 44, 37  # of a text, and of its part in the cache
TREE = [-1, 0, 1, 2, 0, 4]  # parents of the nodes: the text continues along the first four
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, N_TOKENS)).astype(np.int32)


class Pair(NamedTuple):
    """One checkpoint in both packages."""

    theirs: torch.nn.Module
    model: Llama
    params: dict
    folder: Path

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return transformers' logits of whole texts."""
        with torch.no_grad():
            return self.theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def random_pair(
    folder: Path, model_type: str, settings: dict, seed: int = 7, dtype=torch.float32, fused: bool = False
) -> Pair:
    """Return a model with random weights, large enough for clear attention, saved by transformers and read by us.

    fused: the experts of a layer are one tensor of the file.
    """
    torch.manual_seed(seed)  # the rates of decay begin at random
    config = AutoConfig.for_model(model_type, **(SHARED | settings))
    whole = config if model_type != "muse_glimmer_text" else MuseGlimmerConfig(
        text_config=config, vision_config=MUSE_VISION, tie_word_embeddings=config.tie_word_embeddings,
        out_hidden_size=16, projector_hidden_size=8,
    )  # fmt: skip
    kind = AutoModelForCausalLM if whole is config else AutoModelForImageTextToText
    model = kind.from_config(whole, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise)
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):  # float32 in every file
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)
        elif name.endswith("layer_scalar"):
            buffer.data = (1 + 0.2 * torch.randn(buffer.shape, generator=generator)).to(dtype)
    model.save_pretrained(folder, save_original_format=not fused and model_type != "olmo_hybrid")
    if whole is not config:  # transformers has no class for its text part with an lm head
        _save_text_part(folder, config)
    return Pair(model.float(), *load_llama(folder), folder)


def _save_text_part(folder: Path, config: PreTrainedConfig) -> None:
    """Replace a multimodal checkpoint by its text part."""
    tensors = load_file(folder / "model.safetensors")
    text = {name.replace("language_model.", ""): x for name, x in tensors.items() if "language_model." in name}
    save_file(text | {name: x for name, x in tensors.items() if name == "lm_head.weight"}, folder / "model.safetensors")
    config.architectures = ["MuseGlimmerTextModel"]
    config.save_pretrained(folder)


def assert_equal_logits(pair: Pair, single: bool) -> None:
    """Compare the logits of a text, and of a tree over its first tokens, which are in the cache.

    single: also of one token instead of the tree.
    """
    model, params, tokens = pair.model, pair.params, TOKENS
    positions = np.broadcast_to(np.arange(N_TOKENS), tokens.shape)

    def run(params, tokens, positions, cache=None, *, mask):
        forward = model.apply({"params": params}, tokens, positions, mask, cache)
        return forward.block, model.apply({"params": params}, forward.hidden, method="logits")

    @quick_jit
    def text(params, lengths):
        return run(params, tokens, positions, mask=causal_mask(N_TOKENS, lengths))

    prefill, expected = text(params, np.full(2, N_TOKENS, np.int32))[1], pair.logits(tokens)

    counts = np.array([N_CACHED, N_CACHED - 5], np.int32)
    block = text(params, counts)[0]
    cache = append(init_cache(model.config, 2, N_TOKENS + 8, jnp.float32), block, jnp.asarray(counts))
    paths = [[0]]
    for node, parent in enumerate(TREE[1:], start=1):
        paths.append([*paths[parent], node])
    mask = np.zeros((len(TREE), len(TREE)), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    along = max(paths, key=len)
    nodes = np.stack([(tokens[row, :6] + 1) % VOCAB for row in range(2)])  # another text along the second branch
    for row, count in enumerate(counts):
        nodes[row, along] = tokens[row, count : count + len(along)]
    depths = np.array([len(path) - 1 for path in paths])
    tree = quick_jit(partial(run, mask=mask))(params, nodes, counts[:, None] + depths, cache)[1]
    by_node = np.zeros_like(tree)
    for row, count in enumerate(counts):
        for path in (along, paths[-1]):
            whole = np.concatenate([tokens[row, :count], nodes[row, path]])
            by_node[row, path] = pair.logits(whole[None])[0, count:]
    found = {"prefill": (np.asarray(prefill), expected), "tree": (np.asarray(tree), by_node)}
    if single:
        step = quick_jit(partial(run, mask=causal_mask(1)))
        logits = step(params, tokens[[0, 1], counts][:, None], counts[:, None], cache)[1]
        found["one token"] = np.asarray(logits[:, 0]), expected[[0, 1], counts]
    for what, (ours, theirs) in found.items():
        assert np.abs(theirs).max() > 1, what  # logits of realistic size
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0, err_msg=what)


@partial(jax.jit, static_argnums=0)
def logits_of(model: Llama, params: dict):
    hidden = run_base(model, params, TOKENS).hidden
    return model.apply({"params": params}, hidden, method="logits")


@contextmanager
def exact_recurrences() -> Iterator[None]:
    """Replace transformers' chunked recurrences, which lose up to 40 times as many digits, by its recurrent ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in family_settings.DELTA_MODULES:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield
