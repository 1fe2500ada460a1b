"""Everything a training run is told, read from one YAML file with strict keys.

Every section is a frozen dataclass whose fields are the YAML keys; `load_config` is the only way in. What a run may
contradict itself in is refused here, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrajax.drafters.settings import Settings, at_least, below, one_of
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.formats import draft_registry
from hydrajax.models.adapter import Adapter
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import QUANTIZED
from hydrajax.train.data.conversations import FORMATS as CONVERSATION_FORMATS
from hydrajax.train.losses import Objective


@dataclass(frozen=True)
class DraftConfig:
    """Which heads to train. In the file the settings stand beside ``heads`` and ``init`` (`draft_of`).

    heads: a kind of `hydrajax.formats.draft_registry.HEADS`; Hydra++ is ``hydra`` with 4 layers and ``prefix``. init: a
    directory of released or exported heads to start from, instead of fresh ones. settings: of the kind's ``Settings``.
    """

    heads: str = "hydra"
    init: str | None = None
    settings: Settings = field(default_factory=draft_registry.HEADS["hydra"].Settings)

    def keys(self) -> dict[str, Any]:
        """Return the section of a file that says this, with the defaults of keys that only other kinds have."""
        defaults = {name: default for name, (_, default) in DRAFT_KEYS.items()}
        return {"heads": self.heads, "init": self.init} | defaults | dataclasses.asdict(self.settings)


# The types and defaults of all kinds' settings.
DRAFT_KEYS = {
    f.name: (typing.get_type_hints(kind.Settings)[f.name], f.default)
    for kind in draft_registry.HEADS.values()
    for f in dataclasses.fields(kind.Settings)
}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up from 0 to ``lr``, then a decay to ``final_fraction * lr``; the Hydra++ recipe by default.

    ``muon`` orthogonalises the update of every weight matrix but embeddings and lm heads, which stay with Adam; its
    updates are scaled to the size of Adam's, so ``lr`` means the same. It makes a base from scratch learn faster.
    Norm scales and biases do not decay. ``clip_norm``: of the global gradient norm, null for none.
    """

    name: str = "adamw"
    lr: float = 5e-4
    schedule: str = "cosine"
    warmup_steps: int = 100
    final_fraction: float = 0.33
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    clip_norm: float | None = 1.0

    def __post_init__(self):
        one_of("optimizer.name", self.name, ("adamw", "muon"))
        one_of("optimizer.schedule", self.schedule, ("cosine", "linear", "constant"))
        if not 0 < self.lr < float("inf"):
            raise HydrajaxError(f"optimizer.lr: must be positive, found {self.lr}")
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if not 0 <= self.final_fraction <= 1:
            raise HydrajaxError(f"optimizer.final_fraction: must be from 0 to 1, found {self.final_fraction}")
        below("optimizer.b1", self.b1, 1)
        below("optimizer.b2", self.b2, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise HydrajaxError(f"optimizer.clip_norm: must be positive or null, found {self.clip_norm}")


@dataclass(frozen=True)
class JointConfig:
    """Medusa-2: heads and base together, the base by its adapter (medusa 2.2.2). The loss is
    base_weight · (loss of the base) + λ0 · (loss of the heads, `Objective`).

    distill:           the base learns the distribution that it has without the adapter, KL(original ‖ adapted)
                       (2.3.2), in place of the text's next tokens.
    heads_weight:      λ0, 0.2 where the paper trains on the text and 0.01 where it distills (B.3, B.4).
    heads_alone_steps: first the heads are trained alone and the adapter stays as it is (2.2.2, heads warm-up).
    rise_steps:        thereafter λ0 rises from 0 over so many steps along a quarter of a sine (B.4); 0 for at once.
    heads_lr_multiple: the heads' learning rate is so many times `OptimizerConfig.lr`, which is the adapter's (B.2).
    remat:             keep only the inputs of the base's layers for the way back and compute the rest again: another
                       forward pass, and of 7B, per layer and row of 2048 tokens, 36 MB in place of 1.7 GB. XLA's CPU
                       compiler undoes it.
    """

    distill: bool = False
    base_weight: float = 1.0
    heads_weight: float = 0.2
    heads_alone_steps: int = 0
    rise_steps: int = 0
    heads_lr_multiple: float = 4.0
    remat: bool = False

    def __post_init__(self):
        for name in ("base_weight", "heads_weight", "heads_lr_multiple"):
            if not 0 < getattr(self, name) < float("inf"):
                raise HydrajaxError(f"joint.{name}: must be positive, found {getattr(self, name)}")
        at_least("joint.heads_alone_steps", self.heads_alone_steps, 0)
        at_least("joint.rise_steps", self.rise_steps, 0)


FORMATS = (*CONVERSATION_FORMATS, "text", "standard_library", "generations")


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and how it is cut into rows.

    files:       JSON, JSONL or text files and folders. Not needed for ``standard_library``, the running Python's own.
    dataset:     a name for `datasets.load_dataset`, with ``split``, in place of files.
    format:      ``auto`` finds the kind of every record; ``text`` is plain text, every token a target; ``generations``
                 are lines of ``prompt_ids`` and ``output_ids`` (`hydrajax generate --output`, `distill`).
    template:    ``auto`` is the tokenizer's own; ``vicuna``, ``plain`` and ``raw`` are built in.
    targets:     ``assistant`` trains on what the assistant says, ``all`` on every token.
    tokenizer:   its directory; by default the model's. ``new_tokenizer``: train one of that many ids on the text.
    length:      tokens per row. ``rows``: ``pad`` one document per row, ``pack`` several, ``stream`` cut one stream.
    held_out:    share of conversations or files kept for evaluation; of a single text, its end. ``limit``: use only so
                 many.
    hidden_cache_gb: store the base's hidden states on disk, if they fit this many GB, and never run the base again.
    """

    files: tuple[str, ...] = ()
    dataset: str | None = None
    split: str = "train"
    format: str = "auto"
    template: str = "auto"
    targets: str = "assistant"
    tokenizer: str | None = None
    new_tokenizer: int | None = None
    length: int = 2048
    rows: str = "pad"
    held_out: float = 0.02
    limit: int | None = None
    prefetch: int = 2
    hidden_cache_gb: float = 0.0

    def __post_init__(self):
        one_of("data.format", self.format, FORMATS)
        one_of("data.targets", self.targets, ("assistant", "all"))
        one_of("data.rows", self.rows, ("pad", "pack", "stream"))
        at_least("data.length", self.length, 8)
        at_least("data.limit", self.limit, 1)
        at_least("data.prefetch", self.prefetch, 1)
        at_least("data.hidden_cache_gb", self.hidden_cache_gb, 0)
        below("data.held_out", self.held_out, 1)
        sources = bool(self.files) + (self.dataset is not None)
        if self.format == "standard_library":
            if sources:
                raise HydrajaxError("data: format standard_library needs neither files nor dataset")
        elif sources != 1:
            raise HydrajaxError(f"data: give either files or dataset, found {'both' if sources else 'neither'}")
        if self.dataset is not None and self.format in ("text", "generations"):
            raise HydrajaxError(f"data.dataset: contradicts data.format {self.format}, which reads files")
        if self.tokenizer and self.new_tokenizer:
            raise HydrajaxError("data: tokenizer and new_tokenizer exclude each other")


@dataclass(frozen=True)
class MeshConfig:
    """``data * model`` devices; ``cpu_devices`` splits a CPU into that many (two of one core each beat one of two)."""

    data: int = 1
    model: int = 1
    cpu_devices: int | None = None

    def __post_init__(self):
        at_least("mesh.data", self.data, 1)
        at_least("mesh.model", self.model, 1)
        at_least("mesh.cpu_devices", self.cpu_devices, 1)


@dataclass(frozen=True)
class TrainConfig:
    """One run: ``python -m hydrajax.train --config FILE``.

    output:     directory of the run: checkpoints, metrics, and at the end what `--base` or `--draft` load.
    task:       ``heads`` on a frozen base (``model``: its directory; a preset such as vicuna-7b for a dry run),
                ``joint`` for heads together with an ``adapter`` of the base, as ``joint`` says, or a whole ``base``,
                from scratch, of the shape given in ``scratch``, or with the weights of ``model`` to begin with.
    teacher:    for task ``base``: the directory of a model whose distribution it learns in place of the text's tokens,
                as a draft model does from the model that it will draft for.
    dtype:      of the computation and of the frozen base; what is trained is kept in float32.
    quantize:   ``int8`` keeps the frozen base's matmul weights in one byte each (medusa 2.2.1, as QLoRA in 4 bits).
    matmul_precision: ``bfloat16`` rounds what float32 matmuls of a training step read to bfloat16 and adds the products
                up in float32; everything between them stays float32. The fastest on a CPU with AMX.
    batch_size: rows per optimizer step, over ``accumulation`` passes. ``steps`` or ``epochs`` end the run.
    tree:       for which tokens_per_step is simulated on held-out data.
    max_bad_steps: steps in a row whose loss or gradient is not finite, before the run stops; each is skipped.
    """

    output: str
    task: str = "heads"
    model: str | None = None
    scratch: LlamaConfig | None = None
    teacher: str | None = None
    dtype: str = "bfloat16"
    quantize: str | None = None
    matmul_precision: str = "default"
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: Objective = field(default_factory=Objective)
    joint: JointConfig = field(default_factory=JointConfig)
    adapter: Adapter = field(default_factory=Adapter)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(format="standard_library"))
    mesh: MeshConfig = field(default_factory=MeshConfig)
    batch_size: int = 32
    accumulation: int = 1
    steps: int | None = None
    epochs: float | None = None
    seed: int = 0
    tree: str = "mc_sim_7b_63"
    log_every: int = 10
    eval_every: int = 200
    eval_rows: int = 64
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    max_bad_steps: int = 10

    def __post_init__(self):
        one_of("task", self.task, ("heads", "joint", "base"))
        one_of("dtype", self.dtype, ("float32", "bfloat16"))
        if self.quantize is not None:
            one_of("quantize", self.quantize, QUANTIZED)
            if self.task == "base":
                raise HydrajaxError("quantize: contradicts task base, whose weights are trained")
        one_of("matmul_precision", self.matmul_precision, ("default", "bfloat16"))
        for name in ("batch_size", "accumulation", "log_every", "eval_every", "eval_rows"):
            at_least(name, getattr(self, name), 1)
        for name in ("checkpoint_every", "keep_checkpoints", "max_bad_steps"):
            at_least(name, getattr(self, name), 1)
        if not 0 <= self.seed < 2**32:
            raise HydrajaxError(f"seed: must be an integer from 0 to {2**32 - 1}, found {self.seed}")
        if (self.steps is None) == (self.epochs is None):
            raise HydrajaxError("steps, epochs: give one of the two")
        at_least("steps", self.steps, 1)
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise HydrajaxError(f"epochs: must be positive, found {self.epochs}")
        if self.task == "base":
            if (self.scratch is None) == (self.model is None):
                found = "neither" if self.model is None else "both"
                raise HydrajaxError(f"scratch, model: task base takes one of the two, found {found}")
            if self.data.new_tokenizer and (self.model or self.teacher):
                raise HydrajaxError("data.new_tokenizer: contradicts model and teacher, which have a tokenizer")
        else:
            if self.model is None:
                raise HydrajaxError(f"model: is needed for task {self.task}")
            for name in ("scratch", "teacher"):
                if getattr(self, name) is not None:
                    raise HydrajaxError(f"{name}: contradicts task {self.task}, which takes a model")
        if self.task != "base" and self.data.new_tokenizer:
            raise HydrajaxError(f"data.new_tokenizer: contradicts task {self.task}: the base has its own tokenizer")
        if self.task != "heads" and self.data.hidden_cache_gb:
            raise HydrajaxError(
                f"data.hidden_cache_gb: contradicts task {self.task}, whose hidden states change as it learns"
            )
        self._check_joint()
        parts = self.accumulation * self.mesh.data
        if self.batch_size % parts:
            raise HydrajaxError(
                f"batch_size: must be a multiple of accumulation x mesh.data = {parts}, found {self.batch_size}"
            )
        if self.scratch:
            check_length(self, self.scratch)

    def _check_joint(self):
        """What a joint run contradicts itself in, and what means nothing for any other."""
        if self.task != "joint":
            for name, section in (("joint", JointConfig), ("adapter", Adapter)):
                if getattr(self, name) != section():
                    raise HydrajaxError(f"{name}: means nothing for task {self.task}, leave it out")
            return
        if self.optimizer.name != "adamw":
            raise HydrajaxError(f"optimizer.name: must be adamw for task joint, found {self.optimizer.name}")
        if self.steps is not None and self.joint.heads_alone_steps >= self.steps:
            raise HydrajaxError(
                f"joint.heads_alone_steps: must be below steps, {self.steps}, found {self.joint.heads_alone_steps}"
            )


def check_length(config: TrainConfig, base: LlamaConfig) -> None:
    """Refuse rows beyond the base's context."""
    if config.data.length > base.max_positions:
        raise HydrajaxError(
            f"data.length: must be at most the base's context {base.max_positions}, found {config.data.length}"
        )


# --- from YAML ------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings in a YAML file, changed by ``key.sub=value`` overrides whose values are YAML too.

    Raises `HydrajaxError` for an unreadable file, an unknown key (naming the nearest that exists), a value of the
    wrong type, and settings that contradict each other.
    """
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HydrajaxError(f"config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-13-01, digits
        raise HydrajaxError(f"config: {path} is not YAML: {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise HydrajaxError(f"config: {path} must hold settings by name, found {type(raw).__name__}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise HydrajaxError(f"override: must look like key.sub=value, found '{override}'")
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise HydrajaxError(f"{key}: the value is not YAML: {value}") from None
        _set(raw, key.split("."), parsed, key)
    return config_from(raw)


def config_from(raw: dict) -> TrainConfig:
    """`TrainConfig` of nested dicts, such as a parsed YAML file's; see `load_config` for what is refused."""
    return _section(raw, TrainConfig, "")


# Strict, and therefore ours: the usual libraries turn true into 1, null into "None" and a text into its letters.
def _typed(value: Any, kind: Any, name: str) -> Any:
    """``value`` as what the annotation ``kind`` says; ``name`` is of the setting, for messages."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise HydrajaxError(f"{name}: must hold settings by name, found {value!r}")
        return _draft(value) if kind is DraftConfig else _section(value, kind, f"{name}.")
    choices = typing.get_args(kind)
    if type(None) in choices:
        return None if value is None else _typed(value, choices[0], name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise HydrajaxError(f"{name}: must be a list such as [a, b], found {value!r}")
        return tuple(_typed(item, choices[0], f"{name}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) in (int, str):
        try:
            return float(value)  # YAML 1.1 reads 3e-4 as text
        except (ValueError, OverflowError):
            pass
    if type(value) is not kind:
        what = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
        raise HydrajaxError(f"{name}: must be {what}, found {value!r}")
    if kind is str and "\0" in value:  # no path holds it, and every function that takes one would fail in its own way
        raise HydrajaxError(f"{name}: must be without the character NUL, found {value!r}")
    return value


def draft_of(heads: str = "hydra", init: str | None = None, **settings) -> DraftConfig:
    """`DraftConfig` of the keys of a section ``draft``; see `load_config` for what is refused."""
    return _draft({"heads": heads, "init": init} | settings)


def _draft(raw: dict) -> DraftConfig:
    heads = _typed(raw.get("heads", DraftConfig.heads), str, "draft.heads")
    one_of("draft.heads", heads, tuple(draft_registry.HEADS))
    section = draft_registry.HEADS[heads].Settings
    own, rest = {f.name for f in dataclasses.fields(section)}, dict(raw)
    init = _typed(rest.pop("init", None), str | None, "draft.init")
    rest.pop("heads", None)
    for key in sorted(DRAFT_KEYS.keys() & raw.keys() - own):  # another kind's, which would be silently ignored
        kind, default = DRAFT_KEYS[key]
        if _typed(rest.pop(key), kind, f"draft.{key}") != default:
            raise HydrajaxError(f"draft.{key}: means nothing for draft.heads {heads}, leave it out")
    return DraftConfig(heads, init, _section(rest, section, "draft.", ("heads", "init")))


def _section(raw: dict, section: type, prefix: str, beside: Sequence[str] = ()) -> Any:
    """The dataclass of these settings, whose keys must be its fields. beside: keys that were read before."""
    types = typing.get_type_hints(section)
    names = [*beside, *(f.name for f in dataclasses.fields(section))]
    for key in raw:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"allowed are {', '.join(names)}"
            raise HydrajaxError(f"config: unknown key {prefix}{key}; {hint}")
    required = [f.name for f in dataclasses.fields(section) if _required(f) and f.name not in raw]
    if required:
        raise HydrajaxError(f"config: {', '.join(prefix + name for name in required)} missing")
    return section(**{key: _typed(value, types[key], prefix + key) for key, value in raw.items()})


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _set(raw: dict, keys: list[str], value: Any, name: str) -> None:
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise HydrajaxError(f"override: {name} goes through '{key}', which is a value and not a section")
    raw[keys[-1]] = value
