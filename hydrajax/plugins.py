"""Parts of the program by group and name: built-in ones, and those of installed packages.

A package adds a drafter, a draft format or another part with an entry point in its ``pyproject.toml``:

    [project.entry-points."hydrajax.drafters"]
    mine = "my_package.my_module:KIND"

Nothing is imported before it is named, and installed packages are searched only for names that are not built in
(docs/adding_a_drafter.md).
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed, one_line

COMMANDS = "demo generate chat serve train distill tree bench evaluate certify convert roofline report"
# By group: "module:attribute" of each name, in the order of listings. A part without entries here has plug-ins alone.
BUILT_IN: dict[str, dict[str, str]] = {
    "drafters": {
        "none": "hydrajax.drafters.none:KIND",
        "lookup": "hydrajax.drafters.lookup:KIND",
        "corpus": "hydrajax.drafters.several:KIND",
        "hydra": "hydrajax.drafters.hydra:HYDRA",
        "medusa": "hydrajax.drafters.medusa:KIND",
        "hydra++": "hydrajax.drafters.hydra:HYDRA_PP",
        "eagle": "hydrajax.drafters.eagle:KIND",
        "eagle3": "hydrajax.drafters.eagle3:KIND",
        "mtp": "hydrajax.drafters.mtp:KIND",
        "gemma4-assistant": "hydrajax.drafters.gemma4_assistant:KIND",
        "dflash": "hydrajax.drafters.dflash:DFLASH",
        "jetspec": "hydrajax.drafters.dflash:JETSPEC",
        "dspark": "hydrajax.drafters.dspark:KIND",
        "p-eagle": "hydrajax.drafters.peagle:KIND",
        "model": "hydrajax.drafters.draft_model:KIND",
    },
    "formats": {
        "hydra": "hydrajax.formats.hydra_format:FILES",
        "medusa": "hydrajax.formats.medusa_format:FILES",
        "eagle": "hydrajax.formats.eagle_format:EAGLE_FILES",
        "eagle3": "hydrajax.formats.eagle_format:EAGLE_3_FILES",
        "mtp": "hydrajax.formats.mtp_format:FILES",
        "gemma4-assistant": "hydrajax.formats.gemma4_assistant_format:FILES",
        "dflash": "hydrajax.formats.block_format:DFLASH_FILES",
        "jetspec": "hydrajax.formats.block_format:JETSPEC_FILES",
        "dspark": "hydrajax.formats.block_format:DSPARK_FILES",
        "p-eagle": "hydrajax.formats.peagle_format:FILES",
    },
    "weights": {
        "int8": "hydrajax.lowbit.quantized:Int8",
        "int8-64": "hydrajax.lowbit.quantized:Int8By64",
        "int8-128": "hydrajax.lowbit.quantized:Int8By128",
        "int4": "hydrajax.lowbit.int4:Int4",
        "int4-64": "hydrajax.lowbit.int4:Int4By64",
        "int4-128": "hydrajax.lowbit.int4:Int4By128",
        "mxfp4": "hydrajax.lowbit.mxfp4:Mxfp4",
        "fp8": "hydrajax.lowbit.quantized:Fp8",
    },
    "device_checks": {"low_bits": "hydrajax.lowbit.kernels.check:CHECKS"},
    "base_files": {
        "torch": "hydrajax.formats.torch_files:TorchFiles",
        "low_bits": "hydrajax.lowbit.files.low_bit_tensors",
        "gguf": "hydrajax.lowbit.gguf",
        "gguf_tensors": "hydrajax.lowbit.gguf_tensors:open_gguf",
    },
    "families": {
        "llama": "hydrajax.families.llama_families:LLAMA",
        "mistral": "hydrajax.families.llama_families:MISTRAL",
        "qwen2": "hydrajax.families.llama_families:QWEN2",
        "mimo": "hydrajax.families.llama_families:MIMO",
        "qwen3": "hydrajax.families.llama_families:QWEN3",
        "seed_oss": "hydrajax.families.llama_families:SEED_OSS",
        "ministral3": "hydrajax.families.llama_families:MINISTRAL3",
        "hunyuan_v1_dense": "hydrajax.families.llama_families:HUNYUAN",
        "nanochat": "hydrajax.families.llama_families:NANOCHAT",
        "gemma2": "hydrajax.families.dense_families:GEMMA2",
        "gemma3_text": "hydrajax.families.dense_families:GEMMA3_TEXT",
        "gemma4_text": "hydrajax.families.gemma4_families:GEMMA4_TEXT",
        "gemma4_unified_text": "hydrajax.families.gemma4_families:GEMMA4_UNIFIED_TEXT",
        "olmo2": "hydrajax.families.dense_families:OLMO2",
        "olmo3": "hydrajax.families.dense_families:OLMO3",
        "exaone4": "hydrajax.families.dense_families:EXAONE4",
        "granite": "hydrajax.families.dense_families:GRANITE",
        "smollm3": "hydrajax.families.dense_families:SMOLLM3",
        "phi3": "hydrajax.families.dense_families:PHI3",
        "muse_glimmer_text": "hydrajax.families.muse_families:TEXT",
        "mixtral": "hydrajax.families.expert_families:MIXTRAL",
        "qwen2_moe": "hydrajax.families.expert_families:QWEN2_MOE",
        "qwen3_moe": "hydrajax.families.expert_families:QWEN3_MOE",
        "olmoe": "hydrajax.families.expert_families:OLMOE",
        "glm4_moe": "hydrajax.families.expert_families:GLM4_MOE",
        "gpt_oss": "hydrajax.families.expert_families:GPT_OSS",
        "deepseek_v3": "hydrajax.families.latent_families:DEEPSEEK_V3",
        "kimi_k2": "hydrajax.families.latent_families:KIMI_K2",
        "deepseek_v2": "hydrajax.families.latent_families:DEEPSEEK_V2",
        "glm4_moe_lite": "hydrajax.families.latent_families:GLM4_MOE_LITE",
        "qwen3_next": "hydrajax.families.hybrid_families:QWEN3_NEXT",
        "qwen3_5_text": "hydrajax.families.hybrid_families:QWEN3_5_TEXT",
        "qwen3_5_moe_text": "hydrajax.families.hybrid_families:QWEN3_5_MOE_TEXT",
        "olmo_hybrid": "hydrajax.families.hybrid_families:OLMO_HYBRID",
        "lfm2": "hydrajax.families.lfm_families:LFM2",
        "lfm2_moe": "hydrajax.families.lfm_families:LFM2_MOE",
        "lfm3": "hydrajax.families.lfm_families:LFM3",
        "granitemoehybrid": "hydrajax.families.mamba_families:GRANITE",
        "nemotron_h": "hydrajax.families.mamba_families:NEMOTRON",
    },
    "rules": {
        "greedy": "hydrajax.decoding.acceptance:Greedy",
        "typical": "hydrajax.decoding.typical:Typical",
        "exact": "hydrajax.decoding.sampling:ExactSampling",
        "rejection": "hydrajax.decoding.rejection:RejectionSampling",
        "traversal": "hydrajax.decoding.traversal:TraversalVerification",
        "block": "hydrajax.decoding.traversal:BlockVerification",
    },
    "processors": {
        "logit_bias": "hydrajax.decoding.processors:LogitBias",
        "penalties": "hydrajax.decoding.processors:Penalties",
    },
    "grammars": {"schema": "hydrajax.grammar.grammar:of_schema"},
    "executors": {
        "fused": "hydrajax.decoding.executor:FusedExecutor",
        "stepped": "hydrajax.decoding.stepped:SteppedExecutor",
    },
    "tuners": {"trees": "hydrajax.bench.contests.fastest:measure"},
    "recipes": {},
    "commands": {name: f"hydrajax.cli.{name}" for name in COMMANDS.split()},
}


ADDED: dict[str, dict[str, Any]] = {group: {} for group in BUILT_IN}


def add(group: str, name: str, part: Any) -> None:
    """Add a part to this process, such as a rule of a notebook; an entry point adds it to every process."""
    ADDED[group][name] = part


def find(group: str, name: str) -> Any:
    """Import and return the part of this name of a group, a key of `BUILT_IN`.

    Raises:
        HydrajaxError: no part has this name, two packages have it, or the package that has it cannot be imported.
    """
    if name in ADDED[group]:
        return ADDED[group][name]
    if value := BUILT_IN[group].get(name):
        module, _, attribute = value.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    entries = declared(group).get(name, ())
    if not entries:
        raise not_allowed(group, name, Group(group), outdated())
    packages = [entry.dist.name for entry in entries]
    if len(entries) > 1:
        raise HydrajaxError(f"{group}: got '{name}' of the packages {' and '.join(packages)}; uninstall one of them")
    try:
        return entries[0].load()
    except HydrajaxError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise HydrajaxError(
            f"{group}: '{name}' of the package {packages[0]} cannot be imported ({entries[0].value}): {reason}"
        ) from error


class Group(Mapping[str, Any]):
    """The parts of a group by name: the built-in ones, those of installed packages, sorted, and added ones.

    A part is imported when it is looked up; names alone import nothing.
    """

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return find(self.name, name)

    def __contains__(self, name: object) -> bool:
        return name in ADDED[self.name] or name in BUILT_IN[self.name] or name in declared(self.name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*BUILT_IN[self.name], *declared(self.name), *ADDED[self.name])))

    def __len__(self) -> int:
        return len(list(iter(self)))


def imported(group: str) -> Iterator[str]:
    """Yield the names whose modules are imported, which a part in use must be, and those of added parts."""
    yield from ADDED[group]
    yield from (name for name, value in BUILT_IN[group].items() if value.partition(":")[0] in sys.modules)
    yield from (name for name, (entry, *_) in declared(group).items() if entry.module in sys.modules)


def package_of(group: str, name: str) -> str:
    """Return the name of the package that adds a part."""
    return declared(group)[name][0].dist.name


@functools.cache
def declared(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by name. One with a built-in name is ignored with a warning."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(_installed().select(group=f"hydrajax.{group}"), key=lambda entry: entry.name):
        if entry.name in BUILT_IN[group]:
            warnings.warn(
                f"hydrajax: {group}: '{entry.name}' of the package {entry.dist.name} is ignored: the name is built in",
                stacklevel=2,
            )
        else:
            found.setdefault(entry.name, []).append(entry)
    return found


@functools.cache
def _installed() -> EntryPoints:
    """Return the entry points of all packages, whose metadata are read once for all groups."""
    return entry_points()


def outdated() -> str:
    """Return the end of an error message if the installed metadata lack our own entry points, which names parts."""
    import tomllib

    source = Path(__file__).parents[1] / "pyproject.toml"
    try:
        installed = {(entry.group, entry.name) for entry in distribution("hydrajax").entry_points}
    except PackageNotFoundError:
        return "; hydrajax is not installed, so that its plug-ins are missing: run 'pip install -e .' in its folder"
    wanted = tomllib.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    ours = wanted.get("project", {}).get("entry-points", {})
    if all((group, name) in installed for group, entries in ours.items() for name in entries):
        return ""
    return "; the installation of hydrajax is older than its code: run 'pip install -e .' in its folder again"
