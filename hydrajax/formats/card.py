"""Model card of exported heads."""

from __future__ import annotations

import json
from typing import Any

from hydrajax.formats.draft_registry import FILES, kind_of
from hydrajax.formats.hub import REPOSITORY
from hydrajax.formats.interface import About

NOT_RECORDED = "not recorded"


def model_card(drafter, format: str, read_by: str, base_name: str, story: dict[str, Any]) -> str:
    """Return Markdown with the Hub's front matter.

    Args:
        read_by: the programs that read it, in which HEADS stands for the number of heads.
        base_name: name of the base; ``base_model`` of the front matter if it can be a repository on the Hub.
        story: ``data, recipe, tokens_per_step``; missing ones are `NOT_RECORDED`.
    """
    base_name = _table_cell(base_name)
    about = describe(drafter)
    front = {"library_name": "hydrajax", "tags": ["speculative-decoding", about.tag]}
    if REPOSITORY.fullmatch(base_name):
        front["base_model"] = base_name
    data, recipe, tokens_per_step = (
        _table_cell(story.get(name, NOT_RECORDED)) for name in ("data", "recipe", "tokens_per_step")
    )
    rows = {
        "base": base_name or NOT_RECORDED,
        **about.rows,
        "data": data,
        "recipe": recipe,
        "tokens_per_step (τ)": tokens_per_step,
        "format": format,
    }
    return "\n".join(
        [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
            "---",
            "",
            f"# {about.title} for {base_name or 'an unnamed base'}",
            "",
            "Draft heads for tree speculative decoding: they propose tokens, which the base verifies. They work with "
            "this base only.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            f"Read by: {read_by.replace('HEADS', str(drafter.spec.depth))}",
            "",
        ]
    )


def describe(drafter) -> About:
    """Describe a drafter; the title mentions a prefix layer."""
    about = FILES[kind_of(drafter)].about(drafter)
    if not drafter.spec.prefix_layer:
        return about
    return About(f"{about.title} with a prefix layer", about.tag, about.rows)


def _table_cell(value: Any) -> str:
    """Escape text for a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
