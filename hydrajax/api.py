"""`load`: from names on disk to a model that decodes, for notebooks and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hydrajax.checkpoints.base import Progress, eos_ids, load_llama
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.checkpoints.hub import resolve
from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import make_engine
from hydrajax.decoding.loop import Bursts
from hydrajax.decoding.prompts import bucket, check_prompt
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.registry import WITHOUT_WEIGHTS
from hydrajax.errors import HydrajaxError
from hydrajax.models.base import BaseModel
from hydrajax.sharding import placer
from hydrajax.text.prompt import Prompt
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

AUTO = "auto"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
QUANTIZED = ("int8",)


@dataclass
class Loaded:
    """A base with its drafter, ready to decode.

    tokenizer: the directory's tokenizer (transformers), None if it has none. eos_ids: ids that end generation.
    draft_directory: where the heads were loaded from, None for a drafter that was not. compiled: which programs
    `hydrajax.generation` has compiled, for which shapes.
    """

    model: BaseModel
    drafter: Drafter
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    draft_directory: Path | None = None
    compiled: set = field(default_factory=set, repr=False)
    _bursts: dict = field(default_factory=dict, repr=False)

    def bursts(self, tree: TreeTopology, rule: AcceptanceRule, max_new_tokens: int) -> Bursts:
        """An engine for this tree, this *kind* of rule and at least as many new tokens, made once and kept.

        So a rule with other numbers, or another limit that the same power of two covers, compiles nothing new. Raises
        `HydrajaxError` for what does not fit together.
        """
        room = bucket(max_new_tokens, self.model.config.max_positions)
        key = (tree, jax.tree.structure(rule), room)
        if key not in self._bursts:
            engine = make_engine(self.model, self.drafter, tree, rule, max_new_tokens=room, eos_ids=self.eos_ids)
            self._bursts[key] = Bursts(engine)
        return self._bursts[key]

    def with_draft(
        self, draft: Drafter | str | Path, *, base_directory: str | Path | None = None, mesh: Mesh | None = None
    ) -> Loaded:
        """The same base, its parameters shared, with another drafter. The arguments are those of `load`.

        base_directory: where the base lies; heads that say they were made for another base are then refused.
        """
        if isinstance(draft, str) and draft in WITHOUT_WEIGHTS:
            draft = WITHOUT_WEIGHTS[draft].build(self.model.config, self.model.dtype)
        directory, params = None, {}
        if isinstance(draft, (str, Path)):
            directory = resolve(draft, "--draft")
            draft, params = load_draft(directory, self.model.config, self.model.dtype, base_directory=base_directory)
            params = jax.tree.map(lambda x: placer(mesh)(x, None), params)
        return Loaded(self.model, draft, Params(self.params.base, params), self.tokenizer, self.eos_ids, directory)

    def default_tree(self, batch_size: int = 1) -> TreeTopology:
        """The tree that was searched for these heads, else the drafter's own choice."""
        return presets.searched(self.draft_directory, batch_size) or presets.by_name(self.drafter.default_tree)


def load(
    base: str | Path,
    draft: Drafter | str | Path | None = None,
    *,
    dtype=AUTO,
    mesh: Mesh | None = None,
    quantize: str | None = None,
    force: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> Loaded:
    """Load a base and, optionally, a drafter.

    base:  a Hugging Face directory (``config.json`` and weights; the tokenizer if it holds one), or a repository on the
        Hub, ``org/name`` or ``org/name@revision``.
    draft: a directory or repository of heads (`hydrajax.checkpoints.heads.load`); the name of a drafter without
        weights (`hydrajax.drafters.registry`); a `Drafter` without weights; or None to decode autoregressively.
    dtype: ``"float32"`` or ``"bfloat16"``, of parameters, cache and matmuls; the model's ``dtype`` then says which.
        ``"auto"`` is float32 on a CPU, elsewhere what most of the base's numbers are stored in, with bfloat16 for
        float16 (`hydrajax.checkpoints.base.default_dtype` says why).
    mesh:  from `hydrajax.sharding.make_mesh`; the base is sharded over it, the draft replicated.
    quantize: ``"int8"`` keeps the base's matmul weights in one byte each: half of bfloat16's memory, other logits.
    force: load heads that say they were made for another base.
    on_progress: told how many of the base's numbers have been loaded.

    JAX's compilation cache on disk is then on for the whole process (`hydrajax.compilation.use_compilation_cache` says
    where, and how to have another or none).

    Raises `HydrajaxError` for anything missing, damaged, unsupported or made for another base.
    """
    if str(dtype) not in (AUTO, *DTYPES):
        raise HydrajaxError(f"dtype: found '{dtype}', allowed are {', '.join((AUTO, *DTYPES))}")
    if quantize not in (None, *QUANTIZED):
        raise HydrajaxError(f"quantize: found '{quantize}', allowed are {', '.join(QUANTIZED)}")
    use_compilation_cache()
    compute = DTYPES.get(str(dtype))  # None for "auto"
    base = resolve(base, "--base")
    if isinstance(draft, (str, Path)) and draft not in WITHOUT_WEIGHTS:
        draft = resolve(draft, "--draft")  # refused before gigabytes are read
    model, base_params = load_llama(base, compute, placer(mesh), int8=quantize == "int8", on_progress=on_progress)
    loaded = Loaded(model, NoDrafter(), Params(base_params, {}), load_tokenizer(base), eos_ids(base))
    return loaded if draft is None else loaded.with_draft(draft, base_directory=None if force else base, mesh=mesh)


def encode(loaded: Loaded, prompt: str | Sequence[int] | Prompt, where: str) -> np.ndarray:
    """Token ids of one prompt, checked against the model. ``where`` names it in messages unless it brings a name."""
    if not isinstance(prompt, Prompt):
        prompt = Prompt(prompt, where)
    ids = np.asarray(prompt.ids(loaded.tokenizer), object)  # object: an id may exceed 64 bits, and is refused here
    check_prompt(ids, prompt.where, loaded.model.config)
    return ids.astype(np.int32)
