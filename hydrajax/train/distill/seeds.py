"""Seeds of self-distillation: beginnings of documents, and the user's messages of conversations."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.bench.questions import sets
from hydrajax.errors import HydrajaxError
from hydrajax.train.data import conversations, dataset, packing
from hydrajax.train.data.conversations import BadRecord, Conversation
from hydrajax.train.data.packing import Document
from hydrajax.train.run_config import DataConfig

# Purposes of a draw, so that two draws with the same seed and number differ.
CUT, SHARE = 1, 2


class Seed(NamedTuple):
    """Either ``ids`` to continue, or the user's ``turns`` to answer.

    Attributes:
        index: line or record in it, from 1, or a question's id; for ids the offset of the first token in the document.
    """

    source: str
    index: int | str
    ids: Int[np.ndarray, " P"] | None = None
    turns: tuple[str, ...] = ()
    system: str | None = None


class Seeds(NamedTuple):
    """Seeds of one kind; ``digest`` is a hash of their whole source, however many are used."""

    seeds: list[Seed]
    digest: str
    conversations: bool


def read_seeds(name: str, data: str | None = None) -> tuple[Seeds, list[BadRecord]]:
    """Read seeds from conversations or from a question set, and return them with the records left out.

    Args:
        name: what `hydrajax.train.data.conversations.read_conversations` or
            `hydrajax.bench.questions.sets.read_questions` reads; the first record of a file decides.
    """
    path = Path(name)
    if name not in sets.FILES and (path.is_dir() or (path.is_file() and conversations.holds_conversations(path))):
        found, bad = conversations.read_conversations(path, answered=False)
        return of_conversations(found), bad
    if name not in sets.FILES and not path.exists() and not sets.HUB.fullmatch(name):
        raise HydrajaxError(f"seeds: got {name}, expected a file, org/name or one of {', '.join(sets.FILES)}")
    source = sets.FILES.get(name, path.name if path.exists() else name)
    found = [Seed(source, question.question_id, turns=question.turns) for question in sets.read_questions(name, data)]
    return Seeds(found, _digest_of(found), conversations=True), []


def of_config(
    config: DataConfig, tokenizer: Any, seed: int, count: int, length: int, *, cuts: int, held_out: bool, on_message
) -> Seeds:
    """Return seeds from a run's training or held-out data: its conversations, or ``count`` beginnings of other text.

    Args:
        seed: the run's seed, by which it splits its data.
        count, length: number of beginnings, and their tokens.
    """
    train, kept_back, encode = dataset.parts(config, seed, on_message)
    items = kept_back if held_out else train
    if encode is dataset.encode_chat:
        return of_conversations([item.content for item in items])
    documents = encode(config, tokenizer, items, on_message)
    return cut([item.name for item in items], documents, count, length, cuts)


def of_conversations(found: Iterable[Conversation]) -> Seeds:
    """Return the user's messages and the system message of each conversation."""
    seeds = []
    for messages, where in found:
        turns = tuple(content for role, content in messages if role == "user")
        system = next((content for role, content in messages if role == "system"), None)
        source, index = re.fullmatch(r"(.*) (?:line|record) (\d+)", where, re.DOTALL).groups()
        seeds.append(Seed(Path(source).name, int(index), turns=turns, system=system))
    return Seeds(seeds, _digest_of(seeds), conversations=True)


def cut(names: Sequence[str], documents: Sequence[Document], count: int, length: int, seed: int) -> Seeds:
    """Cut ``count`` beginnings of ``length`` tokens; the nth does not depend on ``count``.

    Every offset with room for ``length`` tokens is equally likely, so longer documents are cut more often.

    Raises:
        HydrajaxError: if no document is long enough.
    """
    offsets = np.array([max(len(document.ids) - length + 1, 0) for document in documents], np.int64)
    ends = np.cumsum(offsets)
    if not ends.size or not ends[-1]:
        raise HydrajaxError(f"prompt_tokens: got {length}, longer than every document")
    seeds = []
    for number in range(count):
        offset = int(_random(CUT, seed, number).integers(ends[-1]))
        chosen = int(np.searchsorted(ends, offset, side="right"))
        start = offset - int(ends[chosen] - offsets[chosen])
        ids = np.asarray(documents[chosen].ids[start : start + length], np.int32)
        seeds.append(Seed(names[chosen], start, ids))
    return Seeds(seeds, packing.digest(*(document.ids for document in documents)), conversations=False)


def temperature_of(number: int, temperatures: Sequence[float], seed: int) -> float:
    """Return the temperature of a seed: each block of ``len(temperatures)`` seeds has every temperature once.

    The order within a block is drawn from ``seed``, so it depends neither on the number of seeds nor on batches.
    """
    block, at = divmod(number, len(temperatures))
    return float(temperatures[int(_random(SHARE, seed, block).permutation(len(temperatures))[at])])


def _random(purpose: int, seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([purpose, seed, number])


def _digest_of(seeds: Sequence[Seed]) -> str:
    texts = [(seed.index, seed.system, seed.turns) for seed in seeds]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
