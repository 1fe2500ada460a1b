"""Contests of drafts: compare the speed of a base without a draft and with each of several drafts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hydrajax import assets
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import Tree
from hydrajax.text.prompt import OnePrompt

LOOKUP = "lookup"


def candidate_drafts(base: str | Path) -> list[str]:
    """Return lookup, the bundled drafts of a base that is given by name, and lookup with each of them."""
    bundled = assets.drafts_of(base)
    return [LOOKUP, *bundled, *(f"{LOOKUP}+{name}" for name in bundled)]


def measure_drafts(
    m: LanguageModel,
    drafts: Sequence[str | Path],
    prompts: Sequence[OnePrompt],
    *,
    tree: Tree | None = None,
    batch_size: int = 1,
    max_new_tokens: int = 64,
    repeats: int = 3,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate greedily for the prompts without a draft and with each draft, in interleaved rounds.

    Args:
        drafts: directories or names, as in `hydrajax.load`.
        prompts: as in `LanguageModel.generate`: texts, lists of token ids, or conversations.
        tree: the tree of every draft, as in `LanguageModel.generate`; by default each draft's own: the searched tree
            that is saved with it, else its drafter's default.

    Returns:
        The measurements, first of the base alone, named ``"autoregressive"``, then of each draft under its given name.

    Raises:
        HydrajaxError: a draft is missing or does not fit the base, a tree does not fit a draft, or a prompt is bad.

    Example:
        ```python
        m = hydrajax.load("shipped")
        for row in measure_drafts(m, ["lookup", "hydra++"], ["def area(", "class Stack:"]):
            print(row.name, row.tokens_per_step, row.tokens_per_second, row.speedup, row.equal)
        ```
    """
    ids = list(m.ids_of_prompts(prompts))
    if not ids:
        raise HydrajaxError("prompts: got none, expected at least one")
    executors = {AUTOREGRESSIVE: m.executor(m.program(max_new_tokens=max_new_tokens).autoregressive())}
    for draft in drafts:
        drafted = m.with_draft(draft)
        own = drafted.default_tree(batch_size) if tree is None else tree
        executors[str(draft)] = drafted.executor(drafted.program(tree=own, max_new_tokens=max_new_tokens))
    return contest(executors, ids, batch_size=batch_size, repeats=repeats, on_status=on_status)
