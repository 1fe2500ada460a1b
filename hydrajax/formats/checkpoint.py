"""A model's directory, opened once: configuration, tensors by name, layout, EOS ids and tokenizer."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import text_part, to_llama_config
from hydrajax.files import check_directory
from hydrajax.formats.tensors import TensorFiles, check_method, expect_tensors, open_base_tensors, read_json
from hydrajax.models.layout import Layout, shapes
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import trace
from hydrajax.text.tokenizer import load_tokenizer

WHAT = "base"
# Rotary buffers of old transformers versions, a Medusa-2 model's heads (`hydrajax.formats.medusa_format`), MTP
# modules (`hydrajax.formats.mtp_format`, see also `Checkpoint.ignored`), and the vision tower of a multimodal model.
IGNORED = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|medusa_head\..*|model\.mtp_layers\..*|mtp\..*"
IGNORED += r"|model\.(visual|vision_\w+|audio_\w+|multi_modal_projector|embed_vision|embed_audio)\..*"
MERGED = "hydrajax_adapter"  # in config.json: the sha256 of the adapter that was merged into the weights
MODULES, MOST_MODULES = "num_nextn_predict_layers", 64


class Checkpoint:
    """A Hugging Face directory of a base, a draft model or draft heads. Each part is read once, when it is needed.

    Every property raises `HydrajaxError` for a missing, damaged or unsupported file.
    """

    def __init__(self, directory: str | Path, what: str = WHAT):
        self.directory, self.what = Path(directory), what

    @staticmethod
    def of(given: Checkpoint | str | Path, what: str = WHAT) -> Checkpoint:
        """Return the checkpoint in a directory, or the one that is given."""
        return given if isinstance(given, Checkpoint) else Checkpoint(given, what)

    def check_directory(self) -> None:
        """Raise `HydrajaxError` if there is no directory."""
        check_directory(self.directory, self.what)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The content of ``config.json``; of a multimodal model, that of its text part."""
        path = self.directory / "config.json"
        raw = read_json(path, self.what)
        found = text_part(raw, f"{self.what}: {path}")
        if found is not raw:
            kind = f"'{raw['model_type']}' is multimodal"
            warnings.warn(f"hydrajax: {self.what}: {path}: {kind}; its text part alone is used", stacklevel=3)
        return found

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's shape."""
        where = f"{self.what}: {self.directory / 'config.json'}"
        config = to_llama_config(self.raw, where)
        check_method(self.raw, where)
        return config

    @cached_property
    def files(self) -> TensorFiles:
        """The tensors by name. Quantised layers appear as float ones."""
        return open_base_tensors(self.directory, self.what, self.raw)

    @cached_property
    def layout(self) -> Layout:
        """The map from tensors to parameters."""
        n_tensors, n_layers = len(self.files), self.config.n_layers
        if n_layers > n_tensors:  # before a typo makes us list millions of names
            raise HydrajaxError(f"{self.what}: {self.directory} has {n_tensors} tensors, too few for {n_layers} layers")
        return base_layout(self.config, self.files.shapes)

    @cached_property
    def dtype(self) -> str:
        """NumPy's name of the dtype in which most parameters are stored."""
        stored: Counter = Counter()
        for name, shape in shapes(self.layout).items():
            if name in self.files:  # reading refuses a base without it
                stored[self.files.dtype(name)] += math.prod(shape)
        return max(stored, key=stored.get, default="float32")

    @property
    def weight_type(self) -> str | None:
        """The type that keeps the weights of a base published in 4 bits, on a CPU with kernels for it."""
        if not trace.on_cpu() or self.files.kept_as is None:
            return None
        if trace.has_few_bits():
            return self.files.kept_as
        reason = "on several devices" if jax.device_count() > 1 else "as the CPU kernels were not built"
        warnings.warn(
            f"hydrajax: {self.what}: its 4-bit weights are widened, {reason}; decoding is slower", stacklevel=2
        )
        return None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end generation, of ``generation_config.json`` or else of ``config.json``."""
        path = self.directory / "generation_config.json"
        found = read_json(path, self.what).get("eos_token_id") if path.exists() else None
        name = path.name
        if found is None and (self.directory / "config.json").exists():
            found, name = self.raw.get("eos_token_id"), "config.json"
        ids = tuple(found) if isinstance(found, list) else () if found is None else (found,)
        if not all(type(token) is int for token in ids):
            raise HydrajaxError(f"{name}: eos_token_id: got {found!r}, expected an integer or a list of integers")
        return ids

    def adapter(self, directory: str | Path) -> Any:
        """Return an adapter of this base (`hydrajax.formats.peft.load_adapter`)."""
        from hydrajax.formats.peft import load_adapter  # most bases have none

        return load_adapter(directory, self.config)

    def tokenizer(self) -> Any | None:
        """Return the tokenizer, None if there is none (`hydrajax.text.tokenizer.load_tokenizer`)."""
        return load_tokenizer(self.directory, self.what)

    def check_tensors(self) -> None:
        """Raise `HydrajaxError` unless the files hold exactly the model's tensors, in the right shapes."""
        config, where = self.config, f"{self.what}: {self.directory}"
        number = self.raw.get(MODULES) or 0
        if type(number) is not int or not 0 <= number <= MOST_MODULES:
            raise HydrajaxError(
                f"{where}/config.json: {MODULES}: got {number!r}, expected an integer from 0 to {MOST_MODULES}"
            )
        wanted = shapes(self.layout)
        ignored = [IGNORED, *map(re.escape, self.files.zero_biases(wanted))]
        ignored += [r"lm_head\.weight"] * config.tied_lm_head  # some files of tied models have a copy
        # Layers that attend to another's keys and values may have unused weights of their own.
        shared = [str(i) for i, kind in enumerate(config.kinds) if kind.shared_kv]
        ignored += [rf"model\.(language_model\.)?layers\.{i}\.self_attn\.[kv]_(proj|norm)\.weight" for i in shared]
        # MTP modules that are stored as layers after the last.
        ignored += [rf"model\.layers\.{config.n_layers + i}\..*" for i in range(number)]
        expect_tensors(self.files, wanted, where, "|".join(ignored))
