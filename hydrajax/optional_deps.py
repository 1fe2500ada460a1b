"""Packages that are there for some uses only: one message wherever one is needed and missing."""

from __future__ import annotations

# What needs a package, and what installs it.
PACKAGES = {
    "matplotlib": ("pictures need", "'hydrajax[plots]'"),
    "torch": (".pt and .bin files need", "'hydrajax[torch]'"),
    "rouge-score": ("ROUGE needs", "'hydrajax[score]'"),
    "starlette": ("serving needs", "'hydrajax[serve]'"),
    "datasets": ("data sets by name need", "datasets"),
}


def needs(package: str) -> str:
    """That this package is missing, for what, and the command that installs it."""
    what, install = PACKAGES[package]
    return f"{what} {package}: pip install {install}"
