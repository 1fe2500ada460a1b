"""Decode with new drafts of every kind on one device and on a mesh.

Arguments: the folder for ``answer.json``, the base. The answer has the tokens of both by draft, rule and batch.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax.bench.random_models import random_draft
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.keywords import RULES
from hydrajax.drafters.drafter import Drafter
from hydrajax.formats.draft_registry import KINDS, without_weights
from hydrajax.sharding import make_mesh

PROMPTS = np.array([[5, 17, 60, 2, 33], [90, 1, 4, 0, 0], [8, 12, 50, 29, 8], [3, 3, 3, 3, 0]], np.int32)
LENGTHS = np.array([5, 3, 5, 4], np.int32)
NEW = 12


def executors(m, of_one):
    """Yield an executor of each kind of draft, with equal parameters on every placement, and its name."""
    for kind in KINDS:
        drafter, params = random_draft(of_one.model, of_one.params.base, kind)
        params = params._replace(base=m.params.base, draft=jax.device_get(params.draft))
        yield kind, FusedExecutor(m.model, params, m.program(**choices(drafter)), mesh=m.placement.base)
    for name in without_weights():
        drafting = m.with_draft(name)
        yield name, drafting.executor(drafting.program(**choices(drafting.drafter)))


def choices(drafter: Drafter) -> dict:
    tree = "dynamic-6-1-3" if drafter.spec.supports_dynamic_tree else f"chain-{min(drafter.spec.depth, 3)}"
    return {"drafter": drafter, "tree": tree if drafter.spec.depth else "root", "max_new_tokens": NEW, "eos_ids": ()}


def by_rule(name: str, executor):
    """Yield the executor under every rule that it supports, for two kinds of draft; under the greedy one for others."""
    yield "greedy", executor
    for rule, kind in RULES.items() if name in ("hydra++", "draft-model") else ():
        other = executor.with_request(rule=kind())
        if rule != "greedy" and (other.program.drafter.spec.supports_sampling or not kind.needs_draws):
            yield rule, other


def decoded(executor, rows: int) -> list:
    return executor.decode(PROMPTS[:rows], LENGTHS[:rows], jax.random.key(3)).tokens[:, :NEW].tolist()


def fed_in_chunks(executor) -> list:
    """Prefill as the server does: all but the last token of every prompt first."""
    given = settled_inputs(executor.program, executor.model.config, PROMPTS, LENGTHS, jax.random.key(3))
    state = executor.empty(len(PROMPTS), 64, given.sampling)
    following = PROMPTS[np.arange(len(PROMPTS)), LENGTHS - 1]
    state = executor.feed(state, PROMPTS, LENGTHS - 1, following)
    state = executor.extend(state, following[:, None], np.ones_like(LENGTHS), given.sampling)
    state, _ = executor.advance(state, np.zeros(len(PROMPTS), bool), NEW)
    return executor.output(state).tokens[:, :NEW].tolist()


def main(folder: Path, base: str) -> None:
    found = {"devices": jax.device_count()}
    of_one = hydrajax.load(base)
    wanted = {}
    for name, executor in executors(of_one, of_one):
        wanted |= {f"{name}, {rule}": decoded(each, len(PROMPTS)) for rule, each in by_rule(name, executor)}
    for name, executor in executors(hydrajax.load(base, placement=make_mesh(data=2, model=4)), of_one):
        for rule, each in by_rule(name, executor):
            found[f"{name}, {rule}"] = [wanted[f"{name}, {rule}"], decoded(each, len(PROMPTS))]
        greedy = wanted[f"{name}, greedy"]
        for rows in (1, 3):  # which the data axis does not divide
            found[f"{name}, {rows} rows"] = [greedy[:rows], decoded(executor, rows)]
        found[f"{name}, in chunks"] = [greedy, fed_in_chunks(executor)]
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
