"""Decode on one device and on a mesh; the answer has the tokens of both by case.

Arguments: the folder for ``answer.json``; ``drafts`` and a base, ``families`` and bases, or ``draft_model`` and a base
with its draft.
"""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import hydrajax
from helpers.programs import answer
from hydrajax.bench.random_models import random_draft
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.keywords import RULES
from hydrajax.drafters.drafter import Drafter
from hydrajax.formats.draft_registry import KINDS, without_weights
from hydrajax.sharding import Placement, make_mesh, on_mesh

PROMPTS = np.array([[5, 17, 60, 2, 33], [9, 1, 4, 0, 0], [8, 12, 50, 29, 8], [3, 3, 3, 3, 0]], np.int32)
LENGTHS = np.array([5, 3, 5, 4], np.int32)
NEW = 12


def with_random_draft(m, of_one, kind: str, tree: str | None = None) -> FusedExecutor:
    """Return an executor with a random draft, whose parameters are equal on every placement."""
    drafter, params = random_draft(of_one.model, of_one.params.base, kind)
    params = params._replace(base=m.params.base, draft=jax.device_get(params.draft))
    return FusedExecutor(m.model, params, m.program(**choices(drafter, tree)), mesh=m.placement.base)


def choices(drafter: Drafter, tree: str | None = None) -> dict:
    by_depth = f"chain-{min(drafter.spec.depth, 3)}" if drafter.spec.depth else "root"
    tree = tree or ("dynamic-6-1-3" if drafter.spec.supports_dynamic_tree else by_depth)
    return {"drafter": drafter, "tree": tree, "max_new_tokens": NEW, "eos_ids": ()}


def decoded(executor, rows: int = len(PROMPTS)) -> list:
    return executor.decode(PROMPTS[:rows], LENGTHS[:rows], jax.random.key(3)).tokens[:, :NEW].tolist()


def families(*bases: str) -> dict:
    found = {}
    for base in bases:
        one, several = hydrajax.load(base), hydrajax.load(base, placement=make_mesh(data=2, model=4))
        for kind, tree in {"none": "root", "hydra": "chain-3", "eagle3": "dynamic-6-1-3"}.items():
            tokens = [decoded(with_random_draft(m, one, kind, tree)) for m in (one, several)]
            found[f"{Path(base).name}, {kind}"] = tokens
    return found


def executors(m, of_one):
    """Yield an executor of each kind of draft and its name."""
    for kind in KINDS:
        yield kind, with_random_draft(m, of_one, kind)
    for name in without_weights():
        drafting = m.with_draft(name)
        yield name, drafting.executor(drafting.program(**choices(drafting.drafter)))


def by_rule(name: str, executor):
    """Yield the executor under every rule that it supports, for two kinds of draft; under the greedy one for others."""
    yield "greedy", executor
    for rule, kind in RULES.items() if name in ("hydra++", "draft-model") else ():
        other = executor.with_request(rule=kind())
        if rule != "greedy" and (other.program.drafter.spec.supports_sampling or not kind.needs_draws):
            yield rule, other


def fed_in_chunks(executor) -> list:
    """Prefill as the server does: all but the last token of every prompt first."""
    given = settled_inputs(executor.program, executor.model.config, PROMPTS, LENGTHS, jax.random.key(3))
    state = executor.empty(len(PROMPTS), 64, given.sampling)
    following = PROMPTS[np.arange(len(PROMPTS)), LENGTHS - 1]
    state = executor.feed(state, PROMPTS, LENGTHS - 1, following)
    state = executor.extend(state, following[:, None], np.ones_like(LENGTHS), given.sampling)
    state, _ = executor.advance(state, np.zeros(len(PROMPTS), bool), NEW)
    return executor.output(state).tokens[:, :NEW].tolist()


def drafts(base: str) -> dict:
    found, wanted, of_one = {}, {}, hydrajax.load(base)
    for name, executor in executors(of_one, of_one):
        wanted |= {f"{name}, {rule}": decoded(each) for rule, each in by_rule(name, executor)}
    for name, executor in executors(hydrajax.load(base, placement=make_mesh(data=2, model=4)), of_one):
        for rule, each in by_rule(name, executor):
            found[f"{name}, {rule}"] = [wanted[f"{name}, {rule}"], decoded(each)]
        greedy = wanted[f"{name}, greedy"]
        for rows in (1, 3):  # which the data axis does not divide
            found[f"{name}, {rows} rows"] = [greedy[:rows], decoded(executor, rows)]
        found[f"{name}, in chunks"] = [greedy, fed_in_chunks(executor)]
    return found


def draft_model(base: str, draft: str) -> dict:
    """Return tokens, accept lengths and the shape of a shard, with the draft replicated and sharded."""
    found = {}
    for name, mesh, shard in [("single", None, False), ("replicated", (2, 4), False), ("sharded", (2, 4), True)]:
        m = hydrajax.load(base, draft, placement=Placement(mesh and make_mesh(*mesh), shard_draft=shard))
        found[name] = {"qkv": m.params.draft["layers_0"]["qkv"].addressable_shards[0].data.shape}
        for rule, tree in (("greedy", "cartesian-3x2"), ("greedy", "dynamic-8-2-3"), ("rejection", "chain-3")):
            decode = hydrajax.make_decode_fn(m.model, m.drafter, tree, rule, max_new_tokens=16)
            out = decode(m.params, PROMPTS[:2], LENGTHS[:2], rng=jax.random.key(3))
            found[name][rule + tree] = [out.tokens.tolist(), out.accept_lengths.tolist()]
        for program, out in inside_other_programs(decode, m.params, m.placement.base).items():
            found[name][program] = [out.tokens.tolist(), out.accept_lengths.tolist()]
    return found


def inside_other_programs(decode, params, mesh) -> dict:
    """Return the results of a rule that draws, within `jax.vmap`, `jax.shard_map` and steps whose state is donated."""
    prompt, lengths, keys = PROMPTS[:2], LENGTHS[:2], jax.random.split(jax.random.key(3), 2)
    specs, rows = (P(), P("data"), P("data"), P("data")), P("data")
    on_rows = jax.shard_map(decode, mesh=make_mesh(2, 4), in_specs=specs, out_specs=rows, check_vma=False)
    state, step = decode.prefill(params, prompt, lengths, keys), jax.jit(decode.decode_step, donate_argnums=1)
    with on_mesh(mesh):
        while not state.output.done.all():
            state = step(params, state)
    mapped = jax.vmap(decode, (None, 0, 0, 0))(params, prompt[:, None], lengths[:, None], keys[:, None])
    found = {"vmap": jax.tree.map(lambda x: x[:, 0], mapped), "steps": decode.result(state)}
    return found | {"shard_map": jax.jit(on_rows)(params, prompt, lengths, keys)}


if __name__ == "__main__":
    tasks = {"drafts": drafts, "families": families, "draft_model": draft_model}
    answer(lambda folder, task, *models: tasks[task](*models))
