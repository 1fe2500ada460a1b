"""Drafted decoding on 2, 4 and 8 simulated devices, in a new process, as XLA fixes their number at its start."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request
from hydrajax.decoding.state import Params
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel
from hydrajax.models.init import abstract_base
from hydrajax.sharding import Placement, last_devices, make_mesh
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.trees import presets
from tools.faults.commands import ROOT
from tools.faults.drafts import Case, check_case
from tools.faults.reference import Reference
from tools.faults.registry import Failure, Trial, fault

DEVICES, CASES, CALLS = 8, 2, 3
MESHES = [(data, model) for data in (1, 2, 4, 8) for model in (1, 2, 4, 8) if 1 < data * model <= DEVICES]
PROGRAM = """
import random, sys
from tools.faults.devices import check_cases
print("sequences", check_cases(random.Random(sys.argv[1])))
"""


@fault("drafts-on-devices", seeds=12)
def devices(trial: Trial) -> int:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, str(trial.random.randrange(2**31))]
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=trial.timeout)
    except subprocess.TimeoutExpired:
        raise Failure(f"did not end within {trial.timeout:g} seconds") from None
    if found.returncode:
        raise Failure(f"exit code {found.returncode}: {(found.stderr.strip().splitlines() or [''])[-1]}")
    return int(found.stdout.split()[-1])


def check_cases(random: random.Random) -> int:
    """Check cases on random meshes, and half the time one with base and draft on separate devices."""
    count = 0
    for _ in range(CASES):
        mesh = make_mesh(*random.choice(MESHES))
        case = Case.drawn(random)
        case = case._replace(batch=mesh.shape["data"] * random.choice((1, 2)))
        print(mesh.shape, case.description(), file=sys.stderr)
        count += check_case(case, random, CALLS, partial(on_mesh, case.reference, Placement(mesh)))
    if random.random() < 0.5:
        count += split(random)
    return count


def split(random: random.Random) -> int:
    """Base and draft model on separate devices (`hydrajax.ssd`)."""
    case = Case.drawn(random, "model")
    drafter = KINDS["model"].build(case.reference.config, np.float32)
    case = case.with_program(drafter=drafter, tree=presets.chain(random.randint(1, 5)), rule=Greedy)
    case = case._replace(request=case.request.replace(rule=Greedy()))
    placement = Placement(make_mesh(1, random.choice((1, 2, 4))), last_devices(random.choice((1, 2, 4))))
    print("split", placement.base.shape, placement.draft.shape, case.description(), file=sys.stderr)
    return check_case(case, random, CALLS, partial(on_mesh, case.reference, placement), partial(split_fn, placement))


def split_fn(placement: Placement, model: BaseModel, program: Program, request: Request) -> Callable:
    """A decode function that makes a `SplitExecutor` for its parameters."""
    return lambda params, *given: SplitExecutor(model, params, program, request, placement=placement).decode(*given)


def on_mesh(reference: Reference, placement: Placement, params: Params, prompt: np.ndarray):
    """Shard the base over ``model`` and the prompts over ``data``, and replicate the draft on its mesh."""
    boxed = jax.tree.leaves(abstract_base(reference.model), is_leaf=lambda box: hasattr(box, "names"))
    leaves, structure = jax.tree.flatten(params.base)
    base = structure.unflatten([placement.place_base(leaf, box.names) for leaf, box in zip(leaves, boxed, strict=True)])
    draft = jax.tree.map(lambda leaf: placement.place_draft_model(np.asarray(leaf), None), params.draft)
    return Params(base, draft), jax.device_put(prompt, NamedSharding(placement.base, PartitionSpec("data")))
