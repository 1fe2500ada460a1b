"""The contract of every drafter: whatever it proposes, the output is the base's, for ragged batches with limits, for
prompts in chunks, for later messages of a conversation, and sampled. Files of single drafters test their guesses.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import how, sampling
from helpers.lab import NEW, VOCAB, hybrid_lab
from helpers.log_probabilities import of_whole_text
from helpers.noise import draft_noise
from helpers.refusals import refusal
from hydrajax.api import make_decode_fn
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.processing import TokenCounts
from hydrajax.decoding.processors import Penalties
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.trainable import Trainable
from hydrajax.formats.draft_registry import KINDS, heads, kind_of, trainable, without_weights
from hydrajax.lookahead.drafter import Lookahead
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import states_of
from hydrajax.trees import presets

PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
# A tree of `helpers.lab` or by name; most kinds of trees occur with heads, layers and models.
TREES = {
    "none": "root",
    "medusa": "flat",
    "hydra": "random",
    "hydra on layer -1": "skips ranks",
    "hydra++": "random",
    "amphista": "grown",
    "eagle": "grown",
    "eagle3": "skips ranks",
    "mtp": "random",
    "mtp of mimo": "grown",
    "gemma4 assistant": "random",
    "model": "grown",
    "windowed model": "deep and late",
    "sure model": "random",
    "the base": "chain",
    "dflash": "best-9",
    "dflash of some tokens": "best-9",
    "jetspec": "fanout-30-2",  # more nodes than a `DynamicTree` has candidates
    "dspark": "dynamic-8-2-3",
    "p-eagle": "best-9",
    "hydra with the base's lm head": "cartesian-12x2",
    "hydra of some tokens": "cartesian-12x2",  # twelve guesses at depth 1 exceed the reduced vocabulary
    "medusa of low rank": "cartesian-12x2",
    "lookup": "cartesian-3x2x1",
    "lookahead": "cartesian-3x1",
    "lookup with hydra++": "cartesian",
    "lookup with model": "skips ranks",
    "lookup with jetspec": "fanout-7-2",
    "corpus": "best-10",
    "corpus with hydra": "chain",
    "corpus with eagle": "grown",
}


def tree_of(lab, name: str):
    return Program(lab.drafters[name], lab.trees.get(TREES[name]) or presets.by_name(TREES[name])).tree


def test_the_table_has_every_drafter(lab):
    assert TREES.keys() == lab.drafters.keys() - {"oracle"}
    assert {type(drafter) for drafter in lab.drafters.values()} >= {kind.drafter for kind in KINDS.values()}


def test_specs_and_states(lab):
    for name in TREES:
        drafter, tree = lab.drafters[name], tree_of(lab, name)
        assert hash(drafter) == hash(dataclasses.replace(drafter))
        state = jax.eval_shape(lambda drafter=drafter: drafter.init_state(3, 20))
        chex.assert_tree_shape_prefix(state, (3,))
        assert (
            jax.eval_shape(lambda state, drafter=drafter: drafter.rewind(state, jnp.array([2, 0, 1])), state) == state
        )
        assert tree.depth <= drafter.spec.depth
        assert drafter.spec.longest_path(tree) == tree.depth + drafter.spec.branch_nodes
        assert drafter.spec.verified_nodes(tree) >= drafter.spec.candidate_nodes(tree) >= tree.size


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.quick("lookup")
def test_every_kind_that_is_installed_decodes_the_bases_own_text(lab, name):
    """As programs build it, with its default tree and random parameters; sequences can be removed and moved."""
    drafter, base = KINDS[name].build(lab.model.config, jnp.float32), BoundBase(lab.model, lab.base(0))
    tree = presets.by_name(drafter.spec.default_tree)
    params = draft_noise(drafter, base, 3)
    texts, _ = lab.references(0, PROMPTS)
    out = lab.decode(make_decode_fn(lab.model, drafter, tree, max_new_tokens=NEW), 0, params, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        assert out.tokens[row].tolist() == lab.expected(texts[row], len(prompt), NEW)
    assert (out.accept_lengths.max() > 0) == (name not in ("none", "corpus"))  # a corpus is empty at first
    assert KINDS[name].title
    chex.assert_tree_shape_prefix(drafter.init_state(3, 20), (3,))
    assert name not in without_weights() or (params == {} and kind_of(drafter) is None)


def settings_of(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(heads(name).Settings)}


@pytest.mark.parametrize("name", trainable())
def test_heads_are_known_by_their_name_with_and_without_a_prefix_layer(lab, name):
    kind, base = heads(name), BoundBase(lab.model, lab.base(0))
    drafter = kind.for_base(lab.model.config, jnp.float32)
    assert isinstance(drafter, Trainable)
    assert kind_of(drafter) == name
    for prefix in (False, True) if "prefix" in settings_of(name) else ():
        drafter = kind.for_base(lab.model.config, jnp.bfloat16, kind.Settings(prefix=prefix, num_draft_heads=3))
        assert (kind_of(drafter), drafter.prefix is not None, drafter.spec.prefix_layer) == (name, prefix, prefix)
        assert (drafter.spec.depth, drafter.spec.num_draft_heads, drafter.width, drafter.vocab_size) == (3, 3, 32, 17)
        assert drafter.dtype == jnp.bfloat16
        boxed = jax.eval_shape(lambda drafter=drafter: drafter.init(jax.random.key(0), base))
        assert ("prefix" in boxed) == prefix


def test_a_setting_of_one_name_is_the_same_in_all_kinds():
    """A training file may have settings of other kinds at their defaults, and records of runs do."""
    found = [
        (field.name, field.type, field.default)
        for name in trainable()
        for field in dataclasses.fields(heads(name).Settings)
    ]
    assert len(set(found)) == len({name for name, _, _ in found})


def test_programs_that_do_not_fit_are_refused(lab):
    for name, tree, rule, message in (
        ("hydra", "chain-5", "greedy", "got a depth of 5, expected at most the 4 tokens that the draft proposes"),
        ("hydra", "[[17]]", "greedy", "got rank 17, expected less than the vocabulary of 17 tokens"),
        ("eagle", "dynamic-20-11-4", "greedy", "got a depth of 12, expected at most the 10 tokens"),
        ("eagle", "dynamic-20-1-18", "greedy", "got 18 children per node, expected at most the vocabulary of 17"),
        ("eagle", "fanout-8-2", "greedy", "expected best-8 because Eagle drafts by levels"),
        ("jetspec", "fanout-8-2", "rejection", "expected best-8 because RejectionSampling draws the candidates"),
        ("model", "chain-17", "greedy", "got a depth of 17, expected at most the 16 tokens that the draft proposes"),
        ("lookup", "dynamic-8-1-4", "greedy", "expected a static tree because PromptLookup cannot fill dynamic ones"),
        ("lookup", "chain-11", "greedy", "got a depth of 11, expected at most the 10 tokens that the draft proposes"),
        ("lookup", "chain-3", "rejection", "got RejectionSampling, expected another one: PromptLookup does not sample"),
        ("lookahead", "chain-3", "greedy", "got a depth of 3, expected at most the 2 tokens that the draft proposes"),
        ("lookahead", "dynamic-8-1-4", "greedy", "expected a static tree because Lookahead cannot fill dynamic ones"),
        ("lookahead", "chain-2", "rejection", "got RejectionSampling, expected another one: Lookahead does not sample"),
    ):
        refusal(lambda given=(tree, rule), of=lab.drafters[name]: make_decode_fn(lab.model, of, *given), message)
    refusal(
        lambda: make_decode_fn(lab.model, Lookahead(38, 5, 2), "chain-3"), "draft: got a window of 40, expected less"
    )
    make_decode_fn(lab.model, Lookahead(37, 5, 2), "chain-3")


# By default: those whose decoding no other test compares.
@pytest.mark.quick("mtp of mimo", "jetspec", "p-eagle", "medusa of low rank", "lookup", "corpus with hydra")
@pytest.mark.parametrize("name", TREES)
def test_greedy_output_is_the_bases(lab, name):
    """Of a ragged batch whose sequences end at different steps; every text was continued alone and without a cache."""
    drafter, tree, limits = lab.drafters[name], tree_of(lab, name), [NEW, 2, 11]
    decode = make_decode_fn(lab.model, drafter, tree, max_new_tokens=NEW)
    texts, _ = lab.references(0, PROMPTS)
    out = lab.decode(decode, 0, lab.draft(name, 0), PROMPTS, limits=limits)
    for row, prompt in enumerate(PROMPTS):
        assert out.tokens[row, : out.lengths[row]].tolist() == lab.expected(texts[row], len(prompt), limits[row])
    longest = lab.decode(decode, 0, lab.draft(name, 0), PROMPTS).accept_lengths.max()
    assert 1 <= longest <= drafter.spec.longest_path(tree) or name == "none"


@pytest.mark.quick("eagle3")
@pytest.mark.parametrize("name", [name for name in TREES if name != "the base"])
def test_greedy_output_is_that_of_a_base_with_recurrent_layers(name):
    test_greedy_output_is_the_bases(hybrid_lab(), name)


@pytest.mark.quick("hydra++")
@pytest.mark.parametrize("name", TREES)
def test_turns_chunks_and_reused_prefixes(lab, name):
    """A conversation, and prompts that are read in chunks after a rewind, give the tokens of one long prompt."""
    width, new, limits = 8, 20, np.array([20, 20, 1], np.int32)
    params, spec = Params(lab.base(0), lab.draft(name, 0)), how(processors=[Penalties(presence_penalty=1e-6)])
    engine = make_decode_fn(lab.model, lab.drafters[name], tree_of(lab, name), max_new_tokens=new).engine
    drawn = sampling(spec, 3, VOCAB, limits=limits)
    prefill, step = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.decode_step)
    extend, feed, propose = map(lab.quick_jit, (engine.extend, engine.feed, engine.propose))

    def finished(state, texts):
        """Decode, check that the output is the base's after these texts, and return both."""
        while not state.output.done.all():
            state = step(params, state)
        found, wanted = jax.device_get(result_of(state.output)).ids(), lab.references(0, texts)[0]
        for row, text in enumerate(texts):
            assert found[row] == lab.expected(wanted[row], len(text), limits[row]), row
        return state, [[*text, *ids] for text, ids in zip(texts, found, strict=True)]

    def prefilled(texts):
        return prefill(params, *right_padded(texts, 32), drawn, slots=64)

    # The guesses after some steps are those after one prefill of the same text, whatever was rejected.
    state = prefilled(PROMPTS)
    accepted = 0
    for _ in range(12):  # until the step after the first accepted draft
        last = accepted > 0
        state = step(params, state)
        running = ~np.asarray(state.output.done)
        accepted = np.asarray(state.output.accept_lengths)[running].max()
        if last:
            break
    assert accepted > 0 or name not in ("hydra++", "eagle", "the base")
    emitted = jax.device_get(result_of(state.output)).ids()
    whole = prefilled([[*prompt, *ids] for prompt, ids in zip(PROMPTS, emitted, strict=True)])
    guesses = [np.asarray(propose(params, each).tokens)[running] for each in (state, whole)]
    assert running.any()
    if name != "lookahead":  # its guesses depend on the steps before
        np.testing.assert_array_equal(*guesses)

    state, texts = finished(prefilled(PROMPTS), PROMPTS)
    more = [[5, 5], [1], [8, 0, 2]]
    state, _ = finished(
        extend(params, state, *right_padded(more, width), drawn), [a + b for a, b in zip(texts, more, strict=True)]
    )
    # Other texts with the same beginnings, of which all but the last two tokens are read in chunks.
    common = np.array([7, 1, 4], np.int32)
    kept = [text[:n] for text, n in zip(PROMPTS, common, strict=True)]
    counts, states = TokenCounts.of_prompt(*right_padded(kept, 16), VOCAB), states_of(prefilled(kept).target.cache)
    assert (states != ()) == lab.model.config.any_recurrent
    state = lab.quick_jit(engine.rewind)(state, common, counts, states)
    texts = [[*PROMPTS[0][:7], *range(11)], [2, 7, 1, 8], [*PROMPTS[2][:4], 3, 11, 12, 0, 16, 15, 14]]
    at, ends = common, np.array([len(text) - 2 for text in texts], np.int32)
    while (at < ends).any():
        until = np.minimum(at + width, ends)
        chunks = right_padded([text[a:b] for text, a, b in zip(texts, at, until, strict=True)], width)
        following = np.array([text[b] for text, b in zip(texts, until, strict=True)], np.int32)
        state, at = feed(params, state, *chunks, following), until
    finished(extend(params, state, *right_padded([text[-2:] for text in texts], width), drawn), texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TREES if name != "the base"])
def test_turns_chunks_and_reused_prefixes_with_recurrent_layers(name):
    test_turns_chunks_and_reused_prefixes(hybrid_lab(), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_samples_are_those_of_plain_sampling(lab, name):
    """Random numbers depend on the seed and the position alone. Also with log-probabilities."""
    rule, tree = ExactSampling(0.8, top_k=9), tree_of(lab, name)
    decode = make_decode_fn(lab.model, lab.drafters[name], tree, rule, max_new_tokens=NEW, logprobs=0)
    for seed in range(2):
        found = lab.decode(decode, 0, lab.draft(name, 0), PROMPTS, rule=rule, seed=seed)
        expected = lab.plainly(PROMPTS, rule, seed)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
    for row, prompt in enumerate(PROMPTS):
        ids = found.tokens[row, : found.lengths[row]]
        log_p = of_whole_text(lab.model, lab.base(0), prompt, ids.tolist())
        np.testing.assert_allclose(found.logprobs[row, : len(ids)], log_p[np.arange(len(ids)), ids], atol=1e-4)
    assert name == "none" or found.steps.sum() < expected.steps.sum()
