"""The model card of exported heads: what they are, whose, how they were made, how to load them."""

from __future__ import annotations

import json
from typing import Any

from hydrajax.formats.draft_registry import FILES, kind_of
from hydrajax.formats.hub import REPOSITORY
from hydrajax.formats.interface import About

NOT_RECORDED = "not recorded"


def model_card(drafter, format: str, read_by: str, base_name: str, story: dict[str, Any]) -> str:
    """Markdown with the Hub's front matter.

    format: the name of the files' format. read_by: a sentence about who reads it, in which HEADS is their number.
    story: ``data, recipe, tokens_per_step``; what is not in it is said to be not recorded.
    """
    base_name, story = _in_a_cell(base_name), {name: _in_a_cell(value) for name, value in story.items()}
    about = describe(drafter)
    front = {"library_name": "hydrajax", "tags": ["speculative-decoding", about.tag]}
    if REPOSITORY.fullmatch(base_name):  # a name on the Hub and no path
        front["base_model"] = base_name
    rows = {
        "base": base_name or NOT_RECORDED,
        **about.rows,
        "data": story.get("data", NOT_RECORDED),
        "recipe": story.get("recipe", NOT_RECORDED),
        "tokens_per_step (τ)": story.get("tokens_per_step", NOT_RECORDED),
        "format": format,
    }
    return "\n".join(
        [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
            "---",
            "",
            f"# {about.title} for {base_name or 'a base that was not named'}",
            "",
            "Draft heads for tree speculative decoding: they propose tokens, the base checks them. They say nothing "
            "without their base.",
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
    """What a drafter is, by the file of its kind; a prefix layer in front of it is said in the title."""
    about = FILES[kind_of(drafter)].about(drafter)
    if not drafter.spec.prefix_layer:
        return about
    return About(f"{about.title} with a prefix layer", about.tag, about.rows)


def _in_a_cell(value: Any) -> str:
    """Text that cannot end the cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
