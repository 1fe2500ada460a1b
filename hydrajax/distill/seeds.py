"""Seeds: beginnings cut out of documents, and conversations of which only what the user says is kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.questions import sets
from hydrajax.train.data import conversations, dataset, packing
from hydrajax.train.data.conversations import BadRecord, Conversation
from hydrajax.train.data.packing import Document
from hydrajax.train.run_config import DataConfig

# What a number is drawn for: two draws of one seed and number must not be the same.
CUT, SHARE = 1, 2


class Seed(NamedTuple):
    """What the base is given: either ``ids`` to continue, or the user's ``turns`` to answer one after the other.

    source, index: the file's name and the place in it: a line or record, from 1 up, or the id of a question; for ids
    the first token's place in the tokenised document, from 0 up.
    """

    source: str
    index: int | str
    ids: Int[np.ndarray, " P"] | None = None
    turns: tuple[str, ...] = ()
    system: str | None = None


class Seeds(NamedTuple):
    """digest: of all that the seeds are taken from, whatever the number of those that are used."""

    seeds: list[Seed]
    digest: str
    conversations: bool


def read_seeds(name: str, data: str | None = None) -> tuple[Seeds, list[BadRecord]]:
    """Seeds of a file or folder of conversations, or of a question set, and the records that were left out.

    name: what `hydrajax.train.data.conversations.read_conversations` or `hydrajax.questions.sets.read_questions` takes;
    the first record of a file says which. data: where named question sets lie. Raises `HydrajaxError` as these do.
    """
    path = Path(name)
    if name not in sets.FILES and (path.is_dir() or (path.is_file() and conversations.holds_conversations(path))):
        found, bad = conversations.read_conversations(path, answered=False)
        return of_conversations(found), bad
    if name not in sets.FILES and not path.exists() and not sets.HUB.fullmatch(name):
        raise HydrajaxError(f"seeds: no such file: {name}; nor is it one of {', '.join(sets.FILES)} or org/name")
    source = sets.FILES.get(name, path.name if path.exists() else name)
    found = [Seed(source, question.question_id, turns=question.turns) for question in sets.read_questions(name, data)]
    return Seeds(found, _digest_of(found), conversations=True), []


def of_config(
    config: DataConfig, tokenizer: Any, seed: int, count: int, length: int, *, cuts: int, held_out: bool, say
) -> Seeds:
    """Seeds from a run's own data, of its training or of its held-out part: conversations where it has such, else
    ``count`` beginnings of ``length`` tokens. seed: of the run, as it parts the data; cuts: of the places to cut at.
    """
    train, kept_back, encode = dataset.parts(config, seed, say)
    items = kept_back if held_out else train
    if encode is dataset.encode_chat:
        return of_conversations([item.content for item in items])
    documents = encode(config, tokenizer, items, say)
    return cut([item.name for item in items], documents, count, length, cuts)


def of_conversations(found: Iterable[Conversation]) -> Seeds:
    """What the user says in each, and its system message."""
    seeds = []
    for messages, where in found:
        turns = tuple(content for role, content in messages if role == "user")
        system = next((content for role, content in messages if role == "system"), None)
        source, index = re.fullmatch(r"(.*) (?:line|record) (\d+)", where, re.DOTALL).groups()
        seeds.append(Seed(Path(source).name, int(index), turns=turns, system=system))
    return Seeds(seeds, _digest_of(seeds), conversations=True)


def cut(names: Sequence[str], documents: Sequence[Document], count: int, length: int, seed: int) -> Seeds:
    """``count`` beginnings of ``length`` tokens; the nth does not depend on how many there are.

    Every place at which a whole beginning fits is equally likely, so longer documents are cut more often. Raises
    `HydrajaxError` where no document is long enough.
    """
    places = np.array([max(len(document.ids) - length + 1, 0) for document in documents], np.int64)
    ends = np.cumsum(places)
    if not ends.size or not ends[-1]:
        raise HydrajaxError(f"prompt_tokens: no document has {length} tokens")
    seeds = []
    for number in range(count):
        place = int(_random(CUT, seed, number).integers(ends[-1]))
        chosen = int(np.searchsorted(ends, place, side="right"))
        start = place - int(ends[chosen] - places[chosen])
        ids = np.asarray(documents[chosen].ids[start : start + length], np.int32)
        seeds.append(Seed(names[chosen], start, ids))
    return Seeds(seeds, packing.digest(*(document.ids for document in documents)), conversations=False)


def temperature_of(number: int, temperatures: Sequence[float], seed: int) -> float:
    """The temperature of the seed of this number: of every so many that follow one another each has another one.

    Which has which is drawn from ``seed``; so it depends neither on how many seeds there are nor on batches.
    """
    block, place = divmod(number, len(temperatures))
    return float(temperatures[int(_random(SHARE, seed, block).permutation(len(temperatures))[place])])


def _random(purpose: int, seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([purpose, seed, number])


def _digest_of(seeds: Sequence[Seed]) -> str:
    said = [(seed.index, seed.system, seed.turns) for seed in seeds]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
