"""Medusa-2: the joint loss against NumPy and finite differences, its two stages, and the files of a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hydrajax
from helpers.lora_files import apply_lora
from helpers.loss_examples import random_params, rows_with_gaps
from helpers.refusals import refusal
from helpers.runs import JOINT as RUN
from hydrajax.lowbit.int4_tiles import Int4Tiles
from hydrajax.lowbit.tiles import Int8Tiles
from hydrajax.models.adapter import KERNELS, TARGETS, Adapter, split_adapter, with_adapter
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.packed_forward import run_base
from hydrajax.ops import trace
from hydrajax.sharding import make_mesh
from hydrajax.train.losses import IGNORED, Objective
from hydrajax.train.metrics import read_metrics
from hydrajax.train.optimizer import optimizer_of
from hydrajax.train.run_config import DataConfig, JointConfig, OptimizerConfig, TrainConfig, draft_of
from hydrajax.train.tasks.heads_task import HeadsLoss, make_drafter
from hydrajax.train.tasks.joint_task import JointLoss, JointTask, heads_weight
from hydrajax.train.train_step import init_state, make_train_step, state_shardings

RATE, DECAY = 1e-3, 0.1
ADAPTER = Adapter(rank=3, alpha=6.0, dropout=0.0)
TEXT = Objective(lm_weight=1.0, teacher_weight=0.0, head_decay=0.8, chunk_tokens=8)
WEIGHTS = {"base_weight": 0.7, "heads_weight": 0.3}
FAMILIES = {
    "medusa": draft_of(heads="medusa", num_draft_heads=3),
    "hydra++": draft_of(heads="hydra", num_draft_heads=3, n_layers=2, prefix=True),
    "amphista": draft_of(heads="amphista", num_draft_heads=3),
    "eagle": draft_of(heads="eagle"),
    "mtp": draft_of(heads="mtp", ttt_length=2),
    "eagle3": draft_of(heads="eagle3", aux_hidden_layers=(0, 1, 2), ttt_length=2),
}


def noise(tree, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), jnp.float32), tree)


def changed(loss: JointLoss, **settings) -> JointLoss:
    """Return the loss with other settings of the adapted model."""
    return dataclasses.replace(loss, heads=dataclasses.replace(loss.heads, model=loss.heads.model.clone(**settings)))


def gradient_of(loss, frozen, batch):
    """Return a function from parameters to their gradient."""
    return jax.grad(lambda params: loss(params, frozen, batch, loss.totals(batch), None)[0])


@pytest.fixture(scope="module")
def example(tiny_model):
    """``example(draft, joint) -> (loss, params, frozen, batch)`` with noise in every parameter."""
    model, frozen = tiny_model
    adapted = model.clone(adapter=ADAPTER)
    shapes = split_adapter(jax.eval_shape(lambda: init_base(adapted, jax.random.key(0))))[1]
    batch = {name: jnp.asarray(x) for name, x in rows_with_gaps()[2].items()}

    def make(draft=FAMILIES["medusa"], objective=TEXT, **joint):
        drafter = make_drafter(draft, model.config, jnp.dtype(jnp.float32))
        loss = JointLoss(HeadsLoss(adapted, drafter, objective), model, JointConfig(**joint))
        params = {"adapter": noise(shapes, 1), "draft": random_params(drafter, BoundBase(model, frozen))}
        return loss, params, frozen, batch

    return make


@functools.partial(jax.jit, static_argnums=0)
def value_and_slope(loss, params, frozen, batch):
    """Equal losses share a program."""
    run = lambda params: loss(params, frozen, batch, loss.totals(batch), None, 0)  # noqa: E731
    return jax.value_and_grad(run, has_aux=True)(params)


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model, weights, tokens):
    return BoundBase(model, weights).logits(run_base(model, weights, tokens).hidden)


@pytest.mark.parametrize("distill", [False, True])
def test_loss_equals_numpy(example, distill):
    """The base's loss is the cross entropy of next tokens, or with distill KL(original || adapted)."""
    loss, params, frozen, batch = example(distill=distill, **WEIGHTS)
    (value, parts), _ = value_and_slope(loss, params, frozen, batch)
    adapted, original = (
        log_softmax(np.asarray(all_logits(model, weights, batch["tokens"])))
        for model, weights in ((loss.heads.model, with_adapter(frozen, params["adapter"])), (loss.original, frozen))
    )
    labels = np.asarray(batch["labels"])[:, 1:]
    if distill:
        nats = (np.exp(original) * (original - adapted)).sum(axis=-1)[:, :-1]
    else:
        nats = -np.take_along_axis(adapted[:, :-1], np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    expected = nats[labels != IGNORED].mean()
    assert expected > 0.1
    np.testing.assert_allclose(parts["base_loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(value, 0.7 * expected + 0.3 * (0.8 ** np.arange(3) @ parts["lm"]), rtol=1e-4)


@pytest.mark.quick("medusa")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_finite_differences(example, family):
    """Along a random direction of the adapter's and of the heads' parameters."""
    loss, params, frozen, batch = example(FAMILIES[family], distill=True, **WEIGHTS)
    if family in ("eagle", "mtp"):  # they read the base's lm head, which may have no adapter then
        params["adapter"] = {name: x for name, x in params["adapter"].items() if isinstance(x, dict)}
        loss = changed(loss, adapter=dataclasses.replace(ADAPTER, targets=TARGETS[:-1]))
    _, gradient = value_and_slope(loss, params, frozen, batch)
    for part in ("adapter", "draft"):
        start, direction = (jax.tree.map(np.asarray, tree) for tree in (params[part], noise(params[part], 2)))

        def along(step, part=part, start=start, direction=direction):
            moved = jax.tree.map(lambda x, way: x + np.float32(step) * way, start, direction)
            return float(value_and_slope(loss, params | {part: moved}, frozen, batch)[0][0])

        pairs = zip(*map(jax.tree.leaves, (gradient[part], direction)), strict=True)
        slope = sum(float(np.vdot(*pair)) for pair in pairs)
        assert abs(slope) > 0.02
        near, far = (along(step) - along(-step) for step in (3e-3, 6e-3))
        np.testing.assert_allclose((8 * near - far) / 36e-3, slope, rtol=0.02, atol=3e-3)  # exact to the fourth order
    # No leaf is left out, neither of the layers nor of the lm head.
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["adapter"]))


@pytest.mark.slow
def test_a_gradient_of_layers_computed_again_is_the_same(example):
    loss, params, frozen, batch = example()
    slopes = [gradient_of(each, frozen, batch) for each in (loss, changed(loss, remat=True))]
    assert ["remat" in str(jax.make_jaxpr(each)(params)) for each in slopes] == [False, True]
    kept, computed = (jax.jit(each)(params) for each in slopes)
    for expected, found in zip(*map(jax.tree.leaves, (kept, computed)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def in_few_bits(frozen):
    """A base of int4 weights with an int8 lm head, and the same in floats."""
    floats, bits = {}, {}
    for name, value in frozen.items():
        if isinstance(value, dict):
            floats[name], bits[name] = in_few_bits(value)
        elif name in KERNELS:
            kernel = (Int8Tiles if name == "lm_head" else Int4Tiles).of(np.asarray(value))
            floats[name] = jnp.asarray(kernel.dequantized())
            bits[name] = jax.tree.map(jnp.asarray, kernel)
        else:
            floats[name] = bits[name] = value
    return floats, bits


# Our CPU kernels round the inputs of products to 8 bits too, as in decoding. These weights are large, so that the first
# layer's attention is nearly one-hot and differs most: by 0.36, in a direction of cosine 0.956.
@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "error", "heads_error"), [(False, 1e-4, 1e-4), (True, 0.5, 0.06)])
def test_an_int4_base_teaches_what_its_rounded_weights_do(example, monkeypatch, kernels, error, heads_error):
    """As in QLoRA, the gradients of adapter and heads equal those with float weights of the same values."""
    if kernels and not trace.has_few_bits():
        pytest.skip("the CPU kernels were not built, or several devices")
    monkeypatch.setattr(trace, "has_few_bits", lambda: kernels)  # False: as on a GPU
    loss, params, frozen, batch = example()
    floats, bits = in_few_bits(frozen)
    quantized = dataclasses.replace(changed(loss, quantize="int4"), original=loss.original.clone(quantize="int4"))
    exact, rounded = (jax.jit(gradient_of(*each, batch))(params) for each in ((loss, floats), (quantized, bits)))
    for part, most in (("adapter", error), ("draft", heads_error)):
        for expected, found in zip(*(jax.tree.leaves(x[part]) for x in (exact, rounded)), strict=True):
            assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)
            if not kernels:
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_the_weight_of_the_heads_rises_along_a_sine():
    config = JointConfig(heads_weight=0.2, heads_alone_steps=3, rise_steps=4)
    found = [float(heads_weight(config, step)) for step in range(9)]
    rise = 0.2 * np.sin(np.pi / 2 * np.array([0.25, 0.5, 0.75, 1.0]))
    np.testing.assert_allclose(found, [0.2] * 3 + [*rise] + [0.2] * 2, rtol=1e-6)
    at_once = dataclasses.replace(config, rise_steps=0)
    np.testing.assert_allclose([heads_weight(at_once, step) for step in range(5)], 0.2, rtol=1e-6)


def train(model, frozen, batches, lr: float = RATE, **settings):
    """Train on each batch; return the task, ``[params]`` before the first step and after each, and ``[metrics]``."""
    config = TrainConfig(
        output="unused", task="joint", model="unused", dtype="float32", steps=len(batches), batch_size=4,
        adapter=ADAPTER, draft=draft_of(heads="medusa", num_draft_heads=2), tree="cartesian-2x2", objective=TEXT,
        optimizer=OptimizerConfig(lr=lr, warmup_steps=0, schedule="constant", weight_decay=DECAY),
        data=DataConfig(format="standard_library", length=12), **settings,
    )  # fmt: skip
    mesh = make_mesh()
    task, optimizer = JointTask(config, None, model, frozen, mesh), optimizer_of(config, len(batches))
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    state = init_state(task.init_params(jax.random.key(1)), optimizer, shardings)
    step = make_train_step(task.loss, optimizer, config.accumulation, shardings, task.frozen_shardings)
    found, reports = [jax.device_get(state.params)], []
    for batch in batches:
        state, report = step(state, task.frozen, batch, jax.random.key(0))
        found.append(jax.device_get(state.params))
        reports.append(jax.device_get(report))
    return task, found, reports


@pytest.fixture(scope="module")
def steps(tiny_model):
    """``steps(accumulation)``: `train` on three random batches, of which the first two train the heads alone."""
    tokens = np.random.default_rng(0).integers(0, 61, (3, 4, 12)).astype(np.int32)
    labels = np.where(np.random.default_rng(1).random(tokens.shape) < 0.7, tokens, IGNORED)
    batches = [{"tokens": tokens[i], "labels": labels[i]} for i in range(3)]
    settings = {"joint": JointConfig(heads_alone_steps=2)}
    return functools.cache(lambda parts: train(*tiny_model, batches, accumulation=parts, **settings)[1:])


@pytest.mark.slow
def test_heads_alone_leave_the_adapter_bitwise_as_it_is(steps):
    """Two steps, with decay, which would shrink A; in the third the adapter learns, at a quarter of the heads' rate.

    Adam's first update is as large as its rate whatever the gradient. The adapter's is, though it comes third.
    """
    (fresh, first, second, third), _ = steps(1)
    for before, after in zip(*(jax.tree.leaves(x["adapter"]) for x in (fresh, second)), strict=True):
        np.testing.assert_array_equal(before, after)
    adapter = third["adapter"]["layers_0"]["out_lora_b_o_proj"]
    assert not second["adapter"]["layers_0"]["out_lora_b_o_proj"].any()
    np.testing.assert_allclose(np.median(np.abs(adapter)), RATE, rtol=1e-3)
    heads = first["draft"]["head_0"]["lm_kernel"] - (1 - 4 * RATE * DECAY) * fresh["draft"]["head_0"]["lm_kernel"]
    np.testing.assert_allclose(np.median(np.abs(heads)), 4 * RATE, rtol=1e-3)


@pytest.mark.slow
def test_parts_of_a_batch_add_up_to_it(steps):
    """Sequences have different numbers of targets, so a mean of means would differ."""
    whole, parts = steps(1), steps(2)
    for report, of_parts in zip(whole[1], parts[1], strict=True):
        for name, value in report.items():
            np.testing.assert_allclose(of_parts[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    for expected, found in zip(*(jax.tree.leaves(x[0][-1]) for x in (whole, parts)), strict=True):
        # Adam's first update is the sign of a gradient, which rounding decides where there is hardly any.
        assert np.mean(np.abs(expected - found) > 1e-5) < 0.02


@pytest.mark.slow
def test_a_run_and_what_it_leaves_behind(program, train, config_file, base, tmp_path):
    """A run stopped in its second stage ends bitwise as another; heads, adapter and merged base load together."""
    config, whole, parts = config_file(**RUN), tmp_path / "whole", tmp_path / "parts"
    out = train(config, f"output={whole}").out
    assert "stopped at step 3 of 6" in program("--config", config, f"output={parts}", stopped=3).out
    assert "resumed at step 3 of 6" in train(config, f"output={parts}").out
    for name in ("adapter/adapter_model.safetensors", "heads/medusa_lm_head.safetensors", "base/model.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    merged, heads, adapter = whole / "base", whole / "heads", whole / "adapter"
    assert f"--base {merged} --draft {heads}, or with the adapter unmerged: " in out
    assert f"--base {base} --adapter {adapter} --draft {heads}" in out
    report = [line for line in read_metrics(whole / "metrics.jsonl") if line["kind"] == "eval"]
    assert report[0]["bits_per_byte"] == report[0]["bits_per_byte_before"] == report[-1]["bits_per_byte_before"]
    assert report[-1]["bits_per_byte"] != report[0]["bits_per_byte"]
    assert len(report[-1]["top1"]) == 2

    theirs = apply_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6)
    assert "they were trained with an adapter" in refusal(lambda: hydrajax.load(base, heads))
    prompts, settings = [[5, 6, 7]], {"max_new_tokens": 16, "tree": "chain-2"}
    separate = hydrajax.load(base, heads, adapter=adapter).generate(prompts, **settings)
    assert hydrajax.load(merged, heads).generate(prompts, **settings)[0].output_ids == separate[0].output_ids


@pytest.mark.slow
def test_a_run_on_an_int4_base(train, config_file, base, tmp_path):
    """As in the paper (2.2.1). Heads and adapter are for the base in the same 4 bits."""
    train(config_file(**RUN), "quantize=int4")
    output = tmp_path / "run"
    loaded = hydrajax.load(base, output / "heads", adapter=output / "adapter", quantize="int4")
    drafted = loaded.generate([[5, 6, 7]], max_new_tokens=16, tree="chain-2")[0]
    alone = loaded.generate([[5, 6, 7]], draft="none", max_new_tokens=16, tree="root")[0]
    assert list(drafted.output_ids) == list(alone.output_ids)
