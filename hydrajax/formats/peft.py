"""Adapters (LoRA) as PEFT keeps them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

Reads every LoRA of the linear layers of a LLaMA-family base, also with other ranks and alphas for some of them; what it
does not implement it refuses by name. It writes what it reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.files import check_directory, whole_directory
from hydrajax.formats.tensors import expect_tensors, open_tensors, read_json, save_safetensors
from hydrajax.models.adapter import KERNELS, TARGETS, Adapter, check_adapter
from hydrajax.models.base_model import abstract_base
from hydrajax.models.layout import ADAPTER, leaf
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import part_shapes

WHAT = "adapter"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's, before the name that a layer has in transformers
COPY = f"{PREFIX}lm_head.base_layer.weight"  # of the base's lm head, which PEFT saves beside an adapter of it
BLOCKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn")
BLOCKS |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")

# Fields that must say nothing, or what is given here, and what others would mean.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "layers_pattern": (None, "", "layers", []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "use_bdlora": (None, False),
}
# Ways of beginning that change the base's own weights, without which the adapter is not what it was.
CHANGES_BASE = ("pissa", "loftq", "olora", "corda", "lora_ga")


class Place(NamedTuple):
    """A linear layer: ``path`` leads to our parameters beside its kernel, ``kernel`` is the kernel's name there."""

    path: tuple[str, ...]
    kernel: str
    target: str
    shape: tuple[int, ...]  # of the kernel

    @property
    def inputs(self) -> int:
        return self.shape[0]

    @property
    def features(self) -> tuple[int, ...]:
        return part_shapes(self.kernel, self.shape)[self.target]


def places(base: LlamaConfig) -> dict[str, Place]:
    """Every linear layer that a base of this shape has, by transformers' name."""
    shapes = abstract_base(Llama(base))
    found = {}
    for i in range(base.n_layers):
        for target, block in BLOCKS.items():
            kernel = next(kernel for kernel, targets in KERNELS.items() if target in targets)
            shape = leaf(shapes, (f"layers_{i}", kernel)).value.shape
            found[f"model.layers.{i}.{block}.{target}"] = Place((f"layers_{i}",), kernel, target, shape)
    if not base.tied_lm_head:
        found["lm_head"] = Place((), "lm_head", "lm_head", shapes["lm_head"].value.shape)
    return found


def save_adapter(
    directory: str | Path, adapter: Adapter, params: dict[str, Any], base: LlamaConfig, base_name: str = ""
) -> None:
    """Write an adapter as PEFT does, in float32; a directory of that name is replaced.

    params: as `hydrajax.models.adapter.split_adapter` gives them. base: the shape of the base it lies beside.
    """
    tensors = {}
    for name, place in places(base).items():
        if place.target in adapter.targets:
            beside = leaf(params, place.path)
            a = beside[f"{place.kernel}_lora_a"][:, adapter.of(place.kernel).index(place.target)]
            b = beside[f"{place.kernel}_lora_b_{place.target}"].reshape(adapter.rank, -1)
            for letter, matrix in (("A", a), ("B", b)):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = np.asarray(matrix, np.float32).T
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": [target for target in TARGETS if target in adapter.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    with whole_directory(directory, "export") as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_safetensors(folder / f"{ADAPTER}.safetensors", tensors)


class Stored(NamedTuple):
    """An adapter as it was read.

    adapter: its settings, with the largest rank of any layer. params: as `hydrajax.models.adapter.split_adapter` gives
    them, float32, on the host. sha256: of the numbers that it adds, by which heads know the adapter they belong to.
    """

    adapter: Adapter
    params: dict[str, Any]
    sha256: str


def load_adapter(directory: str | Path, base: LlamaConfig) -> Stored:
    """Read the adapter of a base of this shape.

    A layer of a smaller rank than others has zeros for the rest, and where scales (alpha over rank) differ they are
    multiplied into B. Raises `HydrajaxError` for what is missing, damaged, of another base or not supported.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    raw = read_json(directory / CONFIG, WHAT)
    what = f"{WHAT}: {directory / CONFIG}"
    _check_supported(raw, what)
    files, known = open_tensors(directory, ADAPTER, WHAT), places(base)
    adapted = _adapted(raw, files, known, what)
    ranks = {name: _number(raw, "r", "rank_pattern", name, what) for name in adapted}
    ranks = {name: int(rank) for name, rank in ranks.items()}
    wanted = {}
    for name, rank in ranks.items():
        wanted[f"{PREFIX}{name}.lora_A.weight"] = (rank, known[name].inputs)
        wanted[f"{PREFIX}{name}.lora_B.weight"] = (math.prod(known[name].features), rank)
    if COPY in files:
        wanted[COPY] = (base.vocab_size, base.width)
    expect_tensors(files, wanted, f"{WHAT}: {directory}")

    alphas = {name: _number(raw, "lora_alpha", "alpha_pattern", name, what) for name in adapted}
    root = bool(raw.get("use_rslora"))  # alpha over the square root of the rank
    scales = {name: alphas[name] / (math.sqrt(ranks[name]) if root else ranks[name]) for name in adapted}
    largest, common = max(ranks.values()), set(scales.values())
    scale = common.pop() if len(common) == 1 else 1.0
    dropout = raw.get("lora_dropout") or 0.0
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise HydrajaxError(f"{what}: lora_dropout is {dropout!r}, allowed is a number from 0 up and below 1")
    targets = tuple(target for target in TARGETS if target in {known[name].target for name in adapted})
    adapter = Adapter(largest, scale * largest, float(dropout), targets)
    check_adapter(adapter, base)

    params: dict[str, Any] = {}
    digest = hashlib.sha256()
    for name, place in known.items():
        if place.target not in targets:
            continue
        at = params
        for step in place.path:
            at = at.setdefault(step, {})
        among = adapter.of(place.kernel)
        inputs = at.setdefault(f"{place.kernel}_lora_a", np.zeros((place.inputs, len(among), largest), np.float32))
        outputs = at[f"{place.kernel}_lora_b_{place.target}"] = np.zeros((largest, *place.features), np.float32)
        if name not in adapted:
            continue
        a, b = (np.asarray(files.read(f"{PREFIX}{name}.lora_{letter}.weight"), np.float32) for letter in "AB")
        digest.update(f"{name} {scales[name]!r} {ranks[name]}".encode() + a.tobytes() + b.tobytes())
        inputs[:, among.index(place.target), : ranks[name]] = a.T
        b = b if scales[name] == scale else b * np.float32(scales[name] / scale)
        outputs[: ranks[name]] = b.T.reshape(-1, *place.features)
    return Stored(adapter, params, digest.hexdigest())


def _check_supported(raw: dict, what: str) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise HydrajaxError(f"{what}: peft_type is {kind!r}, supported is 'LORA'")
    for name, plain in PLAIN.items():
        if raw.get(name) not in plain:
            raise HydrajaxError(f"{what}: {name} is {raw[name]!r}, supported is {plain[-1]!r}")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise HydrajaxError(f"{what}: init_lora_weights is {start!r}, which changes the base's own weights")


def _adapted(raw: dict, files, known: dict[str, Place], what: str) -> list[str]:
    """The names of the linear layers that the adapter changes."""
    wanted = raw.get("target_modules")
    if isinstance(wanted, str):
        # A regular expression, or "all-linear": the tensors say more plainly which they are.
        names = [re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(PREFIX)) for name in files]
        adapted = [name for name in known if name in names]
    elif isinstance(wanted, list) and wanted and all(isinstance(target, str) for target in wanted):
        layers = raw.get("layers_to_transform")
        layers = [layers] if type(layers) is int else layers
        adapted = []
        for target in wanted:
            found = [name for name in known if f".{name}".endswith(f".{target}")]
            if not found:
                allowed = ", ".join(TARGETS)
                tied = " (its lm head is the embedding)" if target == "lm_head" else ""
                raise HydrajaxError(
                    f"{what}: target_modules has '{target}', no linear layer of this base{tied}: {allowed}"
                )
            adapted += found
        adapted = [name for name in known if name in adapted and (layers is None or _layer(name) in layers)]
    else:
        raise HydrajaxError(f"{what}: target_modules is {wanted!r}, supported are names of linear layers")
    if not adapted:
        raise HydrajaxError(f"{what}: changes no linear layer of this base")
    return adapted


def _layer(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def _number(raw: dict, field: str, pattern: str, name: str, what: str) -> float:
    """A positive number of ``field``, or of the first name in ``pattern`` that a layer's name ends in."""
    value, patterns = raw.get(field), raw.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise HydrajaxError(f"{what}: {pattern} is {patterns!r}, supported is an object")
    source = field
    for key, other in patterns.items():
        if not re.fullmatch(r"\^?[\w.]+", key):
            raise HydrajaxError(f"{what}: {pattern} has {key!r}, supported are names of layers")
        if name == key.removeprefix("^") or (key[0] != "^" and f".{name}".endswith(f".{key}")):
            value, source = other, f"{pattern}: {key}"
            break
    whole = field == "r"
    if type(value) not in ((int,) if whole else (int, float)) or not 0 < value < 2**31:
        raise HydrajaxError(
            f"{what}: {source} is {value!r}, supported is a positive {'integer' if whole else 'number'}"
        )
    return value
