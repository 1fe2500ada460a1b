"""The leaves of a pytree by their paths."""

import jax


def by_path(tree) -> dict:
    """Return every leaf by its path, such as ``layers_0/qkv``."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}
