"""Amphista heads, their files and their recipe: a plug-in of hydrajax, declared in pyproject.toml as others' are."""
