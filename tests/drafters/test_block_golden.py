"""Drafts of one pass against recordings of the official code: DFlash, DDTree, DSpark, DeepSpec's DFlash and JetSpec.

Every drafted block, every tree, every accept length and every token, decoded as one ragged batch of 8; the official
code decoded the prompts one by one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from helpers.golden_drafts import check_end_of_sequence, check_outputs, check_trees, loaded_draft, near, slow, steps_of
from helpers.lab import quick_jit
from helpers.recordings import need
from hydrajax.drafters.best_first import best_first
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.markov import KINDS, MarkovHead, MarkovNetwork
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree

CHAINS = [
    slow(name, "greedy_chain" if name == "jetspec_a" else "greedy")
    for name in ("dflash_a", "dspark_a", "dsdflash_a", "jetspec_a")
]


def checked_steps(loaded, tree, record) -> list:
    """Return the proposals of all steps, after comparing ids and accept lengths."""
    proposals, state = steps_of(loaded, tree, record)
    check_outputs(record, state.output, state.target.root)
    return proposals


# By default a chain of DSpark with its confidence head and a tree of DFlash, below.
@pytest.mark.parametrize(("name", "file"), CHAINS)
def test_chains(parallel, name, file):
    loaded, record = loaded_draft(parallel, name), np.load(need(parallel / name / f"{file}.npz"))
    proposals = checked_steps(loaded, presets.chain(loaded.drafter.depth), record)
    for row, accepts in enumerate(record["accept_lengths"]):
        for i in range((accepts >= 0).sum()):
            np.testing.assert_array_equal(proposals[i][0][row], record[f"verify_ids_{row}"][i], err_msg=f"{row}, {i}")


def test_confidence_cuts_the_chain(parallel):
    loaded, record = loaded_draft(parallel, "dspark_a"), np.load(need(parallel / "dspark_a" / "greedy_conf.npz"))
    drafter = dataclasses.replace(loaded.drafter, confidence=float(record["confidence_threshold"]))
    cut = dataclasses.replace(loaded, drafter=drafter)
    proposals = checked_steps(cut, presets.chain(8), record)
    for row, lengths in enumerate(record["proposal_lengths"]):
        for i, length in enumerate(lengths[lengths >= 0]):
            tokens = proposals[i][0][row]
            assert (tokens >= 0).sum() == 1 + length
            np.testing.assert_array_equal(tokens[: 1 + length], record[f"verify_ids_{row}"][i, : 1 + length])


TREES = [
    ("ddtree_a", "greedy_b8", "best-9"),
    slow("ddtree_a", "greedy_b16", "best-17"),
    slow("ddtree_a", "greedy_b32", "best-33"),
    slow("ddtree_ds_a", "greedy_b16", "best-17"),
    slow("ddtree_ds_a", "greedy_b8", "best-9"),
    slow("ddtree_ds_a", "greedy_b32", "best-33"),
    slow("jetspec_a", "greedy_b8_w3", "fanout-8-3"),
    slow("jetspec_a", "greedy_b16_w4", "fanout-16-4"),
    slow("jetspec_a", "greedy_b32_w7", "fanout-32-7"),
]


@pytest.mark.parametrize(("name", "file", "tree"), TREES)
def test_trees(parallel, name, file, tree):
    """Trees are equal node by node; where the recorded margin is small, two nodes may be swapped or exchanged."""
    loaded, record = loaded_draft(parallel, name), np.load(need(parallel / name / f"{file}.npz"))
    proposals = checked_steps(loaded, presets.by_name(tree), record)
    first = 0 if name.startswith("jetspec") else 1
    assert check_trees(record, proposals, swaps=12, first=first, exchanged=True) > 200


@pytest.mark.parametrize("name", [slow("ddtree_a"), "jetspec_a"])
def test_tree_builders(parallel, name):
    """Edge cases: more nodes than there are paths, a small vocabulary, one depth."""
    record, with_root = np.load(need(parallel / name / "tree_unit.npz")), name == "jetspec_a"
    for i in range(int(record["cases"])):
        wanted = {field: record[f"case{i}_{field}"] for field in ("tokens", "depths", "parents", "scores")}
        logits, budget = record[f"case{i}_logits"], int(record[f"case{i}_budget"])
        size = budget if with_root else budget + 1
        if size < 2:
            continue  # the root alone is no grown tree
        width = int(record[f"case{i}_width"]) if with_root else 0
        tree = BestFirstTree(size, top_k=width).reaching(len(logits))
        build = jax.jit(lambda x, tree=tree: best_first(tree, jnp.full(2, 77), x, LmHead()))
        made = jax.device_get(build(np.stack([logits] * 2)))
        n = len(wanted["parents"])
        for row in range(2):
            np.testing.assert_array_equal(made.tree.parents[row, :n], wanted["parents"], err_msg=f"case {i}")
            first = 0 if with_root else 1
            np.testing.assert_array_equal(made.tokens[row, first:n], wanted["tokens"], err_msg=f"case {i}")
            np.testing.assert_array_equal(made.tree.depths[row, first:n], wanted["depths"], err_msg=f"case {i}")
            assert (made.tokens[row, n:] == -1).all()
            # A path's score is the sum of its tokens' log-probabilities.
            log_p = log_softmax(logits, axis=-1)
            paths = [made.tree.paths[row, node][: made.tree.depths[row, node] + 1][1:] for node in range(n)]
            ours = [sum(log_p[d, made.tokens[row, node]] for d, node in enumerate(path)) for path in paths]
            near(ours[first:], wanted["scores"])


@pytest.mark.parametrize("kind", KINDS)
def test_markov_heads(parallel, kind):
    record = np.load(need(parallel / "dspark_a" / "markov_variants.npz"))
    rank, vocab = record[f"{kind}.markov_w1.weight"].shape[1], record["base_logits"].shape[-1]
    network = MarkovNetwork(MarkovHead(rank, kind), record["hidden"].shape[-1], (vocab, vocab), jnp.float32)
    inner = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
    params = {"embedding": record[f"{kind}.markov_w1.weight"], "out": record[f"{kind}.markov_w2.weight"].T}
    if inner:
        params |= {"kernel": record[f"{kind}.{inner}.weight"].T, "bias": record[f"{kind}.{inner}.bias"]}
    state, before, hidden = np.zeros((1, rank), np.float32), record["first_prev"].astype(np.int32), record["hidden"]
    chosen, logits = [], []
    for slot in range(hidden.shape[1]):
        state, correction = network.apply({"params": params}, state, before, hidden[:, slot])
        logits.append(record["base_logits"][:, slot] + correction)
        before = np.argmax(logits[-1], axis=-1).astype(np.int32)
        chosen.append(before)
    np.testing.assert_array_equal(np.stack(chosen, axis=1), record[f"{kind}_tokens"])
    np.testing.assert_allclose(np.stack(logits, axis=1), record[f"{kind}_logits"], atol=1e-5)
    text = np.concatenate([record["first_prev"][:, None], record[f"{kind}_tokens"][:, :-1]], axis=1).astype(np.int32)
    at_once = network.apply({"params": params}, text, hidden, method="along")
    np.testing.assert_allclose(record["base_logits"] + at_once, record[f"{kind}_logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["dflash_a", "dspark_a", slow("dsdflash_a")])
def test_teacher_forced(parallel, name):
    """The official training forward: hidden states, logits and confidence of blocks at random anchors."""
    loaded, record = loaded_draft(parallel, name), np.load(need(parallel / name / "teacher_forced.npz"))
    drafter, tokens = loaded.drafter, record["input_ids"].astype(np.int32)
    anchors = record["anchors"].astype(np.int32)

    @quick_jit
    def forward(params):
        base = BoundBase(loaded.model, params.base)
        aux = run_base(loaded.model, params.base, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        hidden = drafter.blocks(params.draft, aux, tokens, anchors, base)
        places = np.minimum(anchors[:, :, None] + np.arange(drafter.depth), tokens.shape[1] - 1)
        before = np.take_along_axis(tokens[:, None], places, axis=2)
        confidence = drafter.confidence_logits(params.draft, hidden, before) if drafter.confidence_head else ()
        return aux, hidden, drafter.block_logits(params.draft, hidden, before, base), confidence

    aux, hidden, logits, confidence = forward(loaded.params)
    kept, first = record["keep"].astype(bool), drafter.first_slot
    near(aux, record["target_features"])
    near(np.asarray(hidden)[kept], record["draft_hidden"][kept][:, first:])
    # Targets beyond the text differ: the official code repeats the last token too, but no loss reads them.
    if name == "dflash_a":
        near(np.asarray(logits)[kept], record["draft_logits"][kept][:, 1:])
    else:
        real = record["eval_mask"].astype(bool)
        near(np.asarray(logits)[:, :2][real[:, :2]], record["draft_logits_corrected"][real[:, :2]])
    if name == "dspark_a":
        near(np.asarray(confidence)[real], record["confidence"][real])


@pytest.mark.parametrize(
    ("name", "file", "tree"),
    [
        slow("dflash_a", "eos", "chain-7"),
        slow("dspark_a", "eos", "chain-8"),
        slow("dsdflash_a", "eos", "chain-8"),
        slow("ddtree_a", "eos_b16", "best-17"),
        slow("jetspec_a", "eos_b16_w4", "fanout-16-4"),
    ],
)
def test_end_of_sequence(parallel, name, file, tree):
    loaded, record = loaded_draft(parallel, name), np.load(need(parallel / name / f"{file}.npz"))
    check_end_of_sequence(loaded, presets.by_name(tree), record)
