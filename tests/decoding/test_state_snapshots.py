"""The places of snapshots. Tests of drafters, chat and server compare the texts that continue from them."""

import jax
import numpy as np

from helpers.how import sampling
from helpers.lab import CONFIG, HYBRID, VOCAB
from hydrajax.api import make_decode_fn
from hydrajax.decoding.state_snapshots import TAIL, StateSnapshots
from hydrajax.models.cache import states_of
from hydrajax.models.recurrent_cache import RecurrentCache


def test_a_text_with_recurrent_layers_continues_from_a_snapshot_or_its_end():
    plain, kept = StateSnapshots.of(CONFIG, 3), StateSnapshots.of(HYBRID, 3)
    assert (plain.start(37, 90), plain.at(37), plain.stops(0, 40, 90)) == (37, (), [])
    assert (kept.start(37, 90), kept.start(90, 90), kept.start(0, 0)) == (0, 90, 0)
    # A branch in the middle, and the last tokens of the prompt.
    assert kept.stops(0, 40, 90) == [40, 90 - TAIL]
    branch, prompt = ((RecurrentCache(np.full((1, 1, 1, 1), value, np.float32)),) for value in (1, 2))
    kept = kept.taken(40, branch).taken(74, prompt)
    assert [kept.start(shared, 90) for shared in (39, 40, 73, 74, 89)] == [0, 40, 40, 74, 74]
    assert (kept.at(74), kept.at(90), list(kept.until(73).states)) == (prompt, (), [40])
    assert kept.stops(74, 89, 90) == []  # the same prompt again
    assert kept.stops(90, 90, 95) == [90]  # at the text's end a snapshot takes no pass
    assert StateSnapshots.of(HYBRID, 3).stops(0, 3, 2 * TAIL - 1) == []  # as few tokens are run again
    assert StateSnapshots.of(HYBRID, 0).stops(0, 40, 90) == []
    # One too many displaces the one that spares the fewest tokens, but not the latest.
    assert list(kept.taken(90, ()).taken(91, ()).states) == [40, 74, 91]
    assert list(StateSnapshots.of(HYBRID, 1).taken(40, ()).taken(74, ()).states) == [74]


def test_a_base_without_recurrent_layers_has_empty_snapshots(lab):
    engine = make_decode_fn(lab.model, lab.drafters["hydra++"], "root", max_new_tokens=8).engine
    state = jax.eval_shape(lambda: engine.empty(2, 32, sampling(None, 2, VOCAB)))
    states, lengths = states_of(state.target.cache), np.zeros(2, np.int32)
    assert jax.tree.leaves(states) == []
    before, after = (jax.jit(engine.rewind).lower(state, lengths, None, *more).as_text() for more in ((), (states,)))
    assert before == after
