"""Lookahead decoding: a plug-in of hydrajax, declared in pyproject.toml as others' are."""
