"""Padding, packing and cutting of token documents into sequences of one length, and the held-out split."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from hydrajax.errors import HydrajaxError
from hydrajax.train.losses import IGNORED

Item = TypeVar("Item")

# Sequences that `pack` keeps open. First fit over all would fill hardly better, in quadratic time.
OPEN_ROWS = 64


class Document(NamedTuple):
    """Token ids; ``targets`` is True for tokens that count in the loss."""

    ids: Int[np.ndarray, " n"]
    targets: Bool[np.ndarray, " n"]


class Rows(NamedTuple):
    """``n`` sequences of ``T`` tokens, int32.

    Attributes:
        tokens: ids, padded on the right with 0.
        labels: the token, or `IGNORED` if it is not a target.
        segments: None without packing. Else the documents of a sequence are numbered from 1 and padding is 0: attention
            stays within a segment, and a target counts only for positions of its own segment.
    """

    tokens: Int[np.ndarray, "n T"]
    labels: Int[np.ndarray, "n T"]
    segments: Int[np.ndarray, "n T"] | None


def digest(*arrays: np.ndarray | None) -> str:
    """Return the SHA-256 of the arrays' bytes in hexadecimal, without those that are None."""
    found = hashlib.sha256()
    for array in arrays:
        if array is not None:
            found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def all_targets(ids: Sequence[int]) -> Document:
    """Return a document of plain text, in which every token is a target."""
    return Document(np.asarray(ids, np.int32), np.ones(len(ids), bool))


def pad(documents: Iterable[Document], length: int) -> Rows:
    """Put one document, cut at ``length``, into a sequence, and drop documents without a target.

    Raises `HydrajaxError` if no document is left.
    """
    cut = (Document(ids[:length], targets[:length]) for ids, targets in documents)
    return _fill([[document] for document in cut if _has_target(document)], length)._replace(segments=None)


def pack(documents: Iterable[Document], length: int) -> Rows:
    """Pack documents: each goes to the first of `OPEN_ROWS` open sequences with enough room.

    A document longer than ``length`` is cut into chunks, which count as documents. Chunks without a target are dropped.
    Raises `HydrajaxError` if no document is left.
    """
    rows: list[list[Document]] = []
    room: dict[int, int] = {}  # of the open sequences, in the order in which they were opened
    for ids, targets in documents:
        for start in range(0, len(ids), length):
            chunk = Document(ids[start : start + length], targets[start : start + length])
            if not _has_target(chunk):
                continue
            row = next((row for row, left in room.items() if left >= len(chunk.ids)), None)
            if row is None:
                if len(room) == OPEN_ROWS:
                    del room[min(room, key=room.__getitem__)]
                row = len(rows)
                rows.append([])
                room[row] = length
            rows[row].append(chunk)
            room[row] -= len(chunk.ids)
    return _fill(rows, length)


def stream(documents: Iterable[Document], length: int, end_id: int) -> Rows:
    """Cut the stream of all documents, each followed by ``end_id``, into sequences; an incomplete last one is dropped.

    ``end_id`` is a target if the document's last token is one. Attention crosses documents, as usual in pre-training.
    Raises `HydrajaxError` for less than one sequence of tokens.
    """
    tokens, targets = [], []
    for ids, counts in documents:
        if len(ids):
            tokens += [ids, [end_id]]
            targets += [counts, counts[-1:]]
    total = sum(map(len, tokens))
    n_rows = total // length
    if n_rows == 0:
        raise HydrajaxError(f"data.length: got {length}, expected at most {total}, the tokens of the whole text")
    tokens = np.concatenate(tokens)[: n_rows * length].astype(np.int32)
    labels = np.where(np.concatenate(targets)[: n_rows * length], tokens, np.int32(IGNORED))
    return Rows(tokens.reshape(n_rows, length), labels.reshape(n_rows, length), None)


def split(items: Sequence[Item], held_out: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Return ``(train, held out)``, each in the order of ``items``, drawn by position and ``seed`` alone.

    ``held_out`` is a fraction in [0, 1); above 0 at least one item is held out. Raises `HydrajaxError` if that leaves
    none to train on.
    """
    count = len(items)
    n_held = max(round(held_out * count), 1) if held_out else 0
    if not 0 <= n_held < count:
        raise HydrajaxError(f"data.held_out: got {held_out}, which leaves none of {count} documents to train on")
    chosen = set(np.random.default_rng(seed).permutation(count)[:n_held].tolist())
    train = [item for index, item in enumerate(items) if index not in chosen]
    return train, [item for index, item in enumerate(items) if index in chosen]


def _has_target(document: Document) -> bool:
    return bool(document.targets[1:].any())  # nothing predicts the first token


def _fill(rows: Sequence[Sequence[Document]], length: int) -> Rows:
    if not rows:
        raise HydrajaxError(f"data: no document has a target in its first {length} tokens")
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
