"""Runs of drafts from settings to text: interrupted, resumed, exported, loaded, trained further."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.draft_heads import random_params
from helpers.refusals import assert_refused
from helpers.runs import heads_file, refused, without_clock
from hydrajax import load
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.dspark import DSpark
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.markov import MarkovHead
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.train.data import dataset
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.train.run_config import config_from, draft_of
from hydrajax.train.tasks.from_config import tokenizer_of
from hydrajax.train.tasks.heads_task import load_heads, make_drafter, with_vocabulary

EAGLE_1 = {"reconstruction_weight": 1.0, "teacher_weight": 0.1, "feature_noise": 0.1}
KINDS = {
    "eagle": {"draft": {"heads": "eagle"}, "objective": EAGLE_1},
    "eagle3": {"draft": {"heads": "eagle3", "vocabulary": 120, "ttt_length": 2}, "objective": {"head_decay": 0.8}},
    "mtp": {"draft": {"heads": "mtp", "ttt_length": 2}, "objective": {"head_decay": 0.8}},
    "gemma4-assistant": {"draft": {"heads": "gemma4-assistant", "ttt_length": 2, "width": 16, "layers": 2}},
    "dspark": {
        "draft": {"heads": "dspark", "block_size": 4, "markov_rank": 4, "num_anchors": 6, "vocabulary": 150},
        "objective": {"lm_weight": 0.1, "teacher_weight": 0.0, "distance_weight": 0.9, "confidence_weight": 1.0},
        "tree": "chain-4",
    },
    "dflash": {"draft": {"heads": "dflash", "block_size": 4, "num_anchors": 6}, "tree": "chain-3"},
}
OF_ONE_PASS = ("dspark", "dflash")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_stopped_run_ends_bitwise_where_another_ends_and_its_draft_decodes(
    kind, base, settings, program, train, config_file, tmp_path
):
    data = settings["data"] | {"rows": "pack"}
    settings = settings | KINDS[kind] | {"data": data, "steps": 6, "checkpoint_every": 2, "eval_every": 3}
    config = config_file(**settings)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, f"output={whole}")
    assert "stopped at step 4 of 6" in program("--config", config, f"output={parts}", stopped=4).out
    assert "resumed at step 4 of 6" in train(config, f"output={parts}").out
    assert without_clock(parts) == without_clock(whole)
    if kind != "dspark":  # the native format's file names differ between runs
        assert heads_file(parts).read_bytes() == heads_file(whole).read_bytes()

    m = load(base, whole / "heads")
    if kind not in OF_ONE_PASS:
        expected = make_drafter(draft_of(**settings["draft"]), m.model.config, "float32", counts_of(settings))
        # The released format does not hold this setting.
        assert dataclasses.replace(m.drafter, ttt_length=expected.ttt_length) == expected
    prompts = ["the bird on the tree", "a stone"]
    drafted = m.generate(prompts, tree="best-8" if kind in OF_ONE_PASS else "dynamic-8-2-4", max_new_tokens=16)
    assert [out.text for out in drafted] == [out.text for out in load(base).generate(prompts, max_new_tokens=16)]

    (tmp_path / "other.txt").write_text("branch. draft heads " * 900)
    more = f"output={tmp_path / 'more'}", f"draft.init={whole / 'heads'}", f"data.files=[{tmp_path / 'other.txt'}]"
    train(config, *more, "steps=1")
    if "vocabulary" in KINDS[kind]["draft"]:  # which the further text would give another one
        assert load(base, tmp_path / "more" / "heads").drafter.vocabulary == m.drafter.vocabulary
    if kind in OF_ONE_PASS:
        return
    other = "eagle3" if kind == "eagle" else "eagle"
    draft = f"draft={{heads: {other}, init: {whole / 'heads'}}}"
    assert "by the settings" in refused(program("--config", config, f"output={tmp_path / 'other'}", draft))


def counts_of(settings: dict) -> np.ndarray:
    """Target counts equal those counted one by one, and the vocabulary has the most frequent ids."""
    config = config_from({"output": "unused"} | settings)
    rows = dataset.build(config.data, tokenizer_of(config), config.seed, lambda text: None).train
    counts = Counter(rows.labels.ravel().tolist())
    return np.array([counts[token] for token in range(300)])


def test_the_vocabulary_is_of_the_most_frequent_targets(settings, base):
    counts = counts_of(settings)
    shape = read_config(base, "model")
    for draft in (draft_of(heads="eagle3", vocabulary=50), draft_of(heads="medusa", vocabulary=50)):
        known = make_drafter(draft, shape, "float32", counts).vocabulary.tokens
        others = np.setdiff1d(np.arange(300), known)
        assert (len(known), (np.diff(known) > 0).all()) == (50, True)
        assert counts[known].min() >= counts[others].max()


SHAPE = LlamaConfig(97, 32, 64, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16, max_positions=64)
LOW_RANK = {"lm_down", "lm_up"}
# By far the most frequent targets, unordered.
FREQUENT = np.random.default_rng(1).permutation(97)[:60]
LM_HEADS = [
    ("medusa", {"lm_head": "low_rank", "lm_rank": 8, "vocabulary": 60}, LOW_RANK),
    ("medusa", {"lm_head": "shared", "vocabulary": 60}, set()),
    ("hydra", {"lm_head": "shared"}, set()),
    ("hydra", {"vocabulary": 60}, {"lm_kernel"}),
    ("amphista", {"lm_head": "low_rank", "lm_rank": 8}, LOW_RANK),
]


@pytest.mark.quick("low rank, 60")
@pytest.mark.parametrize(("heads", "lm_head", "names"), LM_HEADS, ids=["low rank, 60", *map(str, range(4))])
def test_small_lm_heads_learn_and_come_back(heads, lm_head, names, tmp_path):
    model = Llama(SHAPE, jnp.float32)
    base = BoundBase(model, jax.jit(lambda: init_base(model, jax.random.key(0)))())
    counts = np.bincount(FREQUENT, minlength=97) * 100 + np.arange(97)
    drafter = make_drafter(draft_of(heads=heads, num_draft_heads=2, **lm_head), SHAPE, jnp.float32, counts)
    known = sorted(FREQUENT.tolist()) if "vocabulary" in lm_head else list(range(97))
    assert drafter.vocabulary is None or drafter.vocabulary.tokens.tolist() == known
    params = jax.jit(lambda: drafter.init(jax.random.key(1), base))()
    assert {name for name in params["head_0"] if name.startswith("lm_")} == names
    # Every token determines the next two.
    tokens = (np.arange(16) * 5 + np.random.default_rng(0).integers(0, 97, (8, 1))) % 97
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "labels": jnp.asarray(tokens, jnp.int32)}
    out = jax.jit(lambda params: run_base(model, params, batch["tokens"]))(base.params)
    objective, optimizer = Objective(lm_weight=1.0, teacher_weight=0.0), optax.adam(3e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        value, slope = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slope, state)
        return optax.apply_updates(params, update), state, value

    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]

    # Tokens outside the vocabulary rank last, trained ones near the front.
    batch = {"tokens": batch["tokens"]}
    ranks = np.asarray(drafter.ranks(params, out.aux_hidden_states, batch, base, 64, 2))
    for k in range(2):
        found, wanted = ranks[k][:, : -(k + 2)], tokens[:, k + 2 :]
        assert (found[~np.isin(wanted, known)] == 97).all()
        assert np.median(found[np.isin(wanted, known)]) < 20

    export_heads(tmp_path / "heads", drafter, params, dtype=jnp.float32)
    again, read = load_draft(tmp_path / "heads", SHAPE, jnp.float32)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(np.asarray, params))

    if "vocabulary" in lm_head:  # training starts with the vocabulary of the file; another size is refused
        same, few = (draft_of(heads=heads, num_draft_heads=2, **lm_head | {"vocabulary": n}) for n in (60, 8))
        other, smaller = (make_drafter(draft, SHAPE, jnp.float32, counts[::-1]) for draft in (same, few))
        assert load_heads(other, str(tmp_path / "heads"), SHAPE)[0].vocabulary == drafter.vocabulary != other.vocabulary
        assert_refused(load_heads, (smaller, str(tmp_path / "heads"), SHAPE, "draft.init: "))


@pytest.mark.parametrize("kind", ["hydra", "dspark"])
def test_another_vocabulary_keeps_the_logits_of_common_tokens(tiny_model, kind):
    model, base = tiny_model
    if kind == "hydra":
        old = HydraHeads(2, 32, 61, small_lm_head=LmHead(shared=True, vocabulary=Vocabulary(range(0, 40))))
    else:
        old = DSpark(model.config.plain_layer.replace(qk_norm=True), (1,), 60, 3, MarkovHead(4))
        old = dataclasses.replace(old, vocabulary=Vocabulary(range(0, 40)))
    params, bound = random_params(old, tiny_model), BoundBase(model, base)
    new, moved = with_vocabulary(old, params, Vocabulary(range(20, 61)), model)
    rows = np.random.default_rng(3).standard_normal((2, 1, 3, 32)).astype(np.float32)
    before = np.arange(6, dtype=np.int32).reshape(2, 1, 3)

    def logits(drafter, params):
        if kind == "hydra":
            return drafter.head_logits(params, 1, rows, bound)
        return drafter.block_logits(params, rows, before, bound)

    first, second = jax.jit(logits, static_argnums=0)(old, params), jax.jit(logits, static_argnums=0)(new, moved)
    np.testing.assert_allclose(second[..., :20], first[..., 20:], rtol=1e-5, atol=1e-5)
    assert second.shape[-1] == len(new.vocabulary) == 41
    own = HydraHeads(2, 32, 61, small_lm_head=LmHead(vocabulary=Vocabulary([1])))
    message = "draft.vocabulary: got 41, expected 1 as in draft.init"
    assert_refused(with_vocabulary, (own, {}, new.vocabulary, model, message))
