"""The model card of exported heads: what they are, whose, how they were made, how to load them."""

from __future__ import annotations

import json
from typing import Any

from hydrajax.checkpoints.hub import REPOSITORY
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix, heads_of

NOT_RECORDED = "not recorded"
READERS = {
    "hydra": "`hydrajax generate --base BASE --draft THIS`, and the official Hydra code, which opens the `.pt`.",
    "medusa": "`hydrajax generate --base BASE --draft THIS`; the official Medusa code opens the `.pt`, "
    "text-generation-inference (versions with Medusa) the `.safetensors`.",
    "vllm-medusa": "`hydrajax generate --base BASE --draft THIS`, and versions of vLLM with the `medusa` method: "
    '`--speculative-config \'{"method": "medusa", "model": "THIS", "num_speculative_tokens": HEADS}\'`.',
    "native": "`hydrajax generate --base BASE --draft THIS`. `hydrajax convert export` turns it into other formats.",
}


def model_card(drafter, format: str, base_name: str, story: dict[str, Any]) -> str:
    """Markdown with the Hub's front matter. story: ``data, recipe, tokens_per_step``; what lacks is said to lack."""
    base_name, story = _in_a_cell(base_name), {name: _in_a_cell(value) for name, value in story.items()}
    heads = heads_of(drafter)
    medusa = isinstance(heads, MedusaHeads) and not heads.lm_head_bias
    kind = "Medusa heads" if medusa else "Hydra heads"
    if isinstance(heads, MedusaHeads) and heads.lm_head_bias:
        kind = f"Ungrounded {kind}"
    if isinstance(drafter, WithPrefix):
        kind += " with a prefix layer"
    front = {"library_name": "hydrajax", "tags": ["speculative-decoding", "medusa" if medusa else "hydra"]}
    if REPOSITORY.fullmatch(base_name):  # a name on the Hub and no path
        front["base_model"] = base_name
    lines = [f"{name}: {json.dumps(value)}" for name, value in front.items()]
    tau = story.get("tokens_per_step", NOT_RECORDED)
    blocks = f"{heads.n_layers} block{'s' * (heads.n_layers > 1)}" + (
        ", one shared by its layers" if heads.share_blocks and heads.n_layers > 2 else ""
    )
    return "\n".join(
        [
            "---",
            *lines,
            "---",
            "",
            f"# {kind} for {base_name or 'a base that was not named'}",
            "",
            "Draft heads for tree speculative decoding: they propose tokens, the base checks them. They say nothing "
            "without their base.",
            "",
            "| | |",
            "|---|---|",
            f"| base | {base_name or NOT_RECORDED} |",
            f"| heads | {heads.n_heads} of {blocks} |",
            f"| width, vocabulary | {heads.width}, {heads.vocab_size} |",
            f"| data | {story.get('data', NOT_RECORDED)} |",
            f"| recipe | {story.get('recipe', NOT_RECORDED)} |",
            f"| tokens_per_step (τ) | {tau} |",
            f"| format | {format} |",
            "",
            f"Read by: {READERS[format].replace('HEADS', str(heads.n_heads))}",
            "",
        ]
    )


def _in_a_cell(value: Any) -> str:
    """Text that cannot end the cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
