"""Draft heads as other programs wrote them (DESIGN section 4): Hydra, Medusa v1 and Medusa-2, vLLM's Medusa.

Hydra: ``config.json`` with ``hydra_num_heads, hydra_num_layers, hydra_head_arch, grounded_heads`` and
``hydra_lm_head.{safetensors,pt}``. Medusa v1: ``medusa_num_layers`` and ``medusa_lm_head.{safetensors,pt}``. Medusa-2:
the same fields beside a whole model, whose ``medusa_head.`` tensors are the heads. vLLM: ``model_type`` medusa.
Keys and shapes are checked strictly; the files hold copies of the base's embedding, which are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.checkpoints.heads.layouts import (
    VLLM_NAMING,
    Naming,
    heads_layout,
    hydra_layout,
    hydra_naming,
    medusa_naming,
)
from hydrajax.checkpoints.tensors import TensorFiles, expect_tensors, holds_model, open_model, open_one
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.errors import HydrajaxError
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layout import Layout, read, shapes

WHAT = "--draft"
# Saved with Hydra heads but not theirs: the base's embedding (twice) and a rotary buffer.
NOT_HYDRAS = r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)"
MEDUSA_2 = "medusa_head."  # what the names of its heads begin with, beside the base's


def load_hydra(directory: Path, config: dict, base: LlamaConfig, dtype):
    """``(drafter, draft_params)`` from a released Hydra directory, for a base of this configuration.

    dtype: of parameters and computation; None keeps that of the file.
    """
    arch = config.get("hydra_head_arch", "mlp")
    if not isinstance(arch, str) or arch not in ("mlp", "prefix-mlp"):
        raise HydrajaxError(f"{WHAT}: config.json: hydra_head_arch is '{arch}', supported are 'mlp', 'prefix-mlp'")
    n_heads, n_layers = integer(config, "hydra_num_heads", 1), integer(config, "hydra_num_layers", 1)
    offset = integer(config, "hidden_state_offset", 0) if "hidden_state_offset" in config else 0
    if offset > base.n_layers:
        raise HydrajaxError(
            f"{WHAT}: config.json: hidden_state_offset {offset} exceeds the base's {base.n_layers} layers"
        )
    files = open_one(directory, "hydra_lm_head", WHAT)
    prefix = base if arch == "prefix-mlp" else None
    naming = hydra_naming(prefix is not None)
    _same_base(files, f"{naming.lm_head(0)}.weight", base)

    def heads(shared: bool, dtype):
        sizes = (n_heads, base.width, base.vocab_size, n_layers, shared)
        if config.get("grounded_heads", False):
            return HydraHeads(*sizes, offset, dtype)
        return MedusaHeads(*sizes, True, offset, dtype)

    def layout(heads):
        return hydra_layout(heads, prefix)

    found, params = _load(directory, files, heads, layout, naming, dtype, NOT_HYDRAS)
    return (found if prefix is None else WithPrefix(found, base)), params


def load_medusa(directory: Path, config: dict, base: LlamaConfig, dtype):
    """Medusa v1 heads, or those of a Medusa-2 checkpoint, which lie beside their base; as `load_hydra`."""
    alone = any((directory / f"medusa_lm_head.{suffix}").is_file() for suffix in ("safetensors", "pt"))
    if alone or not holds_model(directory):
        files, prefix, ignored = open_one(directory, "medusa_lm_head", WHAT), "", ""
    else:
        files, prefix, ignored = open_model(directory, WHAT), MEDUSA_2, f"(?!{re.escape(MEDUSA_2)}).*"
    # The released config.json may declare fewer heads than the file holds: trust the file.
    n_heads = len({match[1] for match in _matches(files, re.escape(prefix) + r"([0-9]{1,4})\..*")})
    if n_heads == 0:
        raise HydrajaxError(
            f"{WHAT}: {directory} holds no tensor named like '{prefix}0.0.linear.weight': not Medusa heads"
        )
    lm_heads = _matches(files, re.escape(prefix) + r"[0-9]+\.([0-9]{1,4})\.weight")
    if not lm_heads:
        raise HydrajaxError(
            f"{WHAT}: {directory} holds Medusa heads without lm heads of their own (config.json's version 2), "
            "supported are those with them"
        )
    # Some released Medusa-2 configurations do not mention the heads at all.
    if "medusa_num_layers" in config:
        n_layers = integer(config, "medusa_num_layers", 1)
    else:
        n_layers = min(int(lm_heads[0][1]), len(files))
    return _load_medusa(directory, files, n_heads, n_layers, medusa_naming(n_layers, prefix), base, dtype, ignored)


def load_vllm_medusa(directory: Path, config: dict, base: LlamaConfig, dtype):
    """Heads in vLLM's layout, of which ``config.json`` gives their number and layers; as `load_hydra`."""
    n_heads, n_layers = integer(config, "num_heads", 1), integer(config, "num_hidden_layers", 1)
    for field, allowed in (
        ("truncated_vocab_size", (None, base.vocab_size)),
        ("original_lm_head", (None, False)),
        ("logit_scale", (None, 1)),
    ):
        if config.get(field) not in allowed:
            raise HydrajaxError(
                f"{WHAT}: config.json: {field} is {config[field]!r}, allowed is {allowed[-1]!r}: each head has an lm "
                "head of its own over the base's whole vocabulary"
            )
    files = open_model(directory, WHAT)
    bias = config.get("medusa_fc_bias", False) is True
    return _load_medusa(directory, files, n_heads, n_layers, VLLM_NAMING, base, dtype, block_bias=bias)


def _load_medusa(directory, files, n_heads, n_layers, naming, base: LlamaConfig, dtype, ignored="", block_bias=True):
    _same_base(files, f"{naming.lm_head(0)}.weight", base)

    def heads(shared: bool, dtype):
        return MedusaHeads(n_heads, base.width, base.vocab_size, n_layers, shared, dtype=dtype)

    def layout(heads):
        return heads_layout(heads, naming, block_bias=block_bias)

    return _load(directory, files, heads, layout, naming, dtype, ignored)


def _load(
    directory: Path,
    files: TensorFiles,
    heads_of: Callable,
    layout_of: Callable[..., Layout],
    naming: Naming,
    dtype,
    ignored: str,
):
    """Check the files and read them. Blocks that are copies of one another in every head become one shared block."""
    heads = heads_of(False, jnp.float32)
    if heads.n_heads * heads.n_layers > len(files):  # or a slip in a number would have us list millions of names
        raise HydrajaxError(
            f"{WHAT}: {directory} has {len(files)} tensors, too few for {heads.n_heads} heads x {heads.n_layers} blocks"
        )
    expect_tensors(files, shapes(layout_of(heads)), f"{WHAT}: {directory}", re.compile(ignored or "(?!)"))
    own = jnp.dtype(files.dtype(f"{naming.lm_head(0)}.weight")) if dtype is None else dtype
    heads = heads_of(_blocks_are_copies(heads, naming, files), own)
    params = read(layout_of(heads), files, lambda path, array: {path[-1]: jax.device_put(np.asarray(array, dtype))})
    return heads, params


def _blocks_are_copies(heads, naming: Naming, files: TensorFiles) -> bool:
    def copies(names: list[str]) -> bool:
        first = files.read(names[0])
        return all(np.array_equal(first, files.read(name)) for name in names[1:])

    for k in range(heads.n_heads):
        plain = range(heads.n_layers - heads.head(k).n_plain, heads.n_layers)
        for part in ("weight", "bias"):
            names = [f"{naming.block(k, i)}{naming.linear}.{part}" for i in plain]
            if len(names) > 1 and names[0] in files and not copies(names):
                return False
    return True


def _matches(files: TensorFiles, pattern: str) -> list[re.Match]:
    return [match for key in files if (match := re.fullmatch(pattern, key))]


def integer(config: dict, field: str, least: int) -> int:
    """A whole number that config.json must hold."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HydrajaxError(f"{WHAT}: config.json: {field} must be an integer from {least} up, found {value!r}")
    return value


def _same_base(files: TensorFiles, lm_key: str, base: LlamaConfig) -> None:
    """Refuse heads of another base before any key is compared: the message should say what is wrong."""
    if lm_key not in files:
        raise HydrajaxError(f"{WHAT}: missing tensor '{lm_key}'")
    check_sizes(files.shape(lm_key), base)


def check_sizes(found_sizes: tuple[int, ...], base: LlamaConfig) -> None:
    """Refuse heads whose vocabulary and width, the shape of an lm head, are not this base's."""
    for name, found, wanted in zip(("vocabulary", "width"), found_sizes, (base.vocab_size, base.width), strict=False):
        if found != wanted:
            raise HydrajaxError(f"{WHAT}: the heads were made for another base: their {name} is {found}, not {wanted}")
