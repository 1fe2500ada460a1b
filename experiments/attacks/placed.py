"""Attacks on decoding with a draft on 2, 4 and 8 simulated devices, in a process of its own: XLA fixes their number."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from attacks.bases import Alone
from attacks.commands import ROOT
from attacks.drafted import Case, tried
from attacks.registry import Fell, Place, attack
from jax.sharding import NamedSharding, PartitionSpec

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel, abstract_base
from hydrajax.sharding import Placement, last_devices, make_mesh
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.trees import presets

DEVICES, CASES, CALLS = 8, 2, 3
MESHES = [(data, model) for data in (1, 2, 4, 8) for model in (1, 2, 4, 8) if 1 < data * model <= DEVICES]
PROGRAM = """
import random, sys
from attacks.placed import cases
print("rows", cases(random.Random(sys.argv[1])))
"""


@attack("drafted decoding on devices", count=12)
def placed(place: Place) -> int:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "experiments"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, str(place.random.randrange(2**31))]
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=place.seconds)
    except subprocess.TimeoutExpired:
        raise Fell(f"did not end within {place.seconds:g} seconds") from None
    if found.returncode:
        raise Fell(f"exit code {found.returncode}: {(found.stderr.strip().splitlines() or [''])[-1]}")
    return int(found.stdout.split()[-1])


def cases(random: random.Random) -> int:
    """On meshes drawn, and once with a draft model on devices of its own. How many rows that were."""
    rows = 0
    for _ in range(CASES):
        mesh = make_mesh(*random.choice(MESHES))
        case = Case.drawn(random)
        case = case._replace(batch=mesh.shape["data"] * random.choice((1, 2)))
        print(mesh.shape, case.said(), file=sys.stderr)
        rows += tried(case, random, CALLS, partial(on_mesh, case.alone, Placement(mesh)))
    if random.random() < 0.5:
        rows += split(random)
    return rows


def split(random: random.Random) -> int:
    """The draft prepares ahead for what the base may say (`hydrajax.ssd`)."""
    case = Case.drawn(random, "model")
    drafter = KINDS["model"].build(case.alone.config, np.float32)
    case = case.with_spec(drafter=drafter, tree=presets.chain(random.randint(1, 5)), rule=Greedy())
    placement = Placement(make_mesh(1, random.choice((1, 2, 4))), last_devices(random.choice((1, 2, 4))))
    print("split", placement.base.shape, placement.draft.shape, case.said(), file=sys.stderr)
    return tried(case, random, CALLS, partial(on_mesh, case.alone, placement), partial(split_fn, placement))


def split_fn(placement: Placement, model: BaseModel, spec: DecodeSpec) -> Callable:
    """A decode function of `SplitExecutor`, which is made of its parameters."""
    return lambda params, *given: SplitExecutor(model, params, spec, placement=placement).decode(*given)


def on_mesh(alone: Alone, placement: Placement, params: Params, prompt: np.ndarray):
    """The base split over ``model``, the prompts over ``data``, the draft whole on every device of its mesh."""
    boxed = jax.tree.leaves(abstract_base(alone.model), is_leaf=lambda box: hasattr(box, "names"))
    leaves, structure = jax.tree.flatten(params.base)
    base = structure.unflatten([placement.place_base(leaf, box.names) for leaf, box in zip(leaves, boxed, strict=True)])
    draft = jax.tree.map(lambda leaf: placement.place_draft_model(np.asarray(leaf), None), params.draft)
    return Params(base, draft), jax.device_put(prompt, NamedSharding(placement.base, PartitionSpec("data")))
