"""Settings of a training run, read from one YAML file.

Every section is a frozen dataclass whose fields are the YAML keys. `load_config` refuses unknown keys, wrong types and
contradictory settings before anything is loaded.
"""

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from hydrajax import plugins
from hydrajax.drafters.settings import Settings, at_least, below, one_of
from hydrajax.errors import HydrajaxError, hint, nearest_first, one_line
from hydrajax.formats import draft_registry
from hydrajax.models.adapter import Adapter
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.train.data.conversations import FORMATS as CONVERSATION_FORMATS
from hydrajax.train.losses import Objective


@dataclass(frozen=True)
class DraftConfig:
    """The heads to train. In the file, the kind's own settings are keys of this section too (`draft_of`).

    Attributes:
        heads: a kind in `hydrajax.formats.draft_registry.FILES`. Hydra++ is ``hydra`` with 4 layers and ``prefix``.
        init: a directory of released or exported heads to start from, or ``mtp`` for the module in the base's own
            files. Default: fresh heads.
        settings: the kind's ``Settings``.
    """

    heads: str = "hydra"
    init: str | None = None
    settings: Settings = field(default_factory=draft_registry.heads("hydra").Settings)

    def keys(self) -> dict[str, Any]:
        """Return this section as YAML keys, with the defaults of keys that only other kinds have."""
        defaults = {name: default for name, (_, default) in DRAFT_KEYS.items()}
        return {"heads": self.heads, "init": self.init} | defaults | dataclasses.asdict(self.settings)


# ``{key: (type, default)}`` of all kinds' settings.
DRAFT_KEYS = {
    f.name: (typing.get_type_hints(kind.Settings)[f.name], f.default)
    for kind in map(draft_registry.heads, draft_registry.trainable())
    for f in dataclasses.fields(kind.Settings)
}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with warm-up and decay. The defaults are the Hydra++ recipe.

    Attributes:
        name: ``adamw``, or ``muon``, which orthogonalises the update of every weight matrix except embeddings and lm
            heads (these use Adam). Updates are scaled to the size of Adam's, so ``lr`` means the same. A base trained
            from scratch learns faster with it.
        lr: peak learning rate, reached after ``warmup_steps``.
        schedule: ``cosine`` or ``linear`` decay to ``final_fraction * lr``, or ``constant``.
        weight_decay: of matrices; norm scales and biases do not decay.
        clip_norm: limit of the global gradient norm, null for no limit.
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
        positive("optimizer.lr", self.lr)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if not 0 <= self.final_fraction <= 1:
            raise HydrajaxError(f"optimizer.final_fraction: got {self.final_fraction}, expected 0 to 1")
        below("optimizer.b1", self.b1, 1)
        below("optimizer.b2", self.b2, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise HydrajaxError(f"optimizer.clip_norm: got {self.clip_norm}, expected a positive number or null")


@dataclass(frozen=True)
class JointConfig:
    """Medusa-2: train heads together with an adapter of the base (medusa 2.2.2).

    The loss is base_weight · (loss of the base) + λ0 · (loss of the heads, `Objective`).

    Attributes:
        distill: the base learns its own distribution without the adapter, KL(original ‖ adapted) (2.3.2), in place of
            the text's next tokens.
        heads_weight: λ0. The paper uses 0.2 when training on text and 0.01 when distilling (B.3, B.4).
        heads_alone_steps: steps in which only the heads are trained (2.2.2, heads warm-up).
        rise_steps: steps after these in which λ0 rises from 0 along a quarter of a sine (B.4); 0 for no rise.
        heads_lr_multiple: the heads' learning rate in units of `OptimizerConfig.lr`, which is the adapter's (B.2).
        remat: recompute the activations of the base's layers in the backward pass. Costs one forward pass; a 7B model
            then keeps 36 MB per layer and sequence of 2048 tokens in place of 1.7 GB. XLA's CPU compiler undoes it.
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
            positive(f"joint.{name}", getattr(self, name))
        at_least("joint.heads_alone_steps", self.heads_alone_steps, 0)
        at_least("joint.rise_steps", self.rise_steps, 0)


FORMATS = (*CONVERSATION_FORMATS, "text", "standard_library", "generations")


@dataclass(frozen=True)
class DataConfig:
    """The training data and how it is cut into sequences.

    Attributes:
        files: JSON, JSONL or text files and folders. Not used with ``standard_library``, the running Python's source.
        dataset: a name for `datasets.load_dataset`, with ``split``, in place of files.
        format: ``auto`` detects the format of every conversation record. ``text`` is plain text, in which every token
            is a target. ``generations`` are lines with ``prompt_ids`` and ``output_ids`` (`hydrajax generate --output`,
            `hydrajax distill`).
        template: ``auto`` is the tokenizer's chat template; ``vicuna``, ``plain``, ``raw`` are built in; else a file.
        targets: ``assistant`` trains on the assistant's tokens, ``all`` on every token.
        tokenizer: a directory. Default: the model's.
        new_tokenizer: train a tokenizer with this many ids on the text.
        length: tokens per sequence.
        rows: ``pad`` puts one document into a sequence, ``pack`` several, ``stream`` cuts one stream of all documents.
        held_out: fraction of conversations or files kept for evaluation; the end of a single text.
        limit: use only the first conversations or files, at most this many.
        prefetch: batches to prepare ahead.
        hidden_cache_gb: keep a hidden-state cache on disk if it fits into this many GB, and run the base only once.
        hidden_cache: directory of the cache, for runs that share data and base. Default: the run's output.
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
    hidden_cache: str | None = None

    def __post_init__(self):
        one_of("data.format", self.format, FORMATS)
        one_of("data.targets", self.targets, ("assistant", "all"))
        one_of("data.rows", self.rows, ("pad", "pack", "stream"))
        for name, least in {"length": 8, "limit": 1, "prefetch": 1, "hidden_cache_gb": 0}.items():
            at_least(f"data.{name}", getattr(self, name), least)
        below("data.held_out", self.held_out, 1)
        if self.hidden_cache and not self.hidden_cache_gb:
            raise HydrajaxError(f"data.hidden_cache: got {self.hidden_cache!r}, expected data.hidden_cache_gb too")
        sources = [name for name in ("files", "dataset") if getattr(self, name)]
        if self.format == "standard_library" and sources:
            raise HydrajaxError(f"data: got {' and '.join(sources)}, but format standard_library reads neither")
        if self.format != "standard_library" and len(sources) != 1:
            raise HydrajaxError(f"data: got {'both' if sources else 'neither'}, expected either files or dataset")
        if self.dataset is not None and self.format in ("text", "generations"):
            raise HydrajaxError(f"data.dataset: got {self.dataset!r}, but data.format {self.format} reads files")
        if self.tokenizer and self.new_tokenizer:
            raise HydrajaxError("data: got tokenizer and new_tokenizer, expected one of them")


@dataclass(frozen=True)
class MeshConfig:
    """A mesh of ``data * model`` devices.

    Attributes:
        data: devices over which a batch is sharded.
        model: devices over which the weights are sharded.
        cpu_devices: split the CPU into this many devices. Two devices of one core are faster than one of two cores.
    """

    data: int = 1
    model: int = 1
    cpu_devices: int | None = None

    def __post_init__(self):
        for f in dataclasses.fields(self):
            at_least(f"mesh.{f.name}", getattr(self, f.name), 1)


@dataclass(frozen=True)
class TrainConfig:
    """One run of ``hydrajax train --config FILE``.

    Attributes:
        output: directory of the run: checkpoints, metrics and, at the end, what `--base` or `--draft` load.
        task: ``heads`` on a frozen base; ``joint`` for heads and an adapter of the base; ``base`` for a whole model.
        model: the base, as for ``--base``, or a preset such as vicuna-7b for a dry run. With task ``base``: the weights
            to start from.
        scratch: with task ``base``, the shape of a model to train from scratch, in place of ``model``.
        teacher: with task ``base``, a model whose distribution is learned in place of the text's tokens, as a draft
            model learns from its target model.
        dtype: of the computation and of the frozen base. Trained parameters are float32.
        quantize: a weight type (`hydrajax.plugins`), such as ``int4``, stores the frozen base's matmul weights
            in fewer bits (medusa 2.2.1: 4 bits).
        matmul_precision: ``bfloat16`` rounds the operands of float32 matmuls to bfloat16 and accumulates in float32;
            everything else stays float32. The fastest on a CPU with AMX.
        batch_size: sequences per optimizer step, in ``accumulation`` micro-batches.
        steps: length of the run, or ``epochs``.
        tree: the tree for which tokens_per_step is simulated on held-out data.
        eval_rows: held-out sequences per evaluation.
        max_bad_steps: stop after this many steps in a row with a non-finite loss or gradient. Each is skipped.
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
        one_of("matmul_precision", self.matmul_precision, ("default", "bfloat16"))
        if self.quantize is not None:
            one_of("quantize", self.quantize, tuple(plugins.Group("weights")))
        for name in ("batch_size", "accumulation", "log_every", "eval_every", "eval_rows", "checkpoint_every",
                     "keep_checkpoints", "max_bad_steps", "steps"):  # fmt: skip
            at_least(name, getattr(self, name), 1)
        if not 0 <= self.seed < 2**32:
            raise HydrajaxError(f"seed: got {self.seed}, expected an integer from 0 to {2**32 - 1}")
        if (self.steps is None) == (self.epochs is None):
            raise HydrajaxError(f"steps, epochs: got {'neither' if self.steps is None else 'both'}, expected one")
        if self.epochs is not None:
            positive("epochs", self.epochs)
        self._check_task()
        micro_batches = self.accumulation * self.mesh.data
        if self.batch_size % micro_batches:
            raise HydrajaxError(
                f"batch_size: got {self.batch_size}, expected a multiple of accumulation x mesh.data = {micro_batches}"
            )
        if self.scratch:
            check_length(self, self.scratch)

    @property
    def precision(self) -> str | None:
        """The setting of `jax.default_matmul_precision`; None: JAX's own."""
        return None if self.matmul_precision == "default" else self.matmul_precision

    def _check_task(self):
        unused = {"quantize": self.quantize} if self.task == "base" else {}
        if self.task == "base":
            if (self.scratch is None) == (self.model is None):
                found = "neither" if self.model is None else "both"
                raise HydrajaxError(f"scratch, model: got {found}, but task base takes one of the two")
            if self.data.new_tokenizer and (self.model or self.teacher):
                raise HydrajaxError("data.new_tokenizer: cannot be used with model or teacher, which have a tokenizer")
        else:
            if self.model is None:
                raise HydrajaxError(f"model: got null, but task {self.task} needs a base")
            unused |= {name: getattr(self, name) for name in ("scratch", "teacher")}
            unused["data.new_tokenizer"] = self.data.new_tokenizer
        if self.task != "heads":  # the hidden states change in training
            unused["data.hidden_cache_gb"] = self.data.hidden_cache_gb
        if self.task != "joint":
            unused |= {"joint": self.joint != JointConfig(), "adapter": self.adapter != Adapter()}
        for name, value in unused.items():
            if value:
                raise HydrajaxError(f"{name}: has no effect with task {self.task}, remove it")
        if self.task == "joint":
            if self.optimizer.name != "adamw":
                raise HydrajaxError(f"optimizer.name: got {self.optimizer.name}, expected adamw with task joint")
            check_alone_steps(self, self.steps)


def positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):  # refuses NaN too
        raise HydrajaxError(f"{name}: got {value}, expected a positive number")


def check_alone_steps(config: TrainConfig, steps: int | None) -> None:
    """Refuse a joint run of ``steps`` steps in which the heads would be trained alone to the end."""
    alone = config.joint.heads_alone_steps
    if steps is not None and alone >= steps:
        raise HydrajaxError(f"joint.heads_alone_steps: got {alone}, expected less than the run's {steps} steps")


def check_length(config: TrainConfig, base: LlamaConfig) -> None:
    """Refuse sequences longer than the base's context."""
    if config.data.length > base.max_positions:
        raise HydrajaxError(
            f"data.length: got {config.data.length}, expected at most the base's context {base.max_positions}"
        )


# --- from YAML ------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read settings from a YAML file.

    Args:
        path: the file, or the name of a recipe in the package, such as ``"own_text"``.
        overrides: ``key.sub=value`` settings that replace the file's; values are YAML too.

    Raises:
        HydrajaxError: an unreadable file, an unknown key (with the nearest existing one), a wrong type or contradictory
            settings.
    """
    import yaml

    try:
        file = Path(path) if Path(path).is_file() else recipes().get(str(path), Path(path))
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        named = "" if len(Path(path).parts) > 1 else f"; recipes: {', '.join(nearest_first(str(path), recipes()))}"
        raise HydrajaxError(f"config: cannot read {path}: {error.strerror}{named}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-13-01, digits
        raise HydrajaxError(f"config: {path} is not YAML: {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise HydrajaxError(f"config: {path}: got {type(raw).__name__}, expected `key: value` settings")
    for override in overrides:
        name, equals, value = override.partition("=")
        *sections, key = name.split(".")
        if not equals or not all((*sections, key)):
            raise HydrajaxError(f"override: got {override!r}, expected key.sub=value")
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise HydrajaxError(f"{name}: got {value}, which is not YAML") from None
        section = raw
        for outer in sections:
            section = section.setdefault(outer, {})
            if not isinstance(section, dict):
                raise HydrajaxError(f"override: got {name}, but {outer!r} is a value and not a section")
        section[key] = parsed
    return config_from(raw)


def recipes() -> dict[str, Path]:
    """Return the recipes in the package by name, and those of plug-ins: ``NAME.yaml`` next to the module."""
    found = {file.stem: file for file in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}
    for name, module in plugins.Group("recipes").items():
        found[name] = Path(module.__file__).with_name(f"{name}.yaml")
    return found


def config_from(raw: dict) -> TrainConfig:
    """Return the settings in nested dicts, such as a parsed YAML file; raise as `load_config`."""
    return _section(raw, TrainConfig, "")


def draft_of(heads: str = "hydra", init: str | None = None, **settings) -> DraftConfig:
    """Return the settings in the keys of a section ``draft``; raise as `load_config`."""
    return _draft({"heads": heads, "init": init} | settings)


# The keys for names of other trainers.
OTHERS_KEYS = {
    "learning_rate": "optimizer.lr", "lr": "optimizer.lr", "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_norm", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "output",
    "per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "accumulation",
    "max_length": "data.length", "max_seq_length": "data.length", "logging_steps": "log_every",
    "eval_steps": "eval_every", "save_steps": "checkpoint_every", "model_name_or_path": "model", "bf16": "dtype",
}  # fmt: skip
NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Convert ``value`` to the annotation ``kind``; ``name`` is the setting. Strict: libraries turn true into 1."""
    choices = typing.get_args(kind)
    if type(None) in choices:
        return None if value is None else _typed(value, choices[0], name)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise HydrajaxError(f"{name}: got {value!r}, expected a section of settings")
        return _draft(value) if kind is DraftConfig else _section(value, kind, f"{name}.")
    if choices:  # tuple[kind, ...]
        if not isinstance(value, (list, tuple)):
            raise HydrajaxError(f"{name}: got {value!r}, expected a list such as [a, b]")
        return tuple(_typed(item, choices[0], f"{name}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) in (int, str):
        try:
            return float(value)  # YAML 1.1 reads 3e-4 as text
        except (ValueError, OverflowError):
            pass
    if type(value) is not kind:
        raise HydrajaxError(f"{name}: got {value!r}, expected {NAMES[kind]}")
    if kind is str and "\0" in value:  # no path can hold it
        raise HydrajaxError(f"{name}: got {value!r}, expected text without the character NUL")
    return value


def _draft(raw: dict) -> DraftConfig:
    heads = _typed(raw.get("heads", DraftConfig.heads), str, "draft.heads")
    one_of("draft.heads", heads, tuple(draft_registry.trainable()))
    init = _typed(raw.get("init"), str | None, "draft.init")
    section = draft_registry.heads(heads).Settings
    own = {f.name for f in dataclasses.fields(section)}
    rest = {key: value for key, value in raw.items() if key not in ("heads", "init")}
    for key in sorted(DRAFT_KEYS.keys() & rest.keys() - own):  # another kind's: allowed at its default only
        kind, default = DRAFT_KEYS[key]
        if _typed(rest.pop(key), kind, f"draft.{key}") != default:
            raise HydrajaxError(f"draft.{key}: has no effect with draft.heads {heads}, remove it")
    return DraftConfig(heads, init, _section(rest, section, "draft.", ("heads", "init")))


def _section(raw: dict, section: type, prefix: str, more_names: Sequence[str] = ()) -> Any:
    """The dataclass ``section`` with these settings. ``more_names`` are only for the message about an unknown key."""
    types, fields = typing.get_type_hints(section), dataclasses.fields(section)
    names = [*more_names, *(f.name for f in fields)]
    for key in raw:
        if key not in names:
            what = hint(str(key), names, OTHERS_KEYS, prefix) or f"; expected one of {', '.join(names)}"
            raise HydrajaxError(f"config: unknown key {prefix}{key}{what}")
    required = [f.name for f in fields if f.default is MISSING and f.default_factory is MISSING]
    if missing := [prefix + name for name in required if name not in raw]:
        raise HydrajaxError(f"config: {', '.join(missing)} missing")
    return section(**{key: _typed(value, types[key], prefix + key) for key, value in raw.items()})
