"""`load` and `generate`: from names on disk to text, for notebooks and the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hydrajax.checkpoints.llama_hf import eos_ids, load_llama
from hydrajax.checkpoints.official_heads import load_official_heads
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.decode import bucket, check_prompt, make_decode_fn
from hydrajax.decoding.step import Params
from hydrajax.drafters.autoregressive import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.evaluation.answers import Generation
from hydrajax.evaluation.prompts import Prompt
from hydrajax.models.llama import Llama
from hydrajax.sharding import placer
from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass
class Loaded:
    """A base with its drafter, ready to decode.

    tokenizer: the directory's tokenizer (transformers), None if it has none. eos_ids: ids that end generation.
    """

    model: Llama
    drafter: Any
    params: Params
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    _decode_fns: dict = field(default_factory=dict, repr=False)
    _compiled: set = field(default_factory=set, repr=False)

    def decode_fn(self, tree: TreeTopology, rule: AcceptanceRule, max_new_tokens: int):
        """A `make_decode_fn` for these settings, compiled once and kept."""
        key = (tree, rule, max_new_tokens)
        if key not in self._decode_fns:
            self._decode_fns[key] = make_decode_fn(
                self.model, self.drafter, tree, rule, max_new_tokens=max_new_tokens, eos_ids=self.eos_ids
            )
        return self._decode_fns[key]

    def default_tree(self) -> TreeTopology:
        """See `hydrajax.trees.presets.default_name`."""
        return presets.by_name(presets.default_name(self.drafter.depth, self.model.config.vocab_size))


def load(base: str | Path, draft: str | Path | None = None, *, dtype="float32", mesh: Mesh | None = None) -> Loaded:
    """Load a base and, optionally, draft heads.

    base:  a Hugging Face directory (``config.json`` and safetensors; the tokenizer if it holds one).
    draft: a released Hydra or Medusa directory, or None to decode autoregressively.
    dtype: ``"float32"`` or ``"bfloat16"``, of parameters, cache and matmuls.
    mesh:  from `hydrajax.sharding.make_mesh`; the base is sharded over it, the draft replicated.

    Raises `HydrajaxError` for anything missing, damaged, unsupported or made for another base.
    """
    if str(dtype) not in DTYPES:
        raise HydrajaxError(f"dtype: found '{dtype}', allowed are {', '.join(DTYPES)}")
    compute = DTYPES[str(dtype)]
    model, base_params = load_llama(base, compute, placer(mesh))
    drafter, draft_params = NoDrafter(), {}
    if draft is not None:
        drafter, draft_params = load_official_heads(draft, model.config, compute)
        draft_params = jax.tree.map(lambda x: placer(mesh)(x, None), draft_params)
    return Loaded(model, drafter, Params(base_params, draft_params), load_tokenizer(base), eos_ids(base))


def load_tokenizer(directory: str | Path):
    """The tokenizer of a Hugging Face directory, or None where it has none. Never runs code from the directory."""
    directory = Path(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer  # slow to import, and a prompt of ids needs none

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types for a damaged tokenizer
        raise HydrajaxError(f"--base: cannot read the tokenizer in {directory}: {error}") from None


def generate(
    loaded: Loaded,
    prompts: Sequence[str | Sequence[int] | Prompt],
    *,
    tree: TreeTopology | None = None,
    rule: AcceptanceRule | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Iterator[Generation]:
    """Generate for texts, lists of token ids or `Prompt`s, in order, ``batch_size`` prompts at a time.

    A generator: each batch's results are yielded when it is done. Batches are taken in order, whatever the prompts'
    lengths: a batch is as wide as the bucket of its longest prompt. The last one is padded to full size by repeating
    its first prompt, so that it compiles nothing new. ``on_status`` is called with ``"compiling"`` before a new shape
    is compiled and with ``"decoding"`` before each batch. Raises `HydrajaxError` for every bad prompt before any is
    run.
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: must be at least 1, found {batch_size}")
    if isinstance(prompts, str):
        raise HydrajaxError("prompts: must be a list of prompts, found one text; write [text]")
    encoded = [encode(loaded, prompt, f"prompt {row}") for row, prompt in enumerate(prompts)]
    # More than the context cannot be generated, so it need not be allocated either.
    max_new_tokens = min(max_new_tokens, loaded.model.config.max_positions)
    decode = loaded.decode_fn(tree or loaded.default_tree(), rule or Greedy(), max_new_tokens)
    return _generate(loaded, encoded, decode, min(batch_size, len(encoded)), seed, on_status or (lambda status: None))


def encode(loaded: Loaded, prompt: str | Sequence[int] | Prompt, where: str) -> np.ndarray:
    """Token ids of one prompt, checked against the model. ``where`` names it in messages unless it brings a name."""
    if not isinstance(prompt, Prompt):
        prompt = Prompt(prompt, where)
    ids = np.asarray(prompt.ids(loaded.tokenizer), object)  # object: an id may exceed 64 bits, and is refused here
    check_prompt(ids, prompt.where, loaded.model.config)
    return ids.astype(np.int32)


def _generate(
    loaded: Loaded, encoded: list[np.ndarray], decode, batch_size: int, seed: int, on_status: Callable[[str], None]
) -> Iterator[Generation]:
    key = jax.random.key(seed)
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        # By the prompt's number, so that what is drawn for it does not depend on the batch size.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, start + jnp.arange(batch_size))
        rows = batch + [batch[0]] * (batch_size - len(batch))
        lengths = np.array([len(row) for row in rows], np.int32)
        prompt = np.zeros((batch_size, bucket(int(lengths.max()), loaded.model.config.max_positions)), np.int32)
        for row, ids in zip(prompt, rows, strict=True):
            row[: len(ids)] = ids
        arguments = (loaded.params, prompt, lengths, keys)
        if (decode, prompt.shape) not in loaded._compiled:
            on_status("compiling")
            decode.jitted.lower(*arguments).compile()  # kept by jit, so that the timed call below only runs
            loaded._compiled.add((decode, prompt.shape))
        on_status("decoding")
        began = time.perf_counter()
        out = jax.device_get(decode(*arguments))
        elapsed = time.perf_counter() - began
        for row, ids in enumerate(batch):
            output_ids = out.tokens[row, : out.lengths[row]].tolist()
            steps = int(out.steps[row])
            yield Generation(
                prompt_ids=ids.tolist(),
                output_ids=output_ids,
                text=None if loaded.tokenizer is None else decode_text(loaded.tokenizer, output_ids),
                steps=steps,
                accept_lengths=(out.accept_lengths[row, :steps] + 1).tolist(),
                new_tokens=len(output_ids),
                wall_time=elapsed,
            )


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Token ids as text, without special tokens and with no space removed."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
