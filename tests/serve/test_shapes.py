"""Moves of sequences between decode states."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hydrajax.serve import shapes


@pytest.mark.parametrize("together", [1, 1000, shapes.MOVED_TOGETHER])
def test_a_reshaped_state_holds_the_gathered_slots_and_the_old_one_is_deleted(small, together, monkeypatch):
    monkeypatch.setattr(shapes, "MOVED_TOGETHER", together)
    sizes = [x.nbytes for x in jax.tree.leaves(small.empty(small.cache_lens[0]))]
    monkeypatch.setattr(small.shapes, "_parts", shapes._parts(sizes))
    (cache_len,) = small.cache_lens
    first, second = (small.finish(small.empty(cache_len), ids, small.neutral) for ids in (np.arange(9), np.arange(5)))
    state = small.put(small.tile(first, 2, cache_len), 1, second, cache_len)
    wanted = small.shapes.gather(state, [1, 0], cache_len)
    found = small.reshape(state, [1, 0], cache_len)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    for x, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, expected = jax.random.key_data(x), jax.random.key_data(expected)
        np.testing.assert_array_equal(x, expected)


def test_arrays_are_moved_in_runs_of_limited_size(monkeypatch):
    for sizes, runs in [([3, 3, 3], [2, 1]), ([9, 1, 9], [1, 1, 1]), ([6], [1]), ([0, 6, 6], [2, 1])]:
        monkeypatch.setattr(shapes, "MOVED_TOGETHER", 7)
        assert [len(sizes[part]) for part in shapes._parts(sizes)] == runs
