"""Batches are a function of the step and come in order, and leaving the feed always ends its thread."""

import signal
import threading

import numpy as np
import pytest

from helpers.refusals import assert_refused
from hydrajax.train.data.feed import batch_indices, feed
from hydrajax.train.data.packing import Rows

PATIENCE = 10.0  # seconds until a test gives up on a thread


@pytest.fixture
def rows() -> Rows:
    """Twelve sequences of their own index, with ten times the index as labels."""
    tokens = np.repeat(np.arange(12, dtype=np.int32)[:, None], 3, axis=1)
    return Rows(tokens, tokens * 10, None)


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert {thread for thread in threading.enumerate() if thread.name.startswith("feed")} <= before


def test_every_epoch_visits_each_row_once_in_another_order():
    """The documented order, by NumPy itself; the short end of an epoch is dropped."""
    for n_rows in (12, 11):
        per_epoch = n_rows // 4
        for epoch in range(2):
            found = [batch_indices(n_rows, 4, per_epoch * epoch + i, seed=5) for i in range(per_epoch)]
            wanted = np.random.default_rng((5, epoch)).permutation(n_rows)[: 4 * per_epoch]
            assert np.concatenate(found).tolist() == wanted.tolist()
    assert batch_indices(12, 4, 0, seed=6).tolist() != batch_indices(12, 4, 0, seed=5).tolist()
    batch_indices(12, 4, 0, seed=1)[:] = 0  # they may be written to
    assert len(set(batch_indices(12, 4, 0, seed=1).tolist())) == 4


def test_a_batch_that_cannot_be_filled_is_refused(rows):
    for size in (0, -1, 13):
        message = f"batch_size: got {size}, expected 1 to 12, the number of training sequences"
        assert_refused(batch_indices, (12, size, 0, 0, message))
        assert_refused(feed(rows, size, 0, 1, seed=0).__enter__, (message,))


def test_batches_are_the_rows_of_their_step_and_resuming_gives_the_same(rows, tmp_path):
    states = np.memmap(tmp_path / "states", np.float32, "w+", shape=(12, 3, 2))
    states[:] = np.arange(12)[:, None, None]
    rows = rows._replace(segments=rows.tokens + 1)

    def collect(start, stop):
        with feed(rows, 4, start, stop, seed=2, extras={"states": states}) as batches:
            return list(batches)

    batches = collect(0, 7)
    assert [step for step, _ in batches] == list(range(7))
    for step, batch in batches:
        expected = batch_indices(12, 4, step, seed=2)
        assert set(batch) == {"tokens", "labels", "segments", "states"}
        for name, factor, shift in (("tokens", 1, 0), ("labels", 10, 0), ("segments", 1, 1), ("states", 1, 0)):
            np.testing.assert_array_equal(batch[name].reshape(4, -1)[:, 0], expected * factor + shift)
        assert type(batch["states"]) is np.ndarray
        assert batch["states"].shape == (4, 3, 2)
    for (_, one), (_, other) in zip(batches[4:], collect(4, 7), strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_without_segments_there_are_none_and_place_has_the_last_word(rows):
    with feed(rows, 2, 0, 3, seed=0, place=lambda batch: sorted(batch)) as batches:
        assert list(batches) == [(step, ["labels", "tokens"]) for step in range(3)]
        assert list(batches) == []
    with feed(rows, 2, 5, 5, seed=0) as batches:
        assert list(batches) == []


def test_it_runs_ahead_by_depth_and_no_further(rows):
    placed = threading.Semaphore(0)
    with feed(rows, 2, 0, 10, seed=0, place=lambda batch: placed.release(), depth=3) as batches:
        for _ in range(3):
            assert placed.acquire(timeout=PATIENCE)
        assert not placed.acquire(timeout=0.1)
        next(batches)
        assert placed.acquire(timeout=PATIENCE)
        assert not placed.acquire(timeout=0.1)


def test_errors_of_the_thread_reach_the_consumer_after_the_batches_before(rows):
    calls = []

    def place(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return batch

    with feed(rows, 2, 0, 10, seed=0, place=place) as batches:
        assert [next(batches)[0], next(batches)[0]] == [0, 1]
        with pytest.raises(RuntimeError, match="device lost"):
            next(batches)
        assert list(batches) == []  # without waiting for the thread


def test_leaving_early_ends_the_thread(rows):
    """After a few batches, before the first, and by an error of the consumer."""
    with feed(rows, 2, 0, 10**9, seed=0) as batches:
        assert [next(batches)[0] for _ in range(4)] == [0, 1, 2, 3]
    assert list(batches) == []
    with feed(rows, 2, 0, 10**9, seed=0):
        pass
    with pytest.raises(RuntimeError, match="of the consumer"), feed(rows, 2, 0, 10**9, seed=0):
        raise RuntimeError("of the consumer")


def test_ctrl_c_interrupts_a_consumer_that_waits(rows):
    """The consumer waits for a batch that comes only after the signal: it is interrupted, and the thread ends."""
    heard, in_time = threading.Event(), []
    main = threading.main_thread().ident  # the kernel delivers a Ctrl-C to it
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])

    def interrupt(*_):
        heard.set()
        raise KeyboardInterrupt

    def consume():
        with feed(rows, 2, 0, 10, seed=0, place=lambda batch: in_time.append(heard.wait(PATIENCE))) as batches:
            timer.start()
            next(batches)

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            consume()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)
    assert in_time == [True]
