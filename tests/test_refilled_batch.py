"""Batches whose rows are refilled: every result is that of its prompt alone, in fewer steps than batches that wait."""

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import letters
from helpers.host_grammars import Table
from helpers.lab import QUICK, VOCAB, hybrid_lab
from hydrajax import refilled_batch
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.request import Request
from hydrajax.decoding.rows import put_sequence
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.generation import generate
from hydrajax.language_model import LanguageModel
from hydrajax.trees import presets

SHORT, LONG = [3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
PROMPTS = [LONG, SHORT, [7], [7], [7], [2, 7, 1, 8], LONG[:9], LONG[3:], [4, 4], [4, 4], [11, 3]]
LIMITS = [20, 3, 14, 2, 9, 5, 1, 24, 6, 11, 17]
BATCH = 3
TREE = presets.cartesian([2, 1, 1])


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled():
    with pytest.MonkeyPatch.context() as patched:
        jit = Executor._jit
        patched.setattr(Executor, "_jit", lambda *args, **given: jit(*args, **given | {"compiler_options": QUICK}))
        yield


def loaded(lab, name: str) -> LanguageModel:
    params = Params(lab.base(0), lab.draft(name, 0))
    return LanguageModel(lab.model, lab.drafters[name], params, letters.tokenizer(), (VOCAB - 1,))


@pytest.fixture(scope="module")
def m(lab):
    return loaded(lab, "hydra++")


def requests(**fields) -> list[Request]:
    """Return greedy and sampled requests with different limits."""
    return [
        Request(ExactSampling(temperature), max_new_tokens=limit, number=number, seed=3, **fields)
        for number, (limit, temperature) in enumerate(zip(LIMITS, [0.0, 0.9, 1.2] * 4, strict=False))
    ]


def executor_of(m, given, tree=TREE) -> Executor:
    """Return an executor whose smaller batches are compiled as soon as they are of use."""
    found = m.executor(m.program(*given, tree=tree), given[0])
    found.lost = defaultdict(lambda: math.inf)
    return found


def told(results) -> list[tuple]:
    return [(each.output_ids, each.text, each.finish_reason, each.emitted_per_step) for each in results]


def alone(executor, prompts, given) -> list[tuple]:
    return [told(generate(executor, [ids], requests=[one]))[0] for ids, one in zip(prompts, given, strict=True)]


@pytest.fixture
def steps(monkeypatch):
    """The batch size of every decode step."""
    taken, advance = [], FusedExecutor.advance

    def counted(self, state, *given, **more):
        before = np.array(self.output(state).steps)
        state, now = advance(self, state, *given, **more)
        taken.extend([len(before)] * int((now.steps - before).max()))
        return state, now

    monkeypatch.setattr(FusedExecutor, "advance", counted)
    return taken


@pytest.fixture(scope="module")
def executor(m):
    return executor_of(m, requests())


@pytest.fixture(scope="module")
def expected(executor):
    return alone(executor, PROMPTS, requests())


def test_every_result_is_that_of_its_prompt_alone_in_fewer_steps(executor, expected, steps):
    """Sequences end at different steps. The last one moves into a batch of its own."""
    assert told(generate(executor, PROMPTS, requests=requests(), batch_size=BATCH)) == expected
    assert (sorted(set(steps)), steps) == ([1, BATCH], sorted(steps, reverse=True))
    counts = [len(emitted) for *_, emitted in expected]
    waiting = sum(max(counts[at : at + BATCH]) for at in range(0, len(counts), BATCH))
    assert len(steps) == refilled(counts, BATCH) < 0.75 * waiting


def refilled(counts: list[int], rows: int) -> int:
    """Return the steps of a batch whose sequences take ``counts`` steps, each in the row that ends first."""
    ends = [0] * rows
    for count in counts:
        ends[ends.index(min(ends))] += count
    return max(ends)


@pytest.mark.parametrize("moved", ["to another row", "without the draft's state"])
def test_a_row_with_wrong_state_is_seen(executor, expected, monkeypatch, moved):
    """Planted errors: the comparison above finds both."""

    def put(state, at, sequence):
        if moved == "to another row":
            return put_sequence(state, (at + 1) % BATCH, sequence)
        return put_sequence(state, at, sequence)._replace(draft=jax.tree.map(jnp.zeros_like, state.draft))

    monkeypatch.setattr(refilled_batch, "put_sequence", put)
    found = told(generate(executor, PROMPTS, requests=requests(), batch_size=BATCH))
    ids, emitted = ([one[field] for one in found] != [one[field] for one in expected] for field in (0, 3))
    assert (ids, emitted) == (moved == "to another row", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["lookup", "lookup with hydra++", "model", "eagle", "corpus with eagle", "lookahead", "mtp", "hybrid"]
)
def test_every_kind_of_draft_moves_with_its_row(lab, name):
    m = loaded(hybrid_lab(), "lookup") if name == "hybrid" else loaded(lab, name)
    executor = executor_of(m, requests(), presets.chain(2))
    found = told(generate(executor, PROMPTS, requests=requests(), batch_size=BATCH))
    compared = 3 if "corpus" in name else 4  # a corpus has read other sequences before
    assert [one[:compared] for one in found] == [one[:compared] for one in alone(executor, PROMPTS, requests())]


def test_samples_of_a_prompt_are_those_of_a_list_that_repeats_it(m, executor, monkeypatch):
    """Each prompt is prefilled once."""
    passes = []

    def watched(name, verb):
        def call(self, prompt, lengths, *given, **more):
            passes.append((name, lengths.tolist()))
            return verb(self, prompt, lengths, *given, **more)

        monkeypatch.setattr(FusedExecutor, name, call)

    for name in ("read", "prefill"):
        watched(name, getattr(FusedExecutor, name))
    keywords = {"tree": TREE, "temperature": 0.9, "max_new_tokens": LIMITS[7], "seed": 5}
    found = m.generate([LONG, SHORT], n=3, batch_size=BATCH, **keywords)
    assert passes == [("read", [len(LONG)]), ("read", [len(SHORT)])]
    repeated = [LONG] * 3 + [SHORT] * 3
    given = [Request(ExactSampling(0.9), max_new_tokens=LIMITS[7], seed=5, number=number) for number in range(6)]
    assert told(found) == alone(executor, repeated, given)
    assert len({tuple(one.output_ids) for one in found}) == 6
    for wrong in (0, 2.5):
        with pytest.raises(HydrajaxError, match=f"n: got {wrong}, expected at least 1"):
            m.generate([LONG], n=wrong)


def test_stop_strings_free_a_row(executor, expected):
    given = requests(stop=("j", "ab"))
    found = told(generate(executor, PROMPTS, requests=given, batch_size=BATCH))
    assert found == alone(executor, PROMPTS, given)
    assert {reason for _, _, reason, _ in found} >= {"stop", "length"}
    assert found != expected


@pytest.mark.slow
def test_rows_that_end_together_make_room_for_caches_of_another_length(m):
    """A long prompt, and samples of a short one, which is prefilled again for the shorter cache."""
    given = [Request(ExactSampling(0.0), max_new_tokens=1, seed=3)] * 7
    executor = executor_of(m, given)
    for count in (5, 7):  # first with one that is left alone
        prompts, own = [LONG * 2, *[SHORT] * (count - 1)], given[:count]
        assert told(generate(executor, prompts, requests=own, batch_size=4)) == alone(executor, prompts, own)


@pytest.mark.slow
def test_rows_follow_their_own_grammars(lab):
    grammars = [Table(3, VOCAB), None, Table(4, VOCAB)] * 4
    given = [one.replace(grammar=grammar) for one, grammar in zip(requests(), grammars, strict=False)]
    executor = executor_of(loaded(lab, "none"), given, presets.root())
    assert executor.follows_grammars
    assert told(generate(executor, PROMPTS, requests=given, batch_size=BATCH)) == alone(executor, PROMPTS, given)


def test_smaller_batches_have_their_own_trees(m, executor, expected):
    larger = executor_of(m, requests(), presets.chain(4))  # deeper
    given = {"requests": requests(), "batch_size": BATCH}
    found = told(generate(executor, PROMPTS, executor_for=lambda size: larger, **given))
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    assert [key[:2] for key in larger.compiled] == [("steps", 1)]
    assert m.for_batch(executor, 1).program == executor.program.replace(tree=m.default_tree(1))
    other = m.executor(executor.program.replace(logprobs=0))
    with pytest.raises(HydrajaxError, match="executor_for: got another program for 1 rows"):
        list(generate(executor, PROMPTS, executor_for=lambda size: other, **given))


def test_a_smaller_batch_is_compiled_when_larger_ones_have_lost_as_much_time(executor, expected, steps, monkeypatch):
    smaller = [("steps", 1), ("steps", 2)]
    compiled = {key: 60.0 for key in executor.compiled if key[:2] not in smaller}
    for lost, sizes in ((0.0, {BATCH}), (59.0, {BATCH}), (60.0, {1, BATCH})):
        monkeypatch.setattr(executor, "compiled", dict(compiled))
        monkeypatch.setattr(executor, "lost", defaultdict(lambda lost=lost: lost))
        steps.clear()
        assert told(generate(executor, PROMPTS, requests=requests(), batch_size=BATCH)) == expected
        assert set(steps) == sizes
        assert all(lost <= seconds < lost + 1 for seconds in executor.lost.values())
