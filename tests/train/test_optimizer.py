"""Learning rates against the official code's, AdamW against NumPy, Muon against the singular value decomposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.train.optimizer import learning_rate, make_optimizer
from hydrajax.train.run_config import OptimizerConfig


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_equals_the_official_code(golden, schedule):
    """The recorded ones of 1001 steps: in float64 to its last digit; in the float32 of a run to 1e-6.

    optax counts the warm-up down from its end, which cancels: the third step is off by 8 units in the last place.
    """
    # Warm-up 100, total 1000, final multiplier 0.33.
    expected = np.load(golden / "lr_schedules.npz")[schedule.replace("constant", "constant_with_warmup")]
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=100, final_fraction=0.33)

    def ours():
        return np.asarray(jax.vmap(learning_rate(config, 1000))(jnp.arange(0, 1001, 1000 // (len(expected) - 1))))

    with jax.enable_x64(True):
        wide = ours()
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, expected, rtol=0, atol=1e-15)
    narrow = ours()
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, expected, rtol=1e-6, atol=0)


def test_warm_up_may_be_absent_or_as_long_as_the_run():
    def rates(warmup, steps):
        schedule = learning_rate(OptimizerConfig(lr=2.0, warmup_steps=warmup, final_fraction=0.5), steps)
        return [float(schedule(i)) for i in range(steps + 1)]

    np.testing.assert_allclose(rates(0, 2), [2.0, 1.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates(100, 4)[:4], [0.0, 0.5, 1.0, 1.5], rtol=1e-6)


def params_and_gradients(steps: int):
    """A matrix, a norm scale, and the two-row bias of a Hydra head's first block."""
    random = np.random.default_rng(3)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    def draw():
        return {"kernel": normal(5, 4), "norm": {"scale": normal(4)}, "conditioned": {"bias": normal(2, 4)}}

    return draw(), [draw() for _ in range(steps)]


def numpy_adamw(params, gradients, rate, config: OptimizerConfig):
    """Loshchilov and Hutter, algorithm 2, float64, after clipping the global norm; the decay is outside the moments."""
    leaves, structure = jax.tree.flatten(params)
    decays = [name[-1].key == "kernel" for name, _ in jax.tree.leaves_with_path(params)]
    leaves = [x.astype(np.float64) for x in leaves]
    first, second = ([np.zeros_like(x) for x in leaves] for _ in range(2))
    for i, gradient in enumerate(gradients):
        gradient = [g.astype(np.float64) for g in jax.tree.leaves(gradient)]
        norm = np.sqrt(sum((g**2).sum() for g in gradient))
        for j, g in enumerate(gradient):
            g = g * min(1.0, (config.clip_norm or np.inf) / norm)
            first[j] = config.b1 * first[j] + (1 - config.b1) * g
            second[j] = config.b2 * second[j] + (1 - config.b2) * g**2
            unbiased = first[j] / (1 - config.b1 ** (i + 1))
            spread = np.sqrt(second[j] / (1 - config.b2 ** (i + 1)))
            decay = config.weight_decay * leaves[j] if decays[j] else 0
            leaves[j] = leaves[j] - rate(i) * (unbiased / (spread + 1e-8) + decay)
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_adamw_equals_numpy(clip_norm):
    config = OptimizerConfig(
        lr=0.05, schedule="linear", warmup_steps=2, final_fraction=0.2, weight_decay=0.3, b1=0.8, b2=0.9,
        clip_norm=clip_norm,
    )  # fmt: skip
    params, gradients = params_and_gradients(6)
    if clip_norm:
        gradients[3] = jax.tree.map(lambda g: 0.01 * g, gradients[3])  # below the norm that is clipped
    optimizer = make_optimizer(config, steps=8)
    ours, state, update = params, optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, ours)
        ours = jax.tree.map(np.add, ours, updates)

    def rate(step):  # up to 0.05 in 2 steps, then down to a fifth of it in 6
        return 0.05 * step / 2 if step < 2 else 0.05 * (1 - 0.8 * (step - 2) / 6)

    expected = numpy_adamw(params, gradients, rate, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, expected)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours, params)
    assert min(jax.tree.leaves(moved)) > 0.01


LR, DECAY = 0.5, 0.25
MATRICES = {  # the matrices inside each kernel, and the axes that Muon must see as rows and columns
    "qkv": ((24, 2, 3, 5), lambda x: [x[:, :, i].reshape(24, 10) for i in range(3)]),
    "gate_up": ((12, 2, 20), lambda x: [x[:, i] for i in range(2)]),
    "shared_kernel": ((16, 2, 8), lambda x: [x[:, i] for i in range(2)]),
    "path_kernel": ((8, 2, 8), lambda x: [x[:, i] for i in range(2)]),
    "out": ((10, 24), lambda x: [x]),
    "down": ((20, 12), lambda x: [x]),
    "kernel": ((8, 14), lambda x: [x]),
}
OTHERS = {
    "embedding": (30, 6), "lm_head": (6, 30), "lm_kernel": (8, 30), "lm_bias": (30,), "bias": (2, 8), "scale": (6,),
}  # fmt: skip


@pytest.fixture(scope="module")
def muon_update():
    """Parameters, gradients and the first update of every kind of leaf; parts of a fused kernel differ in size."""
    random = np.random.default_rng(4)
    params, gradients = {}, {}
    # Sorted: the order of a set differs between processes, and so would the random numbers of each name.
    for name, shape in (OTHERS | {name: shape for name, (shape, _) in MATRICES.items()}).items():
        params[name] = random.standard_normal(shape).astype(np.float32)
        gradients[name] = random.standard_normal(shape).astype(np.float32)
    for name in ("gate_up", "shared_kernel", "path_kernel"):
        gradients[name][:, 1] *= 0.01
    gradients["qkv"][:, :, 2] *= 0.01
    nested, decay = {"layer": params}, {"weight_decay": DECAY, "clip_norm": None}
    optimizer = make_optimizer(OptimizerConfig("muon", LR, schedule="constant", warmup_steps=0, **decay), steps=10)
    updates, _ = jax.jit(optimizer.update)({"layer": gradients}, optimizer.init(nested), nested)
    return params, gradients, jax.tree.map(np.asarray, updates["layer"])


def cosine(step, matrix) -> float:
    """Return the cosine of the angle between a step and the matrix made orthogonal."""
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    return np.sum(step * (u @ v)) / np.linalg.norm(step) / np.linalg.norm(u @ v)


def test_muon_orthogonalises_each_matrix_of_a_kernel(muon_update):
    """Up to its decay and scale the update is U V^T of each matrix's gradient; Nesterov's first step is parallel to it.

    Newton-Schulz takes the singular values near 1 and not to 1. The scale makes the RMS that of Adam's updates, 0.2.
    """
    params, gradients, updates = muon_update
    for name, (_, split) in MATRICES.items():
        steps = split(updates[name] / -LR - DECAY * params[name])
        for step, gradient in zip(steps, split(gradients[name]), strict=True):
            assert cosine(step, gradient) > 0.97, name
            values = np.linalg.svd(step / (0.2 * np.sqrt(max(step.shape))), compute_uv=False)
            assert 0.6 < values.min() <= values.max() < 1.3, name
            assert 0.15 < np.sqrt(np.mean(step**2)) < 0.25, name


def test_muon_follows_the_nesterov_momentum_of_several_steps():
    """m = 0.95 m + g; the step is along g + 0.95 m, as in the published code."""
    random = np.random.default_rng(5)
    gradients = random.standard_normal((3, 10, 24)).astype(np.float32)
    optimizer = make_optimizer(OptimizerConfig(name="muon", lr=LR, schedule="constant", warmup_steps=0), steps=10)
    params = {"out": np.zeros((10, 24), np.float32)}
    state, momentum, update = optimizer.init(params), 0, jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update({"out": gradient}, state, params)
        momentum = 0.95 * momentum + gradient
    step = -np.asarray(updates["out"])
    assert cosine(step, gradient + 0.95 * momentum) > 0.97
    assert cosine(step, momentum) < 0.97  # without Nesterov


def test_muon_leaves_the_rest_to_adam(muon_update):
    """Adam's first update is the gradient's sign, with optax's Nesterov momentum 1 + b1 / (1 + b1) of it.

    Embeddings and lm heads decay, biases and scales do not.
    """
    params, gradients, updates = muon_update
    for name in OTHERS:
        decay = DECAY * params[name] if name in ("embedding", "lm_head", "lm_kernel") else 0
        wanted = -LR * ((1 + 0.9 / 1.9) * np.sign(gradients[name]) + decay)
        np.testing.assert_allclose(updates[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
