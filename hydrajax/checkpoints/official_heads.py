"""Draft heads as the official Hydra and Medusa code released them (DESIGN section 4).

Hydra: ``config.json`` with ``hydra_num_heads, hydra_num_layers, hydra_head_arch, grounded_heads`` and
``hydra_lm_head.{safetensors,pt}``. Medusa v1: ``medusa_num_layers`` and ``medusa_lm_head.{safetensors,pt}``.
Keys and shapes are checked strictly; the files hold copies of the base's embedding, which are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.checkpoints.llama_hf import TensorFiles, check_directory, decoder_layer, expect_keys, read_json
from hydrajax.config import LlamaConfig
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.errors import HydrajaxError

WHAT = "--draft"
# Saved with the heads but not theirs: the base's embedding (twice) and a rotary buffer.
IGNORED = re.compile(r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
Shapes = dict[str, tuple[int, ...]]
Read = Callable[[str], np.ndarray]


class TorchTensors:
    """The tensors of a ``.pt`` file by name. Only tensors are unpickled (``weights_only=True``)."""

    def __init__(self, path: Path, what: str):
        try:
            import torch  # only here: a .pt file cannot be read without it
        except ImportError:
            raise HydrajaxError(
                f"{what}: reading {path.name} needs torch, which is not installed; install it or use .safetensors"
            ) from None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for a damaged or unsafe file
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise HydrajaxError(f"{what}: {path} is damaged or holds more than tensors: {reason}") from None
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
        ):
            raise HydrajaxError(f"{what}: {path} must hold a state dict of tensors")
        self._state = state

    def __iter__(self):
        return iter(self._state)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._state[key].shape)

    def read(self, key: str) -> np.ndarray:
        tensor = self._state[key].detach().contiguous()
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy gets its bfloat16 from ml_dtypes, torch does not know it
            import torch

            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()


def load_official_heads(directory: str | Path, base: LlamaConfig, dtype=jnp.float32):
    """``(drafter, draft_params)`` from a released Hydra or Medusa directory, for a base of this configuration."""
    directory = Path(directory)
    check_directory(directory, WHAT)
    config = read_json(directory / "config.json", WHAT)
    dtype = jnp.dtype(dtype)
    if "hydra_num_heads" in config:
        return _load_hydra(directory, config, base, dtype)
    if "medusa_num_heads" in config:
        return _load_medusa(directory, config, base, dtype)
    raise HydrajaxError(
        f"{WHAT}: {directory / 'config.json'} has neither 'hydra_num_heads' nor 'medusa_num_heads': "
        "not a released Hydra or Medusa directory"
    )


def _open(directory: Path, stem: str):
    for name in (f"{stem}.safetensors", f"{stem}.pt"):
        path = directory / name
        if path.is_file():
            return TensorFiles([path], WHAT) if path.suffix == ".safetensors" else TorchTensors(path, WHAT)
    raise HydrajaxError(f"{WHAT}: {directory} has neither {stem}.safetensors nor {stem}.pt")


def _integer(config: dict, field: str, least: int) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HydrajaxError(f"{WHAT}: config.json: {field} must be an integer from {least} up, found {value!r}")
    return value


def _same_base(tensors, lm_key: str, base: LlamaConfig) -> None:
    """Refuse heads of another base before any key is compared: the message should say what is wrong."""
    if lm_key not in tensors:
        raise HydrajaxError(f"{WHAT}: missing tensor '{lm_key}'")
    shape = tensors.shape(lm_key)
    for name, found, wanted in zip(("vocabulary", "width"), shape, (base.vocab_size, base.width), strict=False):
        if found != wanted:
            raise HydrajaxError(f"{WHAT}: the heads were made for another base: their {name} is {found}, not {wanted}")


def _blocks(read: Read, names: list[str]) -> tuple[dict, bool]:
    """Unconditioned blocks under our names. Equal copies of one released block become one shared block."""
    pairs = [(read(f"{name}.linear.weight"), read(f"{name}.linear.bias")) for name in names]
    shared = all(np.array_equal(a, b) for pair in pairs[1:] for a, b in zip(pair, pairs[0], strict=True))
    kept = pairs[:1] if shared else pairs
    return {f"blocks_{i}": {"kernel": w.T, "bias": b} for i, (w, b) in enumerate(kept)}, shared


def _to_device(params: dict, dtype) -> dict:
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x, dtype)), params)


def _merge_sharing(heads: list[tuple[dict, bool]], names: list[list[str]]) -> bool:
    """All heads must agree on sharing; a head whose blocks only happen to be equal is expanded to match."""
    shared = all(is_shared for _, is_shared in heads)
    if not shared:
        for (params, is_shared), blocks in zip(heads, names, strict=True):
            if is_shared:
                params |= {f"blocks_{i}": params["blocks_0"] for i in range(len(blocks))}
    return shared


def _load_medusa(directory: Path, config: dict, base: LlamaConfig, dtype):
    n_layers = _integer(config, "medusa_num_layers", 1)
    tensors = _open(directory, "medusa_lm_head")
    # The released config.json may declare fewer heads than the file holds: trust the file.
    n_heads = len({key.split(".")[0] for key in tensors if key.split(".")[0].isdigit()})
    if n_heads == 0:
        raise HydrajaxError(f"{WHAT}: {directory} holds no tensor named like '0.0.linear.weight': not Medusa v1 heads")
    _same_base(tensors, f"0.{n_layers}.weight", base)
    names = [[f"{k}.{layer}" for layer in range(n_layers)] for k in range(n_heads)]
    wanted: Shapes = {}
    for k in range(n_heads):
        for name in names[k]:
            wanted |= {f"{name}.linear.weight": (base.width, base.width), f"{name}.linear.bias": (base.width,)}
        wanted[f"{k}.{n_layers}.weight"] = (base.vocab_size, base.width)
    expect_keys({key: tensors.shape(key) for key in tensors}, wanted, f"{WHAT}: {directory}", IGNORED)

    heads = [_blocks(tensors.read, names[k]) for k in range(n_heads)]
    shared = _merge_sharing(heads, names)
    params = {}
    for k, (blocks, _) in enumerate(heads):
        params[f"head_{k}"] = blocks | {"lm_kernel": tensors.read(f"{k}.{n_layers}.weight").T}
    drafter = MedusaHeads(n_heads, base.width, base.vocab_size, n_layers, shared, dtype=dtype)
    return drafter, _to_device(params, dtype)


# hydra_head_arch -> (modules per block in the released nn.Sequential, lm head key suffix): the prefix heads put a
# dropout before every block and lm head, so their indices are 1, 3, 5 ... and "hydra_lm_head.k.1".
_HYDRA_LAYOUTS = {"mlp": (1, ""), "prefix-mlp": (2, ".1")}


def _load_hydra(directory: Path, config: dict, base: LlamaConfig, dtype):
    arch = config.get("hydra_head_arch", "mlp")
    if not isinstance(arch, str) or arch not in _HYDRA_LAYOUTS:
        allowed = ", ".join(f"'{name}'" for name in _HYDRA_LAYOUTS)
        raise HydrajaxError(f"{WHAT}: config.json: hydra_head_arch is '{arch}', supported are {allowed}")
    stride, lm_suffix = _HYDRA_LAYOUTS[arch]
    n_heads, n_layers = _integer(config, "hydra_num_heads", 1), _integer(config, "hydra_num_layers", 1)
    grounded = bool(config.get("grounded_heads", False))
    offset = _integer(config, "hidden_state_offset", 0) if "hidden_state_offset" in config else 0
    if offset > base.n_layers:
        raise HydrajaxError(
            f"{WHAT}: config.json: hidden_state_offset {offset} exceeds the base's {base.n_layers} layers"
        )
    tensors = _open(directory, "hydra_lm_head")
    _same_base(tensors, f"hydra_lm_head.0{lm_suffix}.weight", base)

    width, names = base.width, []
    wanted: Shapes = {}
    for k in range(n_heads):
        blocks = [f"hydra_mlp.{k}.{stride * layer + stride - 1}" for layer in range(n_layers)]
        if grounded:
            conditioned = blocks.pop(0)
            for part in ("linear", "res_connection"):
                wanted |= {
                    f"{conditioned}.{part}.weight": (width, (k + 2) * width),
                    f"{conditioned}.{part}.bias": (width,),
                }
        for name in blocks:
            wanted |= {f"{name}.linear.weight": (width, width), f"{name}.linear.bias": (width,)}
        lm_head = f"hydra_lm_head.{k}{lm_suffix}"
        wanted |= {f"{lm_head}.weight": (base.vocab_size, width), f"{lm_head}.bias": (base.vocab_size,)}
        names.append(blocks)
    layer_keys, assemble_layer = decoder_layer("prefix_embeding_layer.layers.0.", base)
    if arch == "prefix-mlp":
        wanted |= layer_keys | {"prefix_embeding_layer.norm.weight": (width,)}
    expect_keys({key: tensors.shape(key) for key in tensors}, wanted, f"{WHAT}: {directory}", IGNORED)

    read = tensors.read
    heads = [_blocks(read, names[k]) for k in range(n_heads)]
    shared = _merge_sharing(heads, names)
    params = {}
    for k, (blocks, _) in enumerate(heads):
        lm_head = f"hydra_lm_head.{k}{lm_suffix}"
        params[f"head_{k}"] = blocks | {"lm_kernel": read(f"{lm_head}.weight").T, "lm_bias": read(f"{lm_head}.bias")}
        if grounded:
            conditioned = f"hydra_mlp.{k}.{stride - 1}"
            parts = ("linear", "res_connection")
            kernel = np.stack([read(f"{conditioned}.{part}.weight").T for part in parts], axis=1)
            block = {
                "shared_kernel": kernel[: 2 * width],
                "bias": np.stack([read(f"{conditioned}.{part}.bias") for part in parts]),
            }
            if k > 0:
                block["path_kernel"] = kernel[2 * width :]
            params[f"head_{k}"]["conditioned"] = block
    if grounded:
        drafter = HydraHeads(n_heads, width, base.vocab_size, n_layers, shared, offset, dtype)
    else:
        drafter = MedusaHeads(n_heads, width, base.vocab_size, n_layers, shared, True, offset, dtype)
    if arch == "prefix-mlp":
        drafter = WithPrefix(drafter, base)
        norm = {"scale": read("prefix_embeding_layer.norm.weight")}
        params = {"prefix": {"layer": assemble_layer(read), "norm": norm}, "heads": params}
    return drafter, _to_device(params, dtype)
