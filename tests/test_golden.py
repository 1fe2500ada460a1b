"""Compare with recordings of the official Hydra code (tests/golden/README.md): trees, hidden states, head logits, every
proposed tree, every accept length and every token, for Hydra and Hydra++ heads and two trees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import forced_logits
from helpers.golden_drafts import LONGEST, check_outputs, check_trees, near, slow, steps_of
from helpers.how import sampling
from helpers.lab import quick_jit
from helpers.recordings import need
from helpers.tree_tools import leaf_paths
from hydrajax.api import load, make_decode_fn
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.drafter import Proposal
from hydrajax.language_model import LanguageModel
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.tree_json import read_tree

ARCHS, TREES = ("hydra_mlp", "hydra_pp"), ("mc63", "small")
# tests/golden has three of the four heads of hydra_mlp, enough for the small tree.
pytestmark = pytest.mark.quick(*ARCHS, "hydra_mlp-small", "hydra_pp-mc63")


class Recorded(NamedTuple):
    """The official greedy run of 8 prompts, padded with -1."""

    prompt: np.ndarray  # [8, P], padding 0
    lengths: np.ndarray
    output: list[np.ndarray]  # generated token ids per prompt
    accept_lengths: list[np.ndarray]  # per step, without the root


@pytest.fixture(scope="module", params=ARCHS)
def arch(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=TREES)
def tree_name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(golden, arch) -> LanguageModel:
    return load(golden / "base" / "mha", golden / arch / "heads")


@pytest.fixture(scope="module")
def tree(golden, arch, tree_name) -> TreeTopology:
    return read_tree(need(golden / arch / f"tree_{tree_name}.json"))


@pytest.fixture(scope="module")
def trace(golden, arch, tree_name) -> dict[str, np.ndarray]:
    return dict(np.load(need(golden / arch / f"trace_{tree_name}.npz")))


def read_recorded(golden, arch: str, tree_name: str) -> Recorded:
    run = np.load(need(golden / arch / f"greedy_{tree_name}.npz"))
    lengths = run["prompt_lens"]
    rows = range(len(lengths))
    return Recorded(
        prompt=np.maximum(run["prompts"], 0),
        lengths=lengths,
        output=[run["output_ids"][i, lengths[i] : run["output_lens"][i]] for i in rows],
        accept_lengths=[run["accept_lengths"][i, : run["num_steps"][i]] for i in rows],
    )


@pytest.fixture(scope="module")
def recorded(golden, arch, tree_name) -> Recorded:
    return read_recorded(golden, arch, tree_name)


@pytest.fixture(scope="module")
def decode(loaded, tree):
    return make_decode_fn(loaded.model, loaded.drafter, tree, max_new_tokens=LONGEST)


def test_tree_arrays(tree, trace):
    np.testing.assert_array_equal(tree.ancestor_mask, trace["hydra_attn_mask"] == 1)
    np.testing.assert_array_equal(tree.depths, trace["hydra_position_ids"])
    np.testing.assert_array_equal(leaf_paths(tree), trace["retrieve_indices"])
    np.testing.assert_array_equal((leaf_paths(tree) >= 0).sum(axis=1) - 1, trace["max_accepts"])


def test_official_tree_is_the_preset(golden):
    assert read_tree(golden / "hydra_pp" / "tree_mc63.json") == presets.sparse()


def teacher_forced(loaded: LanguageModel, ids: np.ndarray):
    """Return hidden states and head logits of the training forward, padding included."""

    @quick_jit
    def forward(params):
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        base = loaded.model.apply({"params": params.base}, ids, positions, causal_mask(ids.shape[1]))
        bound = BoundBase(loaded.model, params.base)
        return base.hidden, forced_logits(loaded.drafter, params.draft, base.aux_hidden_states, jnp.asarray(ids), bound)

    return forward(loaded.params)


def test_teacher_forced(golden, arch, loaded):
    record = np.load(golden / arch / "teacher_forced.npz")
    hidden, logits = teacher_forced(loaded, record["input_ids"].astype(np.int32))
    near(hidden, record["base_hidden"])
    near(logits, record["head_logits"])  # including the last positions, which wrap like torch.roll


@pytest.mark.parametrize("arch", ["hydra_pp"], indirect=True, scope="module")
def test_teacher_forced_with_right_padding(golden, arch, loaded):
    record = np.load(golden / arch / "teacher_forced_padded.npz")
    valid = record["attention_mask"] == 1
    assert valid[0].all()
    assert valid[1].sum() == 25
    hidden, logits = teacher_forced(loaded, record["input_ids"].astype(np.int32))
    near(hidden[valid], record["base_hidden"][valid])
    near(logits[jnp.array([0, 3])][:, valid], record["head_logits_heads_0_and_3"][:, valid])


@pytest.mark.quick("hydra_mlp-small")
def test_first_step_of_the_trace(loaded, decode, trace):
    """Compare the proposal, then logits and hidden states at every node of the *recorded* tree."""
    engine = decode.engine
    prompt = np.zeros((1, 64), np.int32)  # padded like in decode_fn
    prompt[0, :30] = trace["prompt"]

    @quick_jit
    def first_step(params, candidates):
        state = engine.prefill(params, prompt, np.array([30], np.int32), sampling(None, 1, loaded.config.vocab_size))
        recorded = Proposal(candidates, engine.program.tree.topology)
        return engine.propose(params, state).tokens, *engine.verify(params, state.target.cache, recorded)

    candidates = trace["step0_tree_candidates"][None].astype(np.int32)
    proposed, forward, logits = first_step(loaded.params, candidates)
    np.testing.assert_array_equal(proposed, candidates)
    near(forward.hidden[0], trace["step0_tree_hidden"])
    near(logits[0], trace["step0_tree_logits"])


def test_every_step(golden, arch, tree_name, tree, loaded):
    """Compare token ids, accept lengths and all proposed tokens, including rejected ones."""
    run = np.load(need(golden / arch / f"greedy_{tree_name}.npz"))
    proposals, state = steps_of(loaded, tree, run)
    check_outputs(run, state.output)
    check_trees(run, proposals)


def test_limit_cuts_the_last_step(decode, loaded, recorded):
    """A limit of 128 gives the recorded tokens without the overshoot and cuts the last accept length."""
    limit = 128
    limits = np.full(len(recorded.lengths), limit)  # the same program as before
    out = jax.device_get(decode(loaded.params, recorded.prompt, recorded.lengths, limits=limits))
    assert max(map(len, recorded.output)) > limit
    for row, (ids, accepts) in enumerate(zip(recorded.output, recorded.accept_lengths, strict=True)):
        check_cut(out, row, ids, accepts, limit)


def check_cut(out, row: int, ids: np.ndarray, accepts: np.ndarray, length: int) -> bool:
    """Compare a row with the first ``length`` recorded ids; return True if they end inside a step."""
    ends = np.cumsum(accepts + 1)  # tokens emitted after each recorded step
    steps = int(np.searchsorted(ends, length)) + 1
    expected = accepts[:steps].copy()
    expected[-1] -= ends[steps - 1] - length
    assert out.lengths[row] == length
    assert out.steps[row] == steps
    np.testing.assert_array_equal(out.tokens[row, :length], ids[:length], err_msg=f"prompt {row}")
    assert (out.tokens[row, length:] == -1).all()
    np.testing.assert_array_equal(out.accept_lengths[row, :steps], expected, err_msg=f"prompt {row}")
    assert (out.accept_lengths[row, steps:] == -1).all()
    return ends[steps - 1] > length


@pytest.mark.quick("hydra_pp")
def test_end_of_sequence(golden, arch, loaded):
    """The official code keeps all tokens of the step with EOS; ours stops at EOS.

    One recorded run has an EOS. The other prompts are compared with their runs without EOS, cut at the same id: the
    greedy tokens of the base are the same.
    """
    record = np.load(need(golden / arch / "eos_mc63.npz"))
    eos, prompt = int(record["eos_id"]), record["prompt"]
    runs = read_recorded(golden, arch, "mc63")
    row = next(i for i, n in enumerate(runs.lengths) if np.array_equal(runs.prompt[i, :n], prompt))
    runs.output[row] = record["output_ids"][len(prompt) :]
    runs.accept_lengths[row] = record["accept_lengths"]

    decode = make_decode_fn(loaded.model, loaded.drafter, presets.sparse(), max_new_tokens=LONGEST, eos_ids=(eos,))
    out = jax.device_get(decode(loaded.params, runs.prompt, runs.lengths))
    n_cut = 0
    for row, (ids, accepts) in enumerate(zip(runs.output, runs.accept_lengths, strict=True)):
        if eos not in ids:
            np.testing.assert_array_equal(out.tokens[row, : len(ids)], ids, err_msg=f"prompt {row}")
            assert out.lengths[row] >= len(ids)
            continue
        n_cut += check_cut(out, row, ids, accepts, int(np.argmax(ids == eos)) + 1)
    assert n_cut >= 3  # in several runs EOS is inside a step


@pytest.mark.parametrize(
    ("arch", "tree_name"),
    [("hydra_pp", "mc63"), slow("hydra_mlp", "small")],
    indirect=True,  # otherwise pytest would reuse the fixtures of another arch and tree
    scope="module",
)
def test_typical_acceptance_equals_the_official_code(golden, arch, loaded, tree, tree_name):
    """The recorded runs with ε 0.09, α 0.3 and temperature 0.7 are deterministic: ids and accept lengths are equal."""
    run = np.load(need(golden / arch / f"typical_{tree_name}.npz"))
    rule, lengths = Typical(epsilon=0.09, alpha=0.3, temperature=0.7), run["prompt_lens"]
    decode = make_decode_fn(loaded.model, loaded.drafter, tree, rule, max_new_tokens=LONGEST)
    out = decode(loaded.params, np.maximum(run["prompts"], 0), lengths)
    check_outputs(run, out)
    greedy = np.load(golden / arch / f"greedy_{tree_name}.npz")["accept_lengths"][[1, 3, 5, 7], :4]
    assert (run["accept_lengths"][:, :4] != greedy).any()  # the same prompts with another rule
