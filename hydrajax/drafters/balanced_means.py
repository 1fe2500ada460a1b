"""Balanced k-means of the rows of an lm head, on the host and without random numbers."""

import sys

import numpy as np
from jaxtyping import Float, Int

CUTS, ROUNDS = 6, 3  # of two means for each cut, of k-means after the cuts
CANDIDATES = 16  # clusters that a row may ask for in a round
AT_ONCE = 8192  # rows that are compared with all means
SAMPLE = 4096  # rows whose means decide a cut
LONG = 10**8  # numbers, whose clustering takes more than seconds and is reported


def balanced_clusters(rows: Float[np.ndarray, "n D"], size: int) -> Int[np.ndarray, "C size"]:
    """Return clusters of rows of similar directions, ``size`` in each but the last ones, which are filled up with -1.

    Cuts in two by two means give the first clusters, k-means improves them.
    """
    n, width = rows.shape
    count = -(-n // size)
    if n * width > LONG:
        print(f"grouping the lm head's {n} rows of {width} numbers into clusters ...", file=sys.stderr, flush=True)
    order, unit = _cut(_normed(rows), size)
    clusters = np.arange(n) // size  # of the rows in this order
    rounds = 1 if n * width > LONG else ROUNDS  # of minutes each
    for _ in range(rounds if count > 1 else 0):
        sums = np.add.reduceat(unit[np.argsort(clusters, kind="stable")], _begins(clusters, count))
        means = sums / np.bincount(clusters)[:, None].astype(np.float32)
        clusters = _assigned(unit, means, size)
    found = np.full((count, size), -1, np.int32)
    by_cluster = np.lexsort((order, clusters))
    found[clusters[by_cluster], _ranks(clusters, by_cluster, count)[by_cluster]] = order[by_cluster]
    return found


def _normed(x: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    x = np.array(x, np.float32)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return x


def _begins(clusters: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " C"]:
    """Return the number of rows in earlier clusters."""
    return np.cumsum(np.bincount(clusters, minlength=count)) - np.bincount(clusters, minlength=count)


def _ranks(clusters: Int[np.ndarray, " n"], order: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " n"]:
    """Return the rows' places in their clusters, of rows that are sorted by cluster in this order."""
    ranks = np.empty(len(order), int)
    ranks[order] = np.arange(len(order)) - _begins(clusters, count)[clusters[order]]
    return ranks


def _cut(unit: Float[np.ndarray, "n D"], size: int) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, "n D"]]:
    """Sort rows, in place, so that clusters are stretches of ``size`` rows; return their order too."""
    order, pieces = np.arange(len(unit), dtype=np.int32), [(0, len(unit))]
    while pieces:
        begin, end = pieces.pop()
        if end - begin <= size:
            continue
        first = -(-(end - begin) // size) // 2 * size
        piece = unit[begin:end]
        between = _between_means(piece[:: -(-len(piece) // SAMPLE)], first / len(piece))
        cut = np.argsort(piece @ between, kind="stable")
        unit[begin:end], order[begin:end] = piece[cut], order[begin:end][cut]
        pieces += [(begin, begin + first), (begin + first, end)]
    return order, unit


def _between_means(x: Float[np.ndarray, "n D"], part: float) -> Float[np.ndarray, " D"]:
    """Return the difference of two means of rows, of which the first has this part of them."""
    total, first = x.sum(axis=0), min(max(round(part * len(x)), 1), len(x) - 1)
    between = x[np.argmin(x @ total)] - total / len(x)  # from the mean to the row that differs most
    for _ in range(CUTS):
        along = x @ between
        second = (along > np.partition(along, first - 1)[first - 1]).astype(np.float32)
        count = max(float(second.sum()), 1.0)
        of_second = second @ x
        between = of_second / count - (total - of_second) / max(len(x) - count, 1.0)
    return between


def _assigned(unit: Float[np.ndarray, "n D"], means: Float[np.ndarray, "C D"], size: int) -> Int[np.ndarray, " n"]:
    """Return a cluster of at most ``size`` rows for each row: a cluster keeps those of the rows that ask for it
    whose next choice is the farthest, and the others ask for that (deferred acceptance).
    """
    n, count = len(unit), len(means)
    most = min(CANDIDATES, count)
    wanted, losses = np.empty((n, most), np.int64), np.zeros((n, most), np.float32)
    for at in range(0, n, AT_ONCE):
        near = unit[at : at + AT_ONCE] @ means.T - np.sum(means * means, axis=1) / 2
        best = np.argpartition(near, count - most, axis=1)[:, count - most :]
        order = np.argsort(-np.take_along_axis(near, best, 1), axis=1, kind="stable")
        wanted[at : at + AT_ONCE] = best = np.take_along_axis(best, order, 1)
        near = np.take_along_axis(near, best, 1)
        losses[at : at + AT_ONCE, :-1] = near[:, :-1] - near[:, 1:]
    tried, rows, clusters = np.zeros(n, int), np.arange(n), wanted[:, 0].copy()  # `count` is no cluster
    while True:
        order = np.lexsort((-losses[rows, np.minimum(tried, most - 1)], clusters))
        refused = (clusters < count) & (_ranks(clusters, order, count + 1) >= size)
        if not refused.any():
            break
        tried += refused
        clusters = np.where(tried < most, wanted[rows, np.minimum(tried, most - 1)], count)
    room = np.repeat(np.arange(count), size - np.bincount(clusters, minlength=count + 1)[:count])
    left = clusters == count
    clusters[left] = room[: left.sum()]
    return clusters
