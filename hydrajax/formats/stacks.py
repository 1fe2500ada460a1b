"""Common parts of the Medusa and Hydra formats, both of which hold a stack of equal heads."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.formats.interface import HeadFormat, cannot_write, check_counts, check_sizes
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import Entry, Layout, Parameter, Path, same, transposed, zeros
from hydrajax.models.llama_config import LlamaConfig


class Naming(NamedTuple):
    """Tensor names of a format: ``{block(k, i)}{linear}.weight`` of block i of head k, ``{lm_head(k)}.weight``."""

    block: Callable[[int, int], str]
    linear: str
    lm_head: Callable[[int], str]


class StackFormat(HeadFormat):
    """A format of `hydrajax.drafters.head_stack.HeadStack`. A shared block is written once per application."""

    def naming(self, drafter) -> Naming:
        raise NotImplementedError

    def layout(self, drafter, config):
        return heads_layout(drafter, self.naming(drafter))

    def settled(self, drafter, files, dtype):
        """Blocks that are copies of one another in every head become one shared block."""
        naming = self.naming(drafter)
        dtype = jnp.dtype(files.dtype(f"{naming.lm_head(0)}.weight") if dtype is None else dtype)
        return dataclasses.replace(drafter, share_blocks=_blocks_are_copies(drafter, naming, files), dtype=dtype)

    def checked(self, drafter, files: TensorFiles, base: LlamaConfig):
        """Return the drafter if the files can be compared with it tensor by tensor."""
        name = f"{self.naming(drafter).lm_head(0)}.weight"
        if name not in files:
            raise HydrajaxError(f"missing tensor '{name}'")
        check_sizes(files.shape(name), base)
        n_heads, n_layers = drafter.num_draft_heads, drafter.n_layers
        if n_heads * n_layers > len(files):  # before a typo in a number makes us list millions of names
            raise HydrajaxError(f"tensors: got {len(files)}, too few for {n_heads} heads x {n_layers} blocks")
        return drafter


def heads_layout(heads, naming: Naming, path: Path = (), *, block_bias: bool = True) -> Layout:
    """Return the key map of a stack of heads.

    Args:
        path: Of the stack in our parameters.
        block_bias: False if the files hold no biases of blocks, which are then zeros.
    """
    width, layout = heads.width, []
    for k in range(heads.num_draft_heads):
        head, at = heads.head(k), (*path, f"head_{k}")
        stems = [naming.block(k, i) for i in range(head.n_layers)]
        if head.path_length is not None:
            layout.append(_conditioned((*at, "conditioned"), stems.pop(0), k, width))
        stems = [stem + naming.linear for stem in stems]
        groups = [stems] if head.share_blocks and stems else [[stem] for stem in stems]
        for i, (stem, *copies) in enumerate(groups):
            block = (*at, f"blocks_{i}")
            weights, biases = (tuple(f"{copy}.{part}" for copy in copies) for part in ("weight", "bias"))
            layout.append(transposed((*block, "kernel"), f"{stem}.weight", width, width, copies=weights))
            if block_bias:
                layout.append(same((*block, "bias"), f"{stem}.bias", width, copies=biases))
            else:
                layout.append(zeros((*block, "bias"), width))
        lm_head = naming.lm_head(k)
        layout.append(transposed((*at, "lm_kernel"), f"{lm_head}.weight", heads.vocab_size, width))
        if head.lm_head.bias:
            layout.append(same((*at, "lm_bias"), f"{lm_head}.bias", heads.vocab_size))
    return layout


def _conditioned(path: Path, stem: str, k: int, width: int) -> Entry:
    """W and R of `ConditionedBlock`, which separates [h, E(root)] from the path's inputs."""
    parts = ("linear", "res_connection")
    theirs = {f"{stem}.{part}.weight": (width, (k + 2) * width) for part in parts}
    theirs |= {f"{stem}.{part}.bias": (width,) for part in parts}
    names = ("shared_kernel", "path_kernel", "bias") if k else ("shared_kernel", "bias")

    def join(w, r, w_bias, r_bias):
        inputs = [slice(0, 2 * width), slice(2 * width, None)] if k else [slice(None)]
        halves = (Parameter((w[None, :, half], r[None, :, half]), order=(2, 0, 1)) for half in inputs)
        return (*halves, Parameter((w_bias[None], r_bias[None])))

    def split(*ours):
        *halves, bias = ours
        kernel = np.concatenate(halves)
        return kernel[:, 0].T, kernel[:, 1].T, bias[0], bias[1]

    return Entry(tuple((*path, name) for name in names), theirs, join, split)


def _blocks_are_copies(heads, naming: Naming, files: TensorFiles) -> bool:
    for k in range(heads.num_draft_heads):
        plain = range(heads.n_layers - heads.head(k).n_plain, heads.n_layers)
        for part in ("weight", "bias"):
            first, *others = [f"{naming.block(k, i)}{naming.linear}.{part}" for i in plain] or [""]
            if others and first in files:
                array = files.read(first)
                if not all(np.array_equal(array, files.read(name)) for name in others):
                    return False
    return True


def check_stack(heads, base: LlamaConfig) -> None:
    """`hydrajax.formats.interface.Files.check` of a stack of heads."""
    check_counts(heads, "num_draft_heads", "n_layers")
    if not 0 <= heads.hidden_state_offset <= base.n_layers:
        raise ValueError(f"hidden_state_offset: got {heads.hidden_state_offset}, expected 0 to {base.n_layers}")
    check_sizes((heads.vocab_size, heads.width), base)
    small = heads.small_lm_head
    if small is not None and (small.rank or 0) > base.width:
        raise ValueError(f"rank of small_lm_head: got {small.rank}, expected at most the width, {base.width}")
    if small is not None and small.vocabulary is not None and (last := small.vocabulary.tokens[-1]) >= base.vocab_size:
        raise ValueError(f"vocabulary of small_lm_head: got token {last}, expected ids below {base.vocab_size}")


def check_lm_head(heads) -> None:
    """Refuse reduced lm heads, which no released format can express."""
    if heads.small_lm_head is not None:
        raise cannot_write("small_lm_head", heads.small_lm_head, "lm heads over all tokens")


def stack_rows(heads) -> dict[str, str]:
    """Return the model card's rows about a stack of heads."""
    blocks = f"{heads.n_layers} block{'s' * (heads.n_layers > 1)}"
    if heads.share_blocks and heads.n_layers > 2:
        blocks += ", one shared by its layers"
    return {"heads": f"{heads.num_draft_heads} of {blocks}", "width, vocabulary": f"{heads.width}, {heads.vocab_size}"}
