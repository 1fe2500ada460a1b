"""Which tensors of other programs' files make up each of our parameters: the key maps.

A layout is declared once, as a list of entries, and serves reading and writing alike: what is written is read back
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hydrajax.checkpoints.tensors import Shape, TensorFiles
from hydrajax.models.config import LlamaConfig

Path = tuple[str, ...]  # of a leaf in our nested dicts


class Entry(NamedTuple):
    """Some of our parameters and the tensors they are made of.

    join: their arrays, in the order of ``theirs``, to ours; split: the inverse. Both take and give one array per name.
    copies: more names under which files hold the (one) tensor again; they are written and not read.
    """

    ours: tuple[Path, ...]
    theirs: dict[str, Shape]
    join: Callable[..., tuple[np.ndarray, ...]]
    split: Callable[..., tuple[np.ndarray, ...]]
    copies: tuple[str, ...] = ()


Layout = list[Entry]


def same(path: Path, name: str, *shape: int, copies: tuple[str, ...] = ()) -> Entry:
    """A tensor that is one of ours."""
    return Entry((path,), {name: shape}, lambda x: (x,), lambda x: (x,), copies)


def transposed(path: Path, name: str, outputs: int, inputs: int, copies: tuple[str, ...] = ()) -> Entry:
    """The matrix of a torch Linear, ``[outputs, inputs]``; ours are ``[inputs, outputs]``."""
    return Entry((path,), {name: (outputs, inputs)}, lambda x: (x.T,), lambda x: (x.T,), copies)


def zeros(path: Path, *shape: int) -> Entry:
    """A parameter of ours that the files do not have: none is zero."""
    return Entry((path,), {}, lambda: (np.zeros(shape, np.float32),), lambda x: ())


def shapes(layout: Layout) -> dict[str, Shape]:
    """Every tensor of the files by name."""
    found = {}
    for entry in layout:
        found |= entry.theirs
        for name in entry.copies:
            found[name] = next(iter(entry.theirs.values()))
    return found


def read(layout: Layout, files: TensorFiles, put: Callable[[Path, np.ndarray], dict] | None = None) -> dict:
    """Our nested parameters. Each is handed to ``put(path, array)`` as soon as it is there, which returns what to keep
    of it, by name (default: the array itself under the last name of its path).
    """
    tree: dict = {}
    for entry in layout:
        for path, array in zip(entry.ours, entry.join(*map(files.read, entry.theirs)), strict=True):
            at = tree
            for name in path[:-1]:
                at = at.setdefault(name, {})
            at |= put(path, array) if put else {path[-1]: array}
    return tree


def leaf(tree: Any, path: Path) -> Any:
    """What lies at the end of a path through nested dicts."""
    for name in path:
        tree = tree[name]
    return tree


def write(layout: Layout, params: Any) -> dict[str, np.ndarray]:
    """The tensors of the files by name."""
    tensors = {}
    for entry in layout:
        parts = entry.split(*(np.asarray(leaf(params, path)) for path in entry.ours))
        tensors |= dict(zip(entry.theirs, parts, strict=True))
        tensors |= dict.fromkeys(entry.copies, parts[0])
    return tensors


def base_layout(c: LlamaConfig) -> Layout:
    """Hugging Face's names for LLaMA, Mistral and Qwen; a family's extras are in the configuration."""
    layout = [same(("embedding",), "model.embed_tokens.weight", c.vocab_size, c.width)]
    for i in range(c.n_layers):
        layout += decoder_layer((f"layers_{i}",), f"model.layers.{i}.", c)
    layout.append(same(("norm", "scale"), "model.norm.weight", c.width))
    if not c.tied_lm_head:
        layout.append(transposed(("lm_head",), "lm_head.weight", c.vocab_size, c.width))
    return layout


def decoder_layer(path: Path, prefix: str, c: LlamaConfig) -> Layout:
    """One decoder layer; see `hydrajax.models.layers.DecoderLayer` for why ours fuses matrices."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    layout = [
        same((*path, "attention_norm", "scale"), f"{prefix}input_layernorm.weight", c.width),
        _by_kv_head((*path, "qkv"), attention, "weight", c, (c.width,)),
        transposed((*path, "out"), f"{attention}o_proj.weight", c.width, c.n_heads * c.head_dim),
        same((*path, "mlp_norm", "scale"), f"{prefix}post_attention_layernorm.weight", c.width),
        Entry(
            ((*path, "gate_up"),),
            {f"{mlp}{part}_proj.weight": (c.mlp_width, c.width) for part in ("gate", "up")},
            lambda gate, up: (np.stack([gate, up]).transpose(2, 0, 1),),
            lambda both: (both[:, 0].T, both[:, 1].T),
        ),
        transposed((*path, "down"), f"{mlp}down_proj.weight", c.width, c.mlp_width),
    ]
    if c.qkv_bias:
        layout.append(_by_kv_head((*path, "qkv_bias"), attention, "bias", c, ()))
    if c.qk_norm:
        layout.append(same((*path, "query_norm", "scale"), f"{attention}q_norm.weight", c.head_dim))
        layout.append(same((*path, "key_norm", "scale"), f"{attention}k_norm.weight", c.head_dim))
    return layout


def _by_kv_head(path: Path, prefix: str, kind: str, c: LlamaConfig, inputs: Shape) -> Entry:
    """Projections to queries, keys and values as one: ``[*inputs, kv head, its queries, key and value, feature]``.

    Rows of their matrices are (kv head, query in its group, feature), then the inputs.
    """
    rows = {"q": c.n_heads * c.head_dim, "k": c.n_kv_heads * c.head_dim, "v": c.n_kv_heads * c.head_dim}

    def join(*parts):
        by_head = [part.reshape(c.n_kv_heads, -1, c.head_dim, *inputs) for part in parts]
        fused = np.concatenate(by_head, axis=1)
        return (np.moveaxis(fused, -1, 0) if inputs else fused,)

    def split(fused):
        fused = np.moveaxis(fused, 0, -1) if inputs else fused
        return tuple(part.reshape(-1, *inputs) for part in (fused[:, :-2], fused[:, -2], fused[:, -1]))

    theirs = {f"{prefix}{part}_proj.{kind}": (size, *inputs) for part, size in rows.items()}
    return Entry((path,), theirs, join, split)
