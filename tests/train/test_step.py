"""The train step on every mesh, in parts, with a NaN and in bfloat16: the same step as on one device, or none at all.

XLA fixes the number of CPU devices when it starts, so the work on meshes runs in one subprocess and the tests read its
findings; what one device shows is tested in this process.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.asked import asked_parameters
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh
from hydrajax.train.optimizer import make_optimizer
from hydrajax.train.run_config import OptimizerConfig
from hydrajax.train.tasks.base_task import BaseLoss, scaled_init
from hydrajax.train.train_step import init_state, make_train_step, state_shardings

LR = 1e-3  # of the program
OTHER_MESHES = ["8x1", "1x8"]  # together they cover both axes of 4x2
MESHES = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in OTHER_MESHES] + ["4x2"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory, on_eight_devices) -> dict:
    folder = tmp_path_factory.mktemp("step")
    # Nearly all the time is compilation, and half of that LLVM's optimisation.
    flags = "--xla_backend_optimization_level=0"
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"  # eight devices on two busy cores
    wanted = asked_parameters(request, "mesh")
    meshes = ["1x1", "4x2", *(mesh for mesh in OTHER_MESHES if mesh in wanted)]
    answer = on_eight_devices(folder, "train_step_on_meshes", *meshes, flags=flags)
    for name in (*meshes, "parts1", "parts4", "bfloat16"):
        with np.load(folder / f"{name}.npz") as arrays:
            answer[name]["arrays"] = dict(arrays)
    return answer


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


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_takes_the_step_of_one_device(found, mesh):
    """Two steps with dropout: the random numbers do not depend on the mesh either."""
    for i in range(2):
        assert_same_step(found[mesh], found["1x1"], i)
    first, second = found["1x1"]["history"][:2]
    assert second["loss"] != first["loss"]


@pytest.mark.parametrize("mesh", MESHES)
def test_devices_divide_norms_by_tokens(found, mesh):
    """Each device norms its tokens of its sequences; all of 16 tokens if it shares the model with no other."""
    data, model = map(int, mesh.split("x"))
    assert {tuple(map(int, name.split(",")))[:2] for name in found[mesh]["normed"]} == {(8 // data, 16 // model)}


def test_micro_batches_add_up_to_the_batch(found):
    """Sequences have different numbers of targets, so a mean of means would differ."""
    assert_same_step(found["parts4"], found["parts1"], 0)


@pytest.mark.parametrize("mesh", ["1x1", *MESHES])
def test_the_base_is_left_alone(found, mesh):
    """The base's parameters are bitwise unchanged, and there are two moments for each of the heads' parameters."""
    assert found[mesh]["base_unchanged"]
    assert found[mesh]["state_sizes"] == sorted(2 * found[mesh]["param_sizes"])


def test_fresh_heads_share_no_buffer_with_the_base(found):
    """A donated lm head that is the base's own array would delete it."""
    assert found["1x1"]["distinct_buffers"]


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


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_leaves_the_moments_in_place(found, mesh):
    assert len(found[mesh]["same_place"]) == 2 * len(found[mesh]["split"])
    assert all(found[mesh]["same_place"].values())
    assert any(found[mesh]["split"].values()) == (mesh != "8x1")


def test_a_step_that_is_not_finite_is_skipped(found):
    """The third batch holds a token whose embedding is NaN: only the counters move."""
    report = found["1x1"]
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
    exact, rounded = found["parts1"]["history"][0]["loss"], report["history"][0]["loss"]
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=0.05)
    before, after = (report["arrays"][f"{i}/params/head_0/lm_kernel"] for i in range(2))
    as_bfloat16 = after.astype(jnp.bfloat16).astype(np.float32)
    assert np.any(after != as_bfloat16)
    assert np.all(before != after)


# --- one device -----------------------------------------------------------------------------------------------------


def test_a_base_learns_a_simple_text():
    """Sequences that count upwards, so each token follows from the previous one. Parameters are float32."""
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
