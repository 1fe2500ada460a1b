"""Padding, packing and streaming lose no token, repeat none and keep the targets."""

import numpy as np

from helpers.refusals import assert_refused
from hydrajax.train.data.packing import OPEN_ROWS, Document, all_targets, pack, pad, split, stream
from hydrajax.train.losses import IGNORED


def document(*tokens: int) -> Document:
    """Negative numbers are tokens that are not targets."""
    ids = np.array(tokens, np.int32)
    return Document(np.abs(ids), ids > 0)


def random_documents(count: int, longest: int) -> list[Document]:
    random = np.random.default_rng(4)
    return [
        Document(random.integers(1, 1000, n).astype(np.int32), random.random(n) < 0.7)
        for n in random.integers(1, longest + 1, count)
    ]


def test_pad():
    rows = pad([document(-5, -6, 7, 8), document(-1, -2, -3, -4, -5, 6), document(1, -2), document(-9, 8)], 5)
    # The second has its target cut off; the third's is its first token, which nothing predicts.
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 0], [9, 8, 0, 0, 0]]
    assert rows.labels.tolist() == [[IGNORED, IGNORED, 7, 8, IGNORED], [IGNORED, 8, *[IGNORED] * 3]]
    assert rows.segments is None
    assert rows.tokens.dtype == rows.labels.dtype == np.int32
    assert pad([document(*range(1, 9))], 5).tokens.tolist() == [[1, 2, 3, 4, 5]]


def test_pack_is_first_fit():
    parts = [all_targets([n] * n) for n in (6, 5, 3, 2, 4)]
    rows = pack(parts, 9)
    assert rows.tokens.tolist() == [[6] * 6 + [3] * 3, [5] * 5 + [2] * 2 + [0] * 2, [4] * 4 + [0] * 5]
    assert rows.segments.tolist() == [[1] * 6 + [2] * 3, [1] * 5 + [2] * 2 + [0] * 2, [1] * 4 + [0] * 5]
    assert rows.labels.tolist() == np.where(rows.segments, rows.tokens, IGNORED).tolist()
    assert rows.segments.dtype == np.int32


def test_pack_cuts_long_documents_and_drops_pieces_without_targets():
    rows = pack([document(1, 2, 3, 4, 5, -6, -7, -8, 9, 10), document(-3, -4)], 4)
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [9, 10, 0, 0]]  # 5, 6, 7, 8 has no target but its first
    assert rows.segments.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_the_fullest_row_is_closed_when_too_many_are_open():
    sizes = [6, *[7] * (OPEN_ROWS - 1), 5, 4]  # the 5 needs a new row: one of the 7s is closed, and the 6 waits for 4
    rows = pack([all_targets([size] * size) for size in sizes], 10)
    assert len(rows.tokens) == OPEN_ROWS + 1
    assert rows.tokens[0].tolist() == [6] * 6 + [4] * 4
    rows = pack([all_targets([size] * size) for size in [*sizes[:-1], *[3] * OPEN_ROWS]], 10)
    assert rows.tokens[1].tolist() == [7] * 7 + [0] * 3  # closed, although a 3 fits
    assert rows.tokens[2].tolist() == [7] * 7 + [3] * 3


def test_packing_many_documents_keeps_each_and_fills_rows_well():
    documents = random_documents(6 * OPEN_ROWS, 60)
    rows = pack(documents, 64)
    found = []
    for tokens, labels, segments in zip(rows.tokens, rows.labels, rows.segments, strict=True):
        for number in range(1, segments.max() + 1):
            inside = np.flatnonzero(segments == number)
            assert inside.tolist() == list(range(inside[0], inside[-1] + 1))
            found.append((tokens[inside].tolist(), labels[inside].tolist()))
        assert not np.any(tokens[segments == 0])
        assert np.all(labels[segments == 0] == IGNORED)
    kept = [d for d in documents if d.targets[1:].any()]
    expected = [(d.ids.tolist(), np.where(d.targets, d.ids, IGNORED).tolist()) for d in kept]
    assert sorted(found) == sorted(expected)
    # First fit in random order wastes a few per cent; one document per row would be more than half empty.
    assert np.mean(rows.segments > 0) > 0.9
    for one, other in zip(rows, pack(documents, 64), strict=True):
        np.testing.assert_array_equal(one, other)


def test_stream_is_every_document_and_its_end_in_order():
    documents = random_documents(20, 30)
    rows = stream(documents, 16, end_id=7)
    tokens = [token for ids, _ in documents for token in [*ids.tolist(), 7]]
    targets = [t for _, counts in documents for t in [*counts.tolist(), bool(counts[-1])]]
    n = rows.tokens.size
    assert rows.tokens.reshape(-1).tolist() == tokens[:n]
    expected = [token if target else IGNORED for token, target in zip(tokens, targets, strict=True)]
    assert rows.labels.reshape(-1).tolist() == expected[:n]
    assert 0 <= len(tokens) - n < 16
    assert rows.segments is None
    assert rows.tokens.dtype == rows.labels.dtype == np.int32


def test_an_empty_document_is_none():
    empty, document = all_targets([]), all_targets([1, 2])
    assert stream([empty, document], 3, 9).tokens.tolist() == [[1, 2, 9]]
    assert [make([empty, document], 2).tokens.tolist() for make in (pad, pack)] == [[[1, 2]]] * 2


def test_refused():
    for make in (pad, pack):
        assert_refused(make, ([document(-1, -2)], 4, "no document has a target in its first 4 tokens"))
    assert_refused(
        stream,
        ([all_targets([1, 2, 3])], 5, 0, "data.length: got 5, expected at most 4"),
        ([], 5, 0, "data.length: got 5, expected at most 0"),
    )
    assert_refused(
        split,
        ([0], 0.1, 0, "data.held_out: got 0.1, which leaves none of 1 documents to train on"),
        ([], 0.0, 0, "data.held_out: got 0.0, which leaves none of 0 documents"),
        ([0, 1, 2, 3], 0.9, 0, "data.held_out: got 0.9, which leaves none of 4 documents"),
    )


def test_split():
    """Disjoint, complete and of the size asked for; it follows the seed and the position alone."""
    items = [f"item {i}" for i in range(40)]
    for held_out, expected in ((0.25, 10), (0.001, 1), (0.0, 0)):
        train, held = split(items, held_out, seed=1)
        assert len(held) == expected
        assert sorted(train + held, key=items.index) == items
        assert (train, held) == (sorted(train, key=items.index), sorted(held, key=items.index))
    items = list(range(1000))
    held = split(items, 0.02, 3)[1]
    assert held == split(items, 0.02, 3)[1] != split(items, 0.02, 4)[1]
    assert [str(i) for i in held] == split([str(i) for i in items], 0.02, 3)[1]
    assert 200 < np.mean(split(items, 0.2, 5)[1]) < 800  # drawn from everywhere, not cut off an end
