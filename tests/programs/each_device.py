"""Call the functions of `hydrajax.ops.sharded` on a mesh, and describe the decode step compiled for it.

Arguments: the folder for ``answer.json``, and the kinds of drafts to compile a step with. Every comparison is with
NumPy or with the same call without a mesh.
"""

import re
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from helpers.programs import answer
from hydrajax import ops
from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.trainable import abstract_draft
from hydrajax.lowbit.int4 import Int4
from hydrajax.lowbit.quantized import Int8
from hydrajax.models.attention import Filled, KVSegment, attend
from hydrajax.models.init import abstract_base
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import top_tokens
from hydrajax.ops.sharded import all_tokens, summed_by_token
from hydrajax.ops.trace import tracing
from hydrajax.sharding import make_mesh, on_mesh, tree_shardings
from hydrajax.trees import presets

RANDOM = np.random.default_rng(5)
COLLECTIVE = re.compile(r"= (?:\S+|\(.*?\)) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(.*")


def ranked(mesh) -> list[list[bool]]:
    """Compare the best tokens of few distinct logits, so that many are equal, with a stable sort."""
    found = []
    for size, k in ((96, 1), (96, 24), (96, 25), (97, 3)):
        logits = RANDOM.integers(0, 6, (4, 3, size)).astype(np.float32)
        with on_mesh(mesh):
            ids = jax.jit(lambda x, k=k: top_tokens(x, k))(logits)
        found.append(np.array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[..., :k]))
    return found


def looked_up(mesh) -> list[bool]:
    """Look up rows of an embedding, also with ids outside it, which are clipped."""
    found = []
    for rows, dtype in ((96, "float32"), (96, "bfloat16"), (97, "float32")):
        table = np.asarray(RANDOM.standard_normal((rows, 16)), jnp.dtype(dtype))
        ids = RANDOM.integers(-2, rows + 2, (4, 5), dtype=np.int32)
        with on_mesh(mesh):
            found.append(np.array_equal(jax.jit(ops.take_rows)(table, ids), table[np.clip(ids, 0, rows - 1)]))
    return found


def divided_by_tokens(mesh) -> dict:
    """Compare a norm and an MLP, divided by tokens between the products, with the same on one device; also a lookup.

    Return where the devices have them, and the largest differences of values and gradients.
    """
    table, up, down = _normal(96, 32), _normal(32, 2, 64), _normal(64, 32)
    ids = RANDOM.integers(0, 96, (4, 16), dtype=np.int32)

    def run(table, up, down):
        x = ops.take_rows(table, ids)
        x, normed = ops.add_norm(x, x, jnp.ones(32), 1e-6)
        gate, value = ops.matmul_parts(all_tokens(normed), up, jnp.float32)
        return x + summed_by_token(ops.matmul(gate * value, down, jnp.float32))

    def with_gradient(*weights):
        with tracing(sharded_tokens=True):
            return run(*weights), jax.grad(lambda *weights: jnp.sum(run(*weights) ** 3), (0, 1, 2))(*weights)

    want = jax.jit(with_gradient)(table, up, down)
    homes = [jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("model",), (None, None, "model"), ("model",))]
    with on_mesh(mesh):
        got = jax.jit(with_gradient)(*map(jax.device_put, (table, up, down), homes))
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(a).max()), want, got)
    return {"shard": got[0].sharding.shard_shape(got[0].shape), "gaps": jax.tree.leaves(gaps)}


def attended(mesh) -> dict[str, float]:
    """Return the largest difference of attention on the mesh from attention without one."""
    found = {}
    cases = [(4, 8, 4, "tree"), (4, 8, 4, "trees"), (4, 8, 2, "window"), (3, 4, 4, "trees")]
    for batch, heads, n_kv, name in cases:
        queries, tokens, slots = _normal(batch, heads, 6, 16), 6, 20
        block, cache = (tuple(_normal(batch, n_kv, n, 16) for _ in range(2)) for n in (tokens, slots))
        lengths = RANDOM.integers(1, slots, batch).astype(np.int32)
        first_seen = np.maximum(0, lengths[:, None] - 3 + np.arange(tokens)).astype(np.int32)
        mask = np.tril(np.ones((tokens, tokens), bool))
        if name == "trees":
            mask = jnp.asarray(np.tril(RANDOM.random((batch, 1, 1, tokens, tokens)) < 0.6) | np.eye(tokens, dtype=bool))

        def run(queries, block, cache, lengths, mask=mask, window=first_seen if name == "window" else None):
            return attend(queries, [KVSegment(*block, mask), KVSegment(*cache, Filled(lengths, window))])

        want = jax.jit(run)(queries, block, cache, lengths)
        with on_mesh(mesh):
            got = jax.jit(run)(queries, block, cache, lengths)
        found[f"{name}, {n_kv} of {heads} heads, {batch} rows"] = float(np.abs(want - got).max())
    return found


def _normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def appended(mesh) -> list[bool]:
    """Append some tokens of a block, or all, to caches."""
    found = []
    for batch, index in ((4, True), (3, True), (4, False)):
        cache = _normal(batch, 4, 12, 16)
        block = _normal(batch, 4, 5, 16)
        chosen = RANDOM.integers(0, 5, (batch, 3), dtype=np.int32) if index else None
        starts = RANDOM.integers(0, 7, batch, dtype=np.int32)
        want = cache.copy()
        for row, start in enumerate(starts):
            rows = block[row] if chosen is None else block[row][:, chosen[row]]
            want[row, :, start : start + rows.shape[1]] = rows
        with on_mesh(mesh):
            (got,) = jax.jit(lambda *x: ops.append_rows([x[0]], [x[1]], *x[2:]))(cache, block, chosen, starts)
        found.append(np.array_equal(got, want))
    return found


def multiplied(mesh) -> dict[str, bool]:
    """Multiply with weights of 8 and 4 bits that are divided by their logical axes, over outputs and over inputs."""
    found = {}
    x = _normal(4, 1, 256).astype(np.float32)
    cases = (Int8, (256, 2, 64), ("width", None, "mlp")), (Int4, (256, 64), ("mlp", "width"))
    for kind, shape, axes in cases:
        kernel = kind.of(_normal(*shape).astype(np.float32))
        declared = Declared(kind, shape, axes)
        homes = tree_shardings(mesh, jax.eval_shape(declared.init, jax.random.key(0), x)["params"])
        placed = jax.device_put({"kernel": kernel}, homes)
        with on_mesh(mesh):
            got = jax.jit(lambda stored, x, module=declared: module.apply({"params": stored}, x))(placed, x)
        want = np.moveaxis(np.tensordot(x, np.asarray(kernel.dequantized()), 1), [0, 1], [-3, -2])
        parts = {str(shard.index) for shard in placed["kernel"].values.addressable_shards}
        close = np.allclose(got, want, atol=1e-4 * np.abs(want).max())
        found[f"{kind.__name__} {axes}"] = bool(close and len(parts) == 4)
    return found


class Declared(nn.Module):
    """One product with a quantised kernel."""

    kind: type
    kernel_shape: tuple[int, ...]
    axes: tuple

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", lambda rng: self.kind.boxed(self.kernel_shape, self.axes))
        return kernel.project_parts(x)


def compiled_steps(mesh, kinds) -> dict[str, dict]:
    """Count collectives, kernels and copies of caches in the loop of a compiled step, by kind of draft."""
    config = LlamaConfig(64, 128, 96, 1, 8, 4, 16, max_positions=128)
    model, base = random_base(config)
    found = {}
    placed = jax.device_put(base, tree_shardings(mesh, abstract_base(model)))
    for kind in kinds:
        drafter, params = NoDrafter(), Params(placed, {})
        if kind != "none":
            drafter, random = random_draft(model, base, kind)
            homes = tree_shardings(mesh, abstract_draft(drafter, model))
            params = Params(placed, jax.device_put(random.draft, homes))
        tree = presets.root() if kind == "none" else presets.by_name("chain-3")
        executor = FusedExecutor(model, params, Program(drafter, tree, max_new_tokens=8), mesh=mesh)
        prompt = RANDOM.integers(0, 64, (1, 6), dtype=np.int32)
        state = executor.empty(1, 32, settled_inputs(executor.program, config, prompt).sampling)
        text = (
            executor._advance.lower(params, state, np.zeros(1, bool), np.int32(4), np.bool_(False)).compile().as_text()
        )
        loop = [line for line in text.splitlines() if "while/body" in line]
        collectives = Counter(match[1] for match in map(COLLECTIVE.search, loop) if match)
        shape = "x".join(map(str, state.target.cache.layers[0][0].addressable_shards[0].data.shape))
        copies = [line for line in loop if re.search(rf"f32\[{shape.replace('x', ',')}\]\S* copy\(", line)]
        kernels = Counter(re.findall(r'custom_call_target="hydrajax_(\w+)"', text))
        found[kind] = {"collectives": collectives, "kernels": kernels, "copies": len(copies), "cache": shape}
    return found


def main(_: Path, *kinds: str) -> dict:
    mesh = make_mesh(data=2, model=4)
    return {
        "ranked": ranked(mesh), "looked_up": looked_up(mesh), "only_rows_divided": looked_up(make_mesh(data=2)),
        "by_tokens": divided_by_tokens(mesh), "attended": attended(mesh), "appended": appended(mesh),
        "multiplied": multiplied(mesh), "compiled": compiled_steps(make_mesh(model=4), kinds),
    }  # fmt: skip


if __name__ == "__main__":
    answer(main)
