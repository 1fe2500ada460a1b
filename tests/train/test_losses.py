"""Training losses against torch's cross entropy and against the losses and gradients of the official Hydra code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hydrajax import load
from hydrajax.drafters.drafter import BoundBase
from hydrajax.train.losses import IGNORED, head_losses, masked_mean, next_token_loss
from hydrajax.train.step import run_base


@pytest.fixture
def example():
    """Logits of 3 heads and of a base, and labels with ignored places, all random."""
    rng = np.random.default_rng(1)
    head_logits = rng.normal(size=(3, 2, 9, 11)).astype(np.float32)
    base_logits = rng.normal(size=(2, 9, 11)).astype(np.float32)
    labels = rng.integers(0, 11, (2, 9)).astype(np.int32)
    labels[0, :4], labels[1, 7] = IGNORED, IGNORED
    return head_logits, base_logits, labels


def test_own_targets_equal_torch_cross_entropy(example):
    head_logits, _, labels = example
    losses = head_losses(jnp.asarray(head_logits), jnp.asarray(labels))
    for k, logits in enumerate(head_logits):
        rows = torch.from_numpy(logits[:, : -(k + 2)].reshape(-1, 11))
        targets = torch.from_numpy(labels[:, k + 2 :].reshape(-1)).long()
        expected = torch.nn.functional.cross_entropy(rows, targets, ignore_index=IGNORED)
        assert float(losses[k]) == pytest.approx(float(expected), rel=1e-5)


def test_teacher_loss_equals_torch_soft_cross_entropy(example):
    head_logits, base_logits, labels = example
    losses = head_losses(jnp.asarray(head_logits), jnp.asarray(labels), jnp.asarray(base_logits))
    for k, logits in enumerate(head_logits):
        # Head k at t answers for token t + 2 + k, of which the base speaks at t + 1 + k.
        counts = labels[:, k + 2 :] != IGNORED
        rows = torch.from_numpy(logits[:, : -(k + 2)][counts])
        teacher = torch.softmax(torch.from_numpy(base_logits[:, k + 1 : -1][counts]), dim=-1)
        expected = torch.nn.functional.cross_entropy(rows, teacher)
        assert float(losses[k]) == pytest.approx(float(expected), rel=1e-5)


def test_ignored_targets_do_not_count(example):
    head_logits, _, labels = example
    changed = head_logits.copy()
    changed[0, 0, :2] += 5.0  # head 0 at t = 0, 1 answers for the ignored tokens 2 and 3
    before, after = (head_losses(jnp.asarray(x), jnp.asarray(labels))[0] for x in (head_logits, changed))
    assert float(before) == float(after)


def test_no_target_at_all_is_zero_and_not_nan():
    labels = jnp.full((1, 5), IGNORED)
    assert float(next_token_loss(jnp.ones((1, 5, 3)), labels)) == 0.0
    assert float(masked_mean(jnp.ones(3), jnp.zeros(3, bool))) == 0.0


def test_no_gradient_flows_into_the_teacher(example):
    head_logits, base_logits, labels = map(jnp.asarray, example)
    grads = jax.grad(lambda base: head_losses(head_logits, labels, base).sum())(base_logits)
    assert not np.any(np.asarray(grads))


def official_names(arch: str, grads: dict) -> dict[str, np.ndarray]:
    """Our gradient tree under the released keys and layouts (rows are outputs)."""
    stride, lm_suffix = {"hydra_mlp": (1, ""), "hydra_pp": (2, ".1")}[arch]
    heads = grads.get("heads", grads)
    out = {}
    for k in range(4):
        head, block = heads[f"head_{k}"], heads[f"head_{k}"]["conditioned"]
        out[f"hydra_lm_head.{k}{lm_suffix}.weight"] = head["lm_kernel"].T
        out[f"hydra_lm_head.{k}{lm_suffix}.bias"] = head["lm_bias"]
        parts = [block[name] for name in ("shared_kernel", "path_kernel") if name in block]
        kernel = np.concatenate(parts)
        for i, part in enumerate(("linear", "res_connection")):
            out[f"hydra_mlp.{k}.{stride - 1}.{part}.weight"] = kernel[:, i].T
            out[f"hydra_mlp.{k}.{stride - 1}.{part}.bias"] = block["bias"][i]
        if "blocks_0" in head:  # the shared block: the sum over its uses, under its first name
            out[f"hydra_mlp.{k}.{2 * stride - 1}.linear.weight"] = head["blocks_0"]["kernel"].T
            out[f"hydra_mlp.{k}.{2 * stride - 1}.linear.bias"] = head["blocks_0"]["bias"]
    if "prefix" in grads:
        layer, name = grads["prefix"]["layer"], "prefix_embeding_layer.layers.0."
        for i, projection in enumerate("qkv"):  # as many key-value heads as heads: one row of each per head
            out[f"{name}self_attn.{projection}_proj.weight"] = layer["qkv"][:, :, i].reshape(64, 64).T
        out[f"{name}self_attn.o_proj.weight"] = layer["out"].T
        for i, projection in enumerate(("gate", "up")):
            out[f"{name}mlp.{projection}_proj.weight"] = layer["gate_up"][:, i].T
        out[f"{name}mlp.down_proj.weight"] = layer["down"].T
        out[f"{name}input_layernorm.weight"] = layer["attention_norm"]["scale"]
        out[f"{name}post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        out["prefix_embeding_layer.norm.weight"] = grads["prefix"]["norm"]["scale"]
    return out


@pytest.mark.parametrize("arch", ["hydra_mlp", "hydra_pp"])
def test_losses_and_gradients_equal_the_official_code(golden, arch):
    from safetensors.numpy import load_file

    m = load(golden / "base" / "mha", golden / arch / "heads")
    recorded = np.load(golden / arch / "losses.npz")
    tokens, labels = recorded["input_ids"].astype(np.int32), recorded["labels"].astype(np.int32)
    base = BoundBase(m.model, m.params.base)
    forward = run_base(m.model, m.params.base, tokens)
    base_logits = base.logits(forward.hidden)

    def total(draft_params, teacher):
        head_logits = m.drafter.teacher_forced(draft_params, forward.features, tokens, base)
        return head_losses(head_logits, labels, teacher).sum()

    assert float(total(m.params.draft, None)) == pytest.approx(float(recorded["loss_lm"]), abs=1e-4)
    loss, grads = jax.value_and_grad(total)(m.params.draft, base_logits)
    assert float(loss) == pytest.approx(float(recorded["loss_teacher"]), abs=1e-4)
    ours = official_names(arch, jax.tree.map(np.asarray, grads))
    expected = load_file(golden / arch / "teacher_loss_grads.safetensors")
    assert len(expected) > 20
    for name, gradient in expected.items():
        np.testing.assert_allclose(ours[name], gradient, atol=1e-5, rtol=1e-3, err_msg=name)
