"""Token documents cut, padded or packed into rows of one length, and their split into training and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from hydrajax.errors import HydrajaxError
from hydrajax.train.losses import IGNORED

Item = TypeVar("Item")

# Rows that `pack` keeps open at a time. First fit over all of them would fill hardly better, in quadratic time.
OPEN_ROWS = 64


class Document(NamedTuple):
    """Token ids, and which of them are to be learnt: ``targets`` is True where the token counts in a loss."""

    ids: Int[np.ndarray, " n"]
    targets: Bool[np.ndarray, " n"]


class Rows(NamedTuple):
    """``n`` rows of ``T`` tokens, all int32.

    labels:   the token itself, or `IGNORED` where it is no target.
    segments: None where each row is one sequence, padded on the right with token 0 and label `IGNORED`. Else 1, 2, ...
              number the documents packed into a row and 0 is padding: attention must stay within a segment, and a
              target counts only for positions of its own segment.
    """

    tokens: Int[np.ndarray, "n T"]
    labels: Int[np.ndarray, "n T"]
    segments: Int[np.ndarray, "n T"] | None


def digest(*arrays: np.ndarray | None) -> str:
    """SHA-256 of the arrays' bytes, in hexadecimal; None counts as nothing."""
    found = hashlib.sha256()
    for array in arrays:
        if array is not None:
            found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def all_targets(ids: Sequence[int]) -> Document:
    """A document of plain text: every token is a target."""
    return Document(np.asarray(ids, np.int32), np.ones(len(ids), bool))


def pad(documents: Iterable[Document], length: int) -> Rows:
    """One document per row, cut at ``length``. Those with no target left to predict are dropped.

    Raises `HydrajaxError` where no document is left.
    """
    cut = (Document(ids[:length], targets[:length]) for ids, targets in documents)
    return _fill([[document] for document in cut if _has_target(document)], length)._replace(segments=None)


def pack(documents: Iterable[Document], length: int) -> Rows:
    """Several whole documents per row: each goes to the first of the `OPEN_ROWS` open rows that has room for it.

    A document longer than ``length`` is cut into pieces, each a document of its own; pieces with no target to predict
    are dropped. Rows are in the order in which they were opened. Raises `HydrajaxError` where no document is left.
    """
    rows: list[list[Document]] = []
    room: dict[int, int] = {}  # of the open rows, in the order in which they were opened
    for document in documents:
        for piece in _pieces(document, length):
            row = next((row for row, left in room.items() if left >= len(piece.ids)), None)
            if row is None:
                if len(room) == OPEN_ROWS:
                    del room[min(room, key=room.__getitem__)]
                row = len(rows)
                rows.append([])
                room[row] = length
            rows[row].append(piece)
            room[row] -= len(piece.ids)
    return _fill(rows, length)


def stream(documents: Iterable[Document], length: int, end_id: int) -> Rows:
    """All documents, each closed by ``end_id``, in one stream cut into rows; the short rest is dropped.

    The ``end_id`` is a target where the document's last token is one. Rows begin and end anywhere in a document and
    attention crosses documents, as is usual in pre-training. Raises `HydrajaxError` for less than one row of tokens.
    """
    tokens, targets = [], []
    for ids, counts in documents:
        if len(ids):
            tokens += [ids, [end_id]]
            targets += [counts, counts[-1:]]
    total = sum(map(len, tokens))
    n_rows = total // length
    if n_rows == 0:
        raise HydrajaxError(f"length: rows of {length} tokens are more than the {total} of the whole text")
    tokens = np.concatenate(tokens)[: n_rows * length].astype(np.int32)
    labels = np.where(np.concatenate(targets)[: n_rows * length], tokens, np.int32(IGNORED))
    return Rows(tokens.reshape(n_rows, length), labels.reshape(n_rows, length), None)


def split(items: Sequence[Item], held_out: float, seed: int) -> tuple[list[Item], list[Item]]:
    """``(train, held out)``, each in the order of ``items``: whole items, drawn by position and ``seed`` alone.

    held_out: a share in [0, 1) where it is a float, of which at least one item is held out unless it is 0; else a
    number of items. Raises `HydrajaxError` where that leaves nothing to train on.
    """
    count = len(items)
    if isinstance(held_out, float) and not 0 <= held_out < 1:
        raise HydrajaxError(f"held_out: a share must be from 0 up to, not including, 1, found {held_out}")
    n_held = max(round(held_out * count), 1) if isinstance(held_out, float) and held_out else int(held_out)
    if not 0 <= n_held < count:
        raise HydrajaxError(f"held_out: {n_held} of {count} conversations or documents leave none to train on")
    chosen = set(np.random.default_rng(seed).permutation(count)[:n_held].tolist())
    train = [item for index, item in enumerate(items) if index not in chosen]
    return train, [item for index, item in enumerate(items) if index in chosen]


def _pieces(document: Document, length: int) -> Iterator[Document]:
    """Cuts of at most ``length`` tokens, without those that have no target."""
    ids, targets = document
    for start in range(0, len(ids), length):
        piece = Document(ids[start : start + length], targets[start : start + length])
        if _has_target(piece):
            yield piece


def _has_target(document: Document) -> bool:
    return bool(document.targets[1:].any())  # nothing comes before the first token that could predict it


def _fill(rows: Sequence[Sequence[Document]], length: int) -> Rows:
    if not rows:
        raise HydrajaxError(f"data: no document has a token to train on within its first {length} tokens")
    shape = len(rows), length
    filled = Rows(np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32), np.zeros(shape, np.int32))
    for index, row in enumerate(rows):
        start = 0
        for number, (ids, targets) in enumerate(row, start=1):
            end = start + len(ids)
            filled.tokens[index, start:end] = ids
            filled.labels[index, start:end] = np.where(targets, ids, IGNORED)
            filled.segments[index, start:end] = number
            start = end
    return filled
