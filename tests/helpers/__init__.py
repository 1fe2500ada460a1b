"""Shared test helpers: models, checkpoints, damaged files, servers and processes."""
