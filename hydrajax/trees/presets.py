"""Named trees: the root alone, chains, Cartesian products, the released sparse trees, and trees that are grown.

The sparse lists are the published result of a search and are reproduced as facts: `medusa/model/medusa_choices.py`
of FasterDecoding/Medusa (e2a5d20) and `hydra/model/hydra_choices.py` of zankner/Hydra (3f39fbd), which holds
``mc_sim_7b_63`` only. ``eagle_26`` is what EAGLE 1 has under that same name, ``eagle/model/choices.py`` of
SafeAILab/EAGLE (branch v1, 4a9cf3a): 25 choices. Each digit below is a rank, each word a choice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.tree_json import read_tree

_SPARSE = {
    "mc_sim_7b_63": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80
        90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000
        0001
    """,
    "vicuna_7b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 000 001 002
        003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 0000 0001 0002 0003
        0010 0020 0100
    """,
    "vicuna_7b_stage1_ablation": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 20 21 30 31 40 50 60 000 001 002 003
        004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 300 0000 0001 0002
        0003 0010 0020 0100
    """,
    "vicuna_7b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 32 40 41 50
        51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 050 100 101 200 0000
    """,
    "vicuna_13b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 20 21 30 40 50 000 001 002 003 004 005
        006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 300 0000 0001 0002 0003 0010
        0011 0020 0100 1000
    """,
    "vicuna_13b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 40 41 50 60
        70 80 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200
        0000
    """,
    "vicuna_33b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 22 30 31 40 50 60 70 000 001
        002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 102 110 200 0000 0001
        0002 0010 0100
    """,
    "vicuna_33b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 20 21 22 23 24 30 31 32 40
        41 50 51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 100 101 200
    """,
    "zephyr_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 20 21 22 23 30 31 40 41 50 60 70
        000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200 0000
        0001 0010
    """,
    "eagle_26": """
        0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001
    """,
}


def root() -> TreeTopology:
    """The root alone: one token per step, which is autoregressive decoding."""
    return TreeTopology(())


def chain(depth: int) -> TreeTopology:
    """One path of best guesses, ``depth`` tokens long (classical speculation)."""
    if depth < 0:
        raise HydrajaxError(f"tree: a chain's depth must be 0 or more, found {depth}")
    return TreeTopology.from_choices([(0,) * length for length in range(1, depth + 1)])


def cartesian(widths: Sequence[int]) -> TreeTopology:
    """Every combination of the best s_1, ..., s_K guesses of heads 1..K (medusa 2.1.2, figure 2)."""
    if any(width < 1 for width in widths):
        raise HydrajaxError(f"tree: Cartesian widths must be 1 or more, found {list(widths)}")
    levels = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return TreeTopology.from_choices(itertools.chain.from_iterable(levels))


def sparse(name: str = "mc_sim_7b_63") -> TreeTopology:
    """A released tree, of 63 choices but for ``eagle_26``, by its published name."""
    if name not in _SPARSE:
        raise HydrajaxError(f"tree: found '{name}', the released trees are {', '.join(_SPARSE)}")
    return TreeTopology.from_choices([tuple(map(int, word)) for word in _SPARSE[name].split()])


def default_name(draft_depth: int, vocab_size: int, released: str = "mc_sim_7b_63") -> str:
    """A released tree where the drafter is deep enough for it, else a chain; the root without a drafter."""
    tree = sparse(released)
    if draft_depth >= tree.depth and vocab_size > tree.max_rank:
        return released
    return f"chain-{draft_depth}" if draft_depth else "root"


def searched_path(directory: Path, batch_size: int) -> Path:
    """Where the tree lies that was searched for the heads in a directory and this many rows."""
    return directory / f"tree_b{batch_size}.json"


def searched(directory: Path | None, batch_size: int) -> CandidateTree | None:
    """The tree that was searched for these heads and this batch size, or for the next smaller one that was; or None."""
    for size in range(batch_size, 0, -1):
        if directory is not None and searched_path(directory, size).is_file():
            return read_tree(searched_path(directory, size))
    return None


def tree_of(tree: CandidateTree | str | Path | Sequence[Sequence[int]]) -> CandidateTree:
    """What a call in Python means by its tree: one, a name (`by_name`), a file, or a list of choices."""
    if isinstance(tree, (TreeTopology, DynamicTree)):
        return tree
    if isinstance(tree, Path):
        return read_tree(tree)
    return by_name(tree) if isinstance(tree, str) else TreeTopology(tree)


def released() -> list[str]:
    """The names that `sparse` knows."""
    return list(_SPARSE)


def names() -> list[str]:
    """What `by_name` understands besides files and JSON, for messages and help texts."""
    return ["root", "chain-K", "cartesian-S1xS2x...", "dynamic-NODES-EXPANSIONS-TOP_K", *released()]


def is_inline(name: str) -> bool:
    """Whether `by_name` reads this as the choices themselves, in JSON."""
    return name.lstrip().startswith("[") and not name.endswith(".json")


def by_name(name: str) -> CandidateTree:
    """A preset (``mc_sim_7b_63``, ``chain-4``, ``cartesian-4x2x2``, ``root``), a ``.json`` file, or JSON itself.

    ``dynamic-60-7-10`` is a `DynamicTree` of 60 nodes, 7 expansions and top-10, the numbers of EAGLE-2. JSON is a list
    of choices such as ``[[0], [0, 0], [1]]``. Raises `HydrajaxError` for anything else.
    """
    if is_inline(name):
        return TreeTopology.from_text(name)
    if name.endswith(".json"):
        return read_tree(name)
    if name == "root":
        return root()
    if name in _SPARSE:
        return sparse(name)
    if match := re.fullmatch(r"chain-(\d{1,3})", name):
        return chain(int(match[1]))
    if match := re.fullmatch(r"cartesian-(\d{1,3}(?:x\d{1,3})*)", name):
        widths = [int(width) for width in match[1].split("x")]
        return cartesian(widths)
    if match := re.fullmatch(r"dynamic-(\d{1,4})-(\d{1,2})-(\d{1,3})", name):
        return DynamicTree(*map(int, match.groups()))
    raise not_allowed("tree", name, names(), ", a .json file or a JSON list of choices such as [[0], [0, 0], [1]]")


def label(name: str) -> str:
    """What to call a tree of `by_name` in the names of files: its size where the choices themselves were given."""
    return f"{by_name(name).size}-nodes" if is_inline(name) else Path(name).stem
