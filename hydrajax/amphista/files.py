"""Files of Amphista heads. They have our own format only; no released heads are known."""

from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.formats.interface import MOST, About, Files
from hydrajax.formats.stacks import check_stack
from hydrajax.models.llama_config import LlamaConfig


def check(heads: AmphistaHeads, base: LlamaConfig) -> None:
    """`Files.check`."""
    check_stack(heads, base)
    c = heads.config
    width = c.mlp_width if heads.mlp_width is None else heads.mlp_width
    if c != c.plain_layer:
        raise ValueError(f"config: got {c}, expected LLaMA's plain layer")
    if not 0 <= heads.auto_embedding_layers <= MOST:
        raise ValueError(f"auto_embedding_layers: got {heads.auto_embedding_layers}, expected 0 to {MOST}")
    if type(width) is not int or not 1 <= width <= MOST * c.width:
        raise ValueError(f"mlp_width: got {width!r}, expected 1 to {MOST * c.width}")
    if c.n_heads * c.head_dim > MOST * c.width:
        raise ValueError(f"config: got {c.n_heads} heads of {c.head_dim}, expected at most {MOST} times the width")


def about(heads: AmphistaHeads) -> About:
    rows = {
        "heads": f"{heads.num_draft_heads}, guessing all tokens in one pass",
        "layers": f"{heads.adaptation_layers} adaptation, {heads.auto_embedding_layers} auto-embedding",
        "width, vocabulary": f"{heads.width}, {heads.vocab_size}",
    }
    return About("Amphista heads", "amphista", rows)


FILES = Files((), check, about)
