"""Optional dependencies, and one message for each that is missing."""

# Package: its use, and the argument of `pip install`.
PACKAGES = {
    "matplotlib": ("pictures need", "'hydrajax[plots]'"),
    "torch": (".pt and .bin files need", "'hydrajax[torch]'"),
    "gguf": ("GGUF files need", "'hydrajax[gguf]'"),
    "llguidance": ("grammars need", "'hydrajax[grammar]'"),
    "jsonschema": ("grammars need", "'hydrajax[grammar]'"),
    "starlette": ("serving needs", "'hydrajax[serve]'"),
    "datasets": ("data sets by name need", "datasets"),
}


def needs(package: str) -> str:
    """Return the message that ``package`` is missing, with the command that installs it."""
    use, install = PACKAGES[package]
    return f"{use} {package}: pip install {install}"
