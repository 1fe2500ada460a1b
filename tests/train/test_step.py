"""The train step on a mesh, in micro-batches, with a NaN and in bfloat16: the same step as on one device, or none.

XLA fixes the number of CPU devices when it starts, so the steps run in one subprocess and the tests read its findings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh
from hydrajax.train.optimizer import make_optimizer
from hydrajax.train.run_config import OptimizerConfig
from hydrajax.train.tasks.base_task import BaseLoss, scaled_init
from hydrajax.train.train_step import init_state, make_train_step, state_shardings

LR = 1e-3  # of the program


def steps_of(task: str, folder, on_eight_devices) -> dict:
    # Nearly all the time is compilation, and half of that LLVM's optimisation.
    flags = "--xla_backend_optimization_level=0"
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"  # eight devices on two busy cores
    answer = on_eight_devices(folder, "train_step_on_meshes", task, flags=flags)
    for file in folder.glob("*.npz"):
        with np.load(file) as arrays:
            answer[file.stem]["arrays"] = dict(arrays)
    return answer


@pytest.fixture(scope="module")
def found(tmp_path_factory, on_eight_devices) -> dict:
    return steps_of("heads", tmp_path_factory.mktemp("step"), on_eight_devices)


def assert_same_step(ours: dict, expected: dict, i: int) -> None:
    """Metrics, moments and parameters after step i, within float32 rounding.

    Adam's update is the gradient over its own size, so that rounding decides the sign where a gradient is rounding
    itself: moments are compared everywhere, parameters (to a hundredth of a step) where every gradient so far was at
    least a hundredth of the largest.
    """
    for name, value in expected["history"][i].items():
        np.testing.assert_allclose(ours["history"][i][name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    names = [name.removeprefix(f"{i}/mu/") for name in expected["arrays"] if name.startswith(f"{i}/mu/")]
    assert len(names) == len(expected["param_sizes"])
    for name in names:
        clear = True
        for step in range(i + 1):
            moment = expected["arrays"][f"{step}/mu/{name}"]
            largest = np.abs(moment).max()
            assert largest > 0, name
            clear = clear & (np.abs(moment) > 1e-2 * largest)
        same = ours["arrays"][f"{i}/mu/{name}"]
        np.testing.assert_allclose(same, moment, rtol=1e-3, atol=1e-5 * largest, err_msg=name)
        assert clear.mean() > 0.1, name
        gap = np.abs(ours["arrays"][f"{i}/params/{name}"] - expected["arrays"][f"{i}/params/{name}"])
        assert gap[clear].max() < 1e-2 * LR, name


@pytest.mark.parametrize("kind", ["", "dropout_"])
def test_a_mesh_takes_the_steps_of_one_device(found, kind):
    """In two micro-batches, whose sequences have different numbers of targets; with dropout in one part: the random
    numbers do not depend on the mesh either.
    """
    one, eight = found[f"{kind}one"], found[f"{kind}eight"]
    for i in range(2):
        assert_same_step(eight, one, i)
    first, second = one["history"][:2]
    assert second["loss"] != first["loss"]
    # Of 16 x 16 tokens, a device norms those of its sequences that no device of its group does.
    micro_batches = 1 if kind else 2
    assert {tuple(map(int, name.split(",")))[:2] for name in eight["normed"]} == {(16 // micro_batches // 4, 16 // 2)}


@pytest.mark.parametrize("devices", ["one", "eight"])
def test_a_step_leaves_the_base_and_the_places_of_moments(found, devices):
    """There are two moments for each of the heads' parameters, sharded like it. A checkpoint is restored on other
    meshes. Fresh heads share no buffer with the base: a donated lm head that is the base's own would delete it.
    """
    assert found["restored"]
    assert found["distinct_buffers"]
    report = found[devices]
    assert report["base_unchanged"]
    assert report["state_sizes"] == sorted(2 * report["param_sizes"])
    assert len(report["same_place"]) == 2 * len(report["split"])
    assert all(report["same_place"].values())
    assert any(report["split"].values()) == (devices == "eight")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_live_with_their_parameters(found, optimizer):
    """If XLA chose, they would not be: parameters are in 2 shards, but the moments of a plain jit are replicated."""
    report = found[optimizer]
    assert sum(report["split"].values()) > len(report["split"]) / 2
    assert len(report["init_state"]) >= len(report["split"])
    assert all(report["init_state"].values())
    assert not all(report["plain"].values())


def test_muon_divides_its_matrices_among_the_devices(found):
    """Each device of a 4x2 mesh computes some of them, and the update stays the same."""
    report = found["muon_divided"]
    assert report["gap"] < 1e-4
    alone, divided = report["flops"]
    assert divided < 0.6 * alone


def test_a_step_that_is_not_finite_is_skipped(found):
    """The third batch holds a token whose embedding is NaN: only the counters move."""
    report = found["dropout_one"]
    good, bad = report["history"][1:]
    assert np.isfinite(good["loss"])
    assert good["kept_bad_steps"] == good["bad_steps"] == 0
    assert np.isnan([bad["loss"], bad["grad_norm"]]).all()
    assert bad["kept_bad_steps"] == bad["bad_steps"] == 1
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3]
    names = [name for name in report["arrays"] if name.startswith("2/")]
    assert len(names) == 3 * len(report["param_sizes"])
    for name in names:
        np.testing.assert_array_equal(report["arrays"][name], report["arrays"]["1" + name[1:]], err_msg=name)
        assert np.isfinite(report["arrays"][name]).all()


def test_bfloat16_computes_and_float32_keeps(found):
    """Updates of 1e-4 of a weight, too small for bfloat16, add up in the parameters."""
    report = found["bfloat16"]
    assert report["dtypes"] == ["float32"]
    exact, rounded = found["dropout_one"]["history"][0]["loss"], report["history"][0]["loss"]
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=0.05)
    before, after = (report["arrays"][f"{i}/params/head_0/lm_kernel"] for i in range(2))
    as_bfloat16 = after.astype(jnp.bfloat16).astype(np.float32)
    assert np.any(after != as_bfloat16)
    assert np.all(before != after)


@pytest.mark.slow
def test_a_mesh_takes_the_joint_steps_of_one_device(on_eight_devices, tmp_path):
    """With dropout. The adapter's matrices and their moments are sharded like their kernels."""
    found = steps_of("joint", tmp_path, on_eight_devices)
    one, eight = found["one"], found["eight"]
    for ours, expected in zip(eight["history"], one["history"], strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    names = [name for name in one["arrays"] if name.startswith("0/mu/")]
    assert len(names) == 13 + 6  # of the adapter and of the heads
    for name in names:
        moment, largest = one["arrays"][name], np.abs(one["arrays"][name]).max()
        np.testing.assert_allclose(eight["arrays"][name], moment, rtol=1e-2, atol=1e-3 * largest, err_msg=name)
    assert not any(one["split"].values())
    assert all(eight["same_place"].values())
    divided = [name for name in eight["split"] if "_lora_b_" in name and "qkv" in name]
    assert len(divided) == 3
    assert all(eight["split"][name] for name in divided)


def test_a_base_learns_a_simple_text():
    """Sequences that count upwards, so each token follows from the previous one."""
    model = Llama(LlamaConfig(61, 32, 80, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64))
    mesh, optimizer = make_mesh(), make_optimizer(OptimizerConfig(lr=1e-2, warmup_steps=5), 40)
    params = jax.jit(lambda: scaled_init(model, jax.random.key(0)))()
    home = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P()), params)
    shardings = state_shardings(mesh, params, home, optimizer)
    state = init_state(jax.device_put(params, home), optimizer, shardings)
    step = make_train_step(BaseLoss(model, chunk_tokens=64), optimizer, 1, shardings, ())
    tokens = (np.arange(24) + np.arange(4)[:, None] * 7).astype(np.int32) % 61
    losses = []
    for _ in range(40):
        state, metrics = step(state, (), {"tokens": tokens, "labels": tokens}, jax.random.key(0))
        losses.append(float(metrics["loss"]))
    assert losses[0] > 3.0
    assert losses[-1] < 0.3 * losses[0]
    assert int(state.step) == 40
