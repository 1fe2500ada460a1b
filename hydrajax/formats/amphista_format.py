"""The files of Amphista heads: hydrajax's own format. No others are known to have been released."""

from __future__ import annotations

from hydrajax.drafters.amphista import AmphistaHeads
from hydrajax.formats.interface import MOST, About, Files
from hydrajax.formats.stacks import check_stack
from hydrajax.models.llama_config import LlamaConfig


def check(heads: AmphistaHeads, base: LlamaConfig) -> None:
    """`Files.check`."""
    check_stack(heads, base)
    c = heads.config
    if c != c.plain_layer:
        raise ValueError(f"config is not that of LLaMA's plain layer: {c}")
    if not 0 <= heads.auto_embedding_layers <= MOST:
        raise ValueError(f"auto_embedding_layers is {heads.auto_embedding_layers}, allowed are 0 to {MOST}")
    width = c.mlp_width if heads.mlp_width is None else heads.mlp_width
    if type(width) is not int or not 1 <= width <= MOST * c.width:
        raise ValueError(f"mlp_width is {width!r}, allowed are 1 to {MOST * c.width}")
    if c.n_heads * c.head_dim > MOST * c.width:
        raise ValueError(f"config has {c.n_heads} heads of {c.head_dim}")


def about(heads: AmphistaHeads) -> About:
    rows = {
        "heads": f"{heads.num_draft_heads}, guessing all tokens in one pass",
        "layers": f"{heads.adaptation_layers} adaptation, {heads.auto_embedding_layers} auto-embedding",
        "width, vocabulary": f"{heads.width}, {heads.vocab_size}",
    }
    return About("Amphista heads", "amphista", rows)


FILES = Files((), check, about)
