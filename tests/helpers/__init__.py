"""Helpers that several tests share: models, checkpoints, damage, servers and processes."""
