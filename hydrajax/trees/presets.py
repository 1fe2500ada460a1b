"""Named trees: the root alone, chains, Cartesian products, released sparse trees, and dynamic trees.

The sparse trees (``released_trees.json``) are published results of a search, reproduced as facts:
`medusa/model/medusa_choices.py` of FasterDecoding/Medusa (e2a5d20) and `hydra/model/hydra_choices.py` of zankner/Hydra
(3f39fbd), which holds ``mc_sim_7b_63`` only. ``eagle_26`` has this name in EAGLE 1 too: ``eagle/model/choices.py`` of
SafeAILab/EAGLE (branch v1, 4a9cf3a), 25 choices. In the file each digit is a rank, each word a choice.
"""

import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.models.arrays import DType
from hydrajax.ops import trace
from hydrajax.ops.cpu import library
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology


@functools.cache
def _released() -> dict[str, str]:
    return json.loads(Path(__file__).with_name("released_trees.json").read_text(encoding="utf-8"))


def root() -> TreeTopology:
    """Return the root alone: one token per step, which is autoregressive decoding."""
    return TreeTopology(())


def chain(depth: int) -> TreeTopology:
    """Return one path of best guesses, ``depth`` tokens long (classical speculation)."""
    if depth < 0:
        raise HydrajaxError(f"tree: got a chain of {depth}, expected a depth of 0 or more")
    return TreeTopology.from_choices([(0,) * length for length in range(1, depth + 1)])


def cartesian(widths: Sequence[int]) -> TreeTopology:
    """Return every combination of the best s_1, ..., s_K guesses of heads 1..K (medusa 2.1.2, figure 2)."""
    if any(width < 1 for width in widths):
        raise HydrajaxError(f"tree: got Cartesian widths {list(widths)}, expected 1 or more")
    levels = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return TreeTopology.from_choices(itertools.chain.from_iterable(levels))


def sparse(name: str = "mc_sim_7b_63") -> TreeTopology:
    """Return a released tree by its published name: 63 choices, ``eagle_26`` 25."""
    if name not in _released():
        raise HydrajaxError(f"tree: got '{name}', expected one of {', '.join(released())}")
    return TreeTopology.from_choices([tuple(map(int, word)) for word in _released()[name].split()])


def default_name(draft_depth: int, vocab_size: int, released: str = "mc_sim_7b_63") -> str:
    """Return the name of a released tree if the drafter is deep enough, else of a chain; the root without a draft."""
    tree = sparse(released)
    if draft_depth >= tree.depth and vocab_size > tree.max_rank:
        return released
    return f"chain-{draft_depth}" if draft_depth else "root"


def searched_weights(quantize: str | None) -> str | None:
    """Return the weight type that a searched tree is for: few bits on a CPU, where nodes cost more in them, or None."""
    return quantize if trace.on_cpu() else None


def special_base(quantize: str | None, dtype: DType, branch_nodes: int) -> str | None:
    """Return the kind of base that a tree of its own may come with: `searched_weights`, ``avx512``, or None.

    With AVX-512 a pass of the CPU kernels over a float32 weight takes 14 rows and not 6, so larger trees are faster. A
    branch of ``branch_nodes`` would exceed them.
    """
    if (weights := searched_weights(quantize)) is not None or branch_nodes:
        return weights
    return "avx512" if dtype == jnp.float32 and trace.has_cpu_kernels() and library.is_avx512() else None


def searched_path(directory: Path, batch_size: int, quantize: str | None = None) -> Path:
    """Return the path of the tree that was searched for the heads in a directory, this batch size and weight type."""
    return directory / f"tree_b{batch_size}{f'_{quantize}' if quantize else ''}.json"


def searched(directory: Path | None, batch_size: int, quantize: str | None = None) -> CandidateTree | None:
    """Return the tree that was searched for these heads, a weight type and the nearest batch size up to this one.

    Args:
        quantize: see `searched_weights`; or a name of `special_base`.
    """
    for size in range(batch_size, 0, -1):
        if directory is not None and (path := searched_path(directory, size, quantize)).is_file():
            return _of_file(path)
    return None


def _of_file(path: str | Path) -> CandidateTree:
    from hydrajax.trees.tree_json import read_tree

    return read_tree(path)


def tree_of(tree: CandidateTree | str | Path | Sequence[Sequence[int]]) -> CandidateTree:
    """Return the tree of a Python argument: a tree, a name (`by_name`), a file, or a list of choices."""
    if isinstance(tree, (TreeTopology, DynamicTree)):
        return tree
    if isinstance(tree, Path):
        return _of_file(tree)
    return by_name(tree) if isinstance(tree, str) else TreeTopology(tree)


# Patterns of names, and what makes a tree of the numbers in them.
SIZED = {
    r"chain-([0-9]{1,3})": chain,
    r"dynamic-([0-9]{1,4})-([0-9]{1,2})-([0-9]{1,3})": DynamicTree,
    r"best-([0-9]{1,4})": BestFirstTree,
    r"fanout-([0-9]{1,4})-([1-9][0-9]{0,2})": lambda size, top_k: BestFirstTree(size, top_k=top_k),
}


def released() -> list[str]:
    """Return the names of the released trees."""
    return list(_released())


def names() -> list[str]:
    """Return the names that `by_name` accepts next to files and JSON, for messages and help texts."""
    kinds = "root", "chain-K", "cartesian-S1xS2x...", "dynamic-NODES-EXPANSIONS-TOP_K", "best-N", "fanout-N-K"
    return [*kinds, *released()]


def is_inline(name: str) -> bool:
    """Return whether `by_name` parses this as JSON choices."""
    return name.lstrip().startswith("[") and not name.endswith(".json")


def by_name(name: str) -> CandidateTree:
    """Return a preset (``mc_sim_7b_63``, ``chain-4``, ``cartesian-4x2x2``, ``root``), or the tree of a file or of JSON.

    Args:
        name: A preset, the name of a ``.json`` file, or a JSON list of choices such as ``[[0], [0, 0], [1]]``.
            ``dynamic-60-7-10`` is a `DynamicTree` of 60 nodes, 7 expansions and top-10, the numbers of EAGLE-2;
            ``best-64`` and ``fanout-128-7`` are `BestFirstTree`.

    Raises:
        HydrajaxError: For anything else.
    """
    if is_inline(name):
        return TreeTopology.from_text(name)
    if name.endswith(".json"):
        return _of_file(name)
    if name == "root":
        return root()
    if name in _released():
        return sparse(name)
    if match := re.fullmatch(r"cartesian-([0-9]{1,3}(?:x[0-9]{1,3})*)", name):
        return cartesian([int(width) for width in match[1].split("x")])
    for pattern, make in SIZED.items():
        if match := re.fullmatch(pattern, name):
            return make(*map(int, match.groups()))
    raise not_allowed("tree", name, names(), ", a .json file or a JSON list of choices such as [[0], [0, 0], [1]]")


def label(name: str) -> str:
    """Return the name of a tree for file names: its size if the choices were given."""
    return f"{by_name(name).size}-nodes" if is_inline(name) else Path(name).stem
