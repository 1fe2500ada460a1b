"""LoRA adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Reads any LoRA of linear layers, also with ranks and alphas that differ by layer; other settings are refused by name.
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import unsupported
from hydrajax.families.tensor_names import FUSED_MLP, in_files
from hydrajax.files import check_directory, whole_directory
from hydrajax.formats.tensors import TensorFiles, expect_tensors, open_tensors, read_json, save_safetensors
from hydrajax.models.adapter import KERNELS, MLP, TARGETS, Adapter, adapts_queries, check_adapter, part_shapes
from hydrajax.models.init import abstract_base
from hydrajax.models.layout import ADAPTER, leaf
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig

WHAT = "adapter"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's, of transformers' names
COPY = f"{PREFIX}lm_head.base_layer.weight"  # the base's lm head, which PEFT saves with an adapter of it
BLOCKS = {"qkv": "self_attn", "out": "self_attn", "gate_up": "mlp", "down": "mlp"}

# The supported values of fields that declare other methods.
_FALSE = ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "use_bdlora")
_EMPTY = ("modules_to_save", "layer_replication", "exclude_modules", "target_parameters", "alora_invocation_tokens")
_NONE = ("arrow_config", "kasa_config", "monteclora_config", "velora_config")
PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FALSE, (None, False)),
    **dict.fromkeys(_EMPTY, (None, [])),
    **dict.fromkeys(_NONE, (None,)),
    "bias": (None, "none"),
    "layers_pattern": (None, "", "layers", []),
    "trainable_token_indices": (None, [], {}),
}
# Initialisations that change the base's weights.
CHANGES_BASE = ("pissa", "loftq", "olora", "corda", "lora_ga")


class LinearLayer(NamedTuple):
    """A linear layer as the parts of our parameter ``kernel`` under ``path``: one, or several that files fuse (Phi 3).

    Attributes:
        features: The output features of each part, by its name in `TARGETS`.
        order: The places of ``q_proj`` in the files' order, where each query is followed by its gate; () for ours.
    """

    path: tuple[str, ...]
    kernel: str
    inputs: int
    features: dict[str, tuple[int, ...]]
    order: tuple[int, ...] = ()

    @property
    def n_outputs(self) -> int:
        """Number of output features."""
        return sum(map(math.prod, self.features.values()))


def linear_layers(base: LlamaConfig) -> dict[str, LinearLayer]:
    """Return all linear layers of a base of this shape that can be adapted, by transformers' names.

    An adapter does not reach experts (`check_adapter`) and layers that keep a state.
    """
    shapes = abstract_base(Llama(base))

    def layer(path, kernel, *targets):
        shape = leaf(shapes, (*path, kernel)).value.shape
        parts = part_shapes(kernel, shape)
        order = gated if kernel == "qkv" and base.attention_gate else ()
        return LinearLayer(path, kernel, shape[0], {target: parts[target] for target in targets}, order)

    gated = tuple(np.arange(2 * base.queries_per_kv).reshape(2, -1).T.ravel().tolist())
    found = {}
    for i in range(base.n_layers):
        for kernel, block in BLOCKS.items():
            left_out = (base.any_experts and block == "mlp") or (kernel == "qkv" and not adapts_queries(base))
            if left_out or kernel not in shapes[f"layers_{i}"]:
                continue
            targets = KERNELS[kernel][-1:] if base.activation == "relu2" and block == "mlp" else KERNELS[kernel]
            one = base.fused_projections or (block == "mlp" and base.names in FUSED_MLP)
            named = {f"{kernel}_proj": targets} if one and len(targets) > 1 else {t: (t,) for t in targets}
            for name, parts in named.items():
                theirs = in_files(f"model.layers.{i}.{block}.{name}", base)
                theirs = theirs.replace("backbone.", "model.")  # Nemotron-H's files have another name than its modules
                found[theirs] = layer((f"layers_{i}",), kernel, *parts)
    if not base.tied_lm_head:
        found["lm_head"] = layer((), "lm_head", "lm_head")
    return found


def save_adapter(
    directory: str | Path, adapter: Adapter, params: dict[str, Any], base: LlamaConfig, base_name: str = ""
) -> None:
    """Write an adapter for a base of this shape in float32; the directory is replaced.

    Args:
        params: As returned by `hydrajax.models.adapter.split_adapter`.
    """
    tensors, modules, fused = {}, {}, {}
    for name, layer in linear_layers(base).items():
        adapted = [target for target in layer.features if target in adapter.targets]
        if not adapted:
            continue
        own = leaf(params, layer.path)
        every = adapter.of(layer.kernel)
        a = [np.asarray(own[f"{layer.kernel}_lora_a"][:, every.index(target)], np.float32) for target in adapted]
        b = np.zeros((adapter.rank * len(adapted), layer.n_outputs), np.float32)
        at = 0
        for target, features in layer.features.items():
            end = at + math.prod(features)
            if target in adapted:  # each part has its own A, and so its own rows
                rows = adapter.rank * adapted.index(target)
                part = np.asarray(own[f"{layer.kernel}_lora_b_{target}"], np.float32)
                part = part[..., layer.order, :] if layer.order and target == "q_proj" else part
                b[rows : rows + adapter.rank, at:end] = part.reshape(adapter.rank, -1)
            at = end
        tensors[f"{PREFIX}{name}.lora_A.weight"] = np.concatenate(a, axis=1).T
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.T
        # In a hybrid the last part alone may also name a layer that keeps a state.
        module = ".".join(name.split(".")[-2 if base.any_recurrent else -1 :])
        modules[module] = None
        if len(adapted) > 1:
            fused[module] = len(adapted)
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "rank_pattern": {module: adapter.rank * parts for module, parts in fused.items()},
        "alpha_pattern": {module: alpha * parts for module, parts in fused.items()},
    }
    with whole_directory(directory, "export") as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_safetensors(folder / f"{ADAPTER}.safetensors", tensors)


class StoredAdapter(NamedTuple):
    """An adapter as read.

    Attributes:
        adapter: its settings, with the largest rank of all layers.
        params: as returned by `hydrajax.models.adapter.split_adapter`, float32, on the host.
        sha256: of its numbers, scales and ranks, by which heads recognise their adapter.
    """

    adapter: Adapter
    params: dict[str, Any]
    sha256: str


def load_adapter(directory: str | Path, base: LlamaConfig) -> StoredAdapter:
    """Read an adapter of a base of this shape.

    Smaller ranks are padded with zeros, and differing scales (alpha over rank) are multiplied into B.

    Raises:
        HydrajaxError: anything missing, damaged, of another base or not supported.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    raw = read_json(directory / CONFIG, WHAT)
    files, known = open_tensors(directory, ADAPTER, WHAT), linear_layers(base)
    other = sorted(_adapted_in(files) - known.keys())
    if base.any_recurrent and other:
        raise HydrajaxError(
            f"{WHAT}: {directory}: got '{other[0]}', expected layers of attention and MLPs, the only ones that are "
            "adapted in a hybrid"
        )
    try:
        _check_supported(raw)
        adapted = _adapted(raw, files, known)
        ranks = {name: int(_number(raw, "r", "rank_pattern", name)) for name in adapted}
        alphas = {name: _number(raw, "lora_alpha", "alpha_pattern", name) for name in adapted}
    except HydrajaxError as error:
        raise HydrajaxError(f"{WHAT}: {directory / CONFIG}: {error}") from None
    wanted = {}
    for name, rank in ranks.items():
        wanted[f"{PREFIX}{name}.lora_A.weight"] = (rank, known[name].inputs)
        wanted[f"{PREFIX}{name}.lora_B.weight"] = (known[name].n_outputs, rank)
    if COPY in files:
        wanted[COPY] = (base.vocab_size, base.width)
    expect_tensors(files, wanted, f"{WHAT}: {directory}")

    root = bool(raw.get("use_rslora"))  # alpha over the square root of the rank
    scales = {name: alphas[name] / (math.sqrt(ranks[name]) if root else ranks[name]) for name in adapted}
    largest, common = max(ranks.values()), set(scales.values())
    scale = common.pop() if len(common) == 1 else 1.0
    targets = tuple(target for target in TARGETS if any(target in known[name].features for name in adapted))
    adapter = Adapter(largest, scale * largest, float(raw.get("lora_dropout") or 0.0), targets)
    check_adapter(adapter, base)

    params: dict[str, Any] = {}
    digest = hashlib.sha256()
    for name, layer in known.items():
        if not layer.features.keys() & set(targets):
            continue
        own = params
        for step in layer.path:
            own = own.setdefault(step, {})
        among = adapter.of(layer.kernel)
        inputs = own.setdefault(f"{layer.kernel}_lora_a", np.zeros((layer.inputs, len(among), largest), np.float32))
        outputs = {
            target: own.setdefault(f"{layer.kernel}_lora_b_{target}", np.zeros((largest, *features), np.float32))
            for target, features in layer.features.items()
        }
        if name not in adapted:
            continue
        a, b = (np.asarray(files.read(f"{PREFIX}{name}.lora_{letter}.weight"), np.float32) for letter in "AB")
        digest.update(f"{name} {scales[name]!r} {ranks[name]}".encode() + a.tobytes() + b.tobytes())
        b = b if scales[name] == scale else b * np.float32(scales[name] / scale)
        ends = np.cumsum([math.prod(features) for features in layer.features.values()])
        for (target, features), part in zip(layer.features.items(), np.split(b, ends[:-1]), strict=True):
            inputs[:, among.index(target), : ranks[name]] = a.T
            part = part.T.reshape(-1, *features)
            part = part[..., np.argsort(layer.order), :] if layer.order and target == "q_proj" else part
            outputs[target][: ranks[name]] = part
    return StoredAdapter(adapter, params, digest.hexdigest())


def _check_supported(raw: dict) -> None:
    if (kind := raw.get("peft_type")) != "LORA":
        raise unsupported("peft_type", kind, "'LORA'")
    for name, plain in PLAIN.items():
        if raw.get(name) not in plain:
            raise unsupported(name, raw[name], repr(plain[-1]))
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise unsupported("init_lora_weights", start, "one that leaves the base's weights as they are")
    dropout = raw.get("lora_dropout") or 0.0
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise unsupported("lora_dropout", dropout, "a number from 0 up and below 1")


def _adapted(raw: dict, files: TensorFiles, known: dict[str, LinearLayer]) -> list[str]:
    """The names of the adapted layers, in the order of ``known``."""
    wanted, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if isinstance(wanted, str):  # a regular expression or "all-linear": read the tensors' names instead
        names = _adapted_in(files)
    elif isinstance(wanted, list) and wanted and all(isinstance(target, str) for target in wanted):
        names = set()
        for target in wanted:
            found = {name for name in known if f".{name}".endswith(f".{target}")}
            if not found:
                tied = " (this base has a tied lm head)" if target == "lm_head" else ""
                tied = " (this base's MLPs are experts)" if target in MLP else tied
                own = dict.fromkeys(part for layer in known.values() for part in layer.features)
                raise unsupported("target_modules", target, f"linear layers of this base{tied}: {', '.join(own)}")
            names |= {name for name in found if layers is None or _layer_number(name) in layers}
    else:
        raise unsupported("target_modules", wanted, "names of linear layers")
    adapted = [name for name in known if name in names]
    if not adapted:
        raise HydrajaxError("target_modules: no linear layer of this base is adapted")
    return adapted


def _adapted_in(files: TensorFiles) -> set[str]:
    """Return the names of the layers for which files have tensors."""
    return {re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(PREFIX)) for name in files if name != COPY}


def _layer_number(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def _number(raw: dict, field: str, pattern: str, name: str) -> float:
    """The positive number in ``field``, or of the first key of ``pattern`` that is a suffix of a layer's name."""
    value, patterns, source = raw.get(field), raw.get(pattern) or {}, field
    if not isinstance(patterns, dict):
        raise unsupported(pattern, patterns, "an object")
    for key, other in patterns.items():
        if not re.fullmatch(r"\^?[\w.]+", key):
            raise unsupported(pattern, key, "names of layers")
        if name == key.removeprefix("^") or (key[0] != "^" and f".{name}".endswith(f".{key}")):
            value, source = other, f"{pattern}: {key}"
            break
    kinds = (int,) if field == "r" else (int, float)
    if type(value) not in kinds or not 0 < value < 2**31:
        raise unsupported(source, value, f"a positive {'integer' if field == 'r' else 'number'}")
    return value
