"""What a run would need, without running it: parameters, bytes per device as XLA plans them, and hours.

Nothing is allocated and no data or weights are read. The mesh is simulated on a CPU, the train step is compiled for
abstract sharded arrays, and XLA says how much memory its temporaries take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from hydrajax.errors import HydrajaxError
from hydrajax.formats.huggingface import read_config
from hydrajax.models.base_model import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import PRESETS, LlamaConfig
from hydrajax.roofline.devices import DEVICES
from hydrajax.sharding import make_mesh, tree_shardings
from hydrajax.train.optimizer import optimizer_of
from hydrajax.train.run_config import TrainConfig, check_length
from hydrajax.train.tasks.base_task import BaseTask
from hydrajax.train.tasks.heads_task import HeadsTask, make_drafter
from hydrajax.train.tasks.joint_task import JointTask
from hydrajax.train.train_step import TrainState, abstract_state, batch_sharding, make_train_step, state_shardings

SHAPES = PRESETS | {
    "vicuna-7b": PRESETS["7b"],
    "vicuna-13b": PRESETS["13b"],
    "vicuna-33b": PRESETS["33b"],
    "llama3-8b": PRESETS["8b"],
}

ASSUMED_MFU = 0.4
GB = 1e9
GPU_SHARE = 0.75  # of a GPU's memory JAX takes by default
# Two depths are compiled and the temporaries extrapolated: 60 unrolled layers would take minutes.
SHALLOW, DEEPER = 2, 4


class Temporaries(NamedTuple):
    """Bytes per device beside the arguments, at the base's full depth."""

    bytes: float
    extrapolated: bool


def dry_run(config: TrainConfig, console: Console, device_memory: float = 80.0) -> bool:
    """Print what the run needs of each device; returns whether it fits ``device_memory`` GB (10^9 bytes).

    ``config.model`` and ``teacher`` may name a shape in `SHAPES` or a directory with a ``config.json``. Where the run
    does not fit, more accumulation is tried. Raises `HydrajaxError` for settings that no run could have.
    """
    shape = shape_of(config)
    simulate_devices(config.mesh.data * config.mesh.model)
    mesh = make_mesh(config.mesh.data, config.mesh.model)
    task = abstract_task(config, shape, mesh)
    state = state_of(config, task, mesh)
    say = console.print

    name = config.model or "from scratch"
    if config.task != "base":
        kept = config.quantize or config.dtype
        say(f"base   {name}: {millions(task.frozen)} parameters in {kept}, frozen")
    what = type(task.drafter).__name__ if config.task != "base" else f"base {name}"
    trained = state.params
    if config.task == "joint":
        adapter, trained = trained["adapter"], trained["draft"]
        say(f"train  its adapter, rank {config.adapter.rank}: {millions(adapter)} parameters in float32")
    say(f"train  {what}: {millions(trained)} parameters in float32, computing in {config.dtype}")
    say(
        f"mesh   {mesh.shape['data']} x {mesh.shape['model']} (data x model); batch {config.batch_size} x "
        f"{config.data.length} tokens, in {config.accumulation} passes"
    )
    if config.teacher:
        say(f"       taught by {config.teacher}: {millions(task.frozen)} parameters in {config.dtype}, frozen")
    resident = {
        "teacher" if config.teacher else "base weights": bytes_per_device(task.frozen),
        **{label: bytes_per_device(weights) for label, weights in weights_of(config, state.params).items()},
        "optimizer": bytes_per_device(state.opt_state),
    }
    held = sum(resident.values())
    planned = temporaries(config, shape, mesh)
    total = held + planned.bytes
    say("\nper device, in GB of 10^9 bytes")
    for label, size in (resident | {"temporaries": planned.bytes, "total": total}).items():
        say(f"  {label:14s}{size / GB:10.3f}")
    fits = total <= device_memory * GB
    how = f"extrapolated from {SHALLOW} and {DEEPER} layers of the base, " if planned.extrapolated else ""
    say(
        f"temporaries (activations, gradients, casts): {how}as XLA's CPU compiler plans them. It multiplies bfloat16 "
        "as float32 copies and schedules differently, so that a GPU or TPU may need less or more."
    )
    if config.joint.remat:
        say("joint.remat: that compiler undoes it and plans as if everything were kept; a GPU or TPU needs far less")
    verdict(config, shape, mesh, held, total, device_memory, console)
    hours(config, task.flops_per_token, mesh.size, console)
    return fits


def weights_of(config: TrainConfig, params: Any) -> dict[str, Any]:
    """What is trained, by what it is called."""
    if config.task == "base":
        return {"weights": params}
    if config.task == "heads":
        return {"draft weights": params}
    return {"adapter": params["adapter"], "draft weights": params["draft"]}


def verdict(
    config: TrainConfig, shape: LlamaConfig, mesh: Mesh, held: float, total: float, memory: float, console: Console
) -> None:
    """Whether it fits and, if not, what would."""
    if total <= memory * GB:
        console.print(f"\nfits in {memory:g} GB: {total / (memory * GB):.0%} used")
        if total > GPU_SHARE * memory * GB:
            console.print(
                f"  JAX takes {GPU_SHARE:.0%} of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
            )
        return
    console.print(f"\nDOES NOT FIT in {memory:g} GB: {total / GB:.1f} GB needed on each device")
    if held < memory * GB:
        for accumulation in more_accumulation(config):
            need = held + temporaries(dataclasses.replace(config, accumulation=accumulation), shape, mesh).bytes
            console.print(f"  accumulation={accumulation}: {need / GB:.1f} GB" + ", fits" * (need <= memory * GB))
            if need <= memory * GB:
                return
    console.print("  no accumulation helps: a larger mesh.model splits the base and the moments over more devices")


def more_accumulation(config: TrainConfig) -> Iterator[int]:
    """Twice the passes, and twice again, down to one row per device and pass."""
    passes = 2 * config.accumulation
    while config.batch_size % (passes * config.mesh.data) == 0:
        yield passes
        passes *= 2


def hours(config: TrainConfig, flops_per_token: float, n_devices: int, console: Console) -> None:
    """The time at an assumed MFU: of the run where its steps are given, else (the data is not read) per token."""
    tokens, what = 1e6, "per million tokens"
    if config.steps:
        tokens = config.steps * config.batch_size * config.data.length
        what = f"for {config.steps} steps, {tokens / 1e6:.0f} million tokens"
    console.print(f"\n{flops_per_token / 1e9:.2f} GFLOP per token; hours {what}, if MFU is {ASSUMED_MFU}")
    for device in ("A100", "H100"):
        time = flops_per_token * tokens / (n_devices * DEVICES[device].flops * ASSUMED_MFU) / 3600
        console.print(f"  {n_devices} x {device}: {time:.3g} h")


# --- the run, abstract ----------------------------------------------------------------------------------------------


def shape_of(config: TrainConfig) -> LlamaConfig:
    """Of the base, from the settings, by name or from its directory."""
    return config.scratch or named_shape(config, "model")


def named_shape(config: TrainConfig, field: str) -> LlamaConfig:
    """The shape that ``model`` or ``teacher`` names."""
    name = getattr(config, field)
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise HydrajaxError(
            f"{field}: found {name!r}, allowed in a dry run are a directory with a config.json and {', '.join(SHAPES)}"
        )
    shape = read_config(path.parent, field)
    check_length(config, shape)
    return shape


def simulate_devices(count: int) -> None:
    """Make the CPU look like so many devices. JAX can do it only before its first array."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # JAX has started; if its devices are too few, `make_mesh` says so
    jax.config.update("jax_platforms", "cpu")


def abstract_task(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> HeadsTask | BaseTask:
    """The task of a base of this shape, of which only shapes, shardings and the loss are used."""
    if config.task == "base":
        teacher = abstract_model(config, named_shape(config, "teacher"), mesh) if config.teacher else None
        return BaseTask(config, None, mesh, shape, teacher=teacher)
    model, params = abstract_model(config, shape, mesh)
    return (JointTask if config.task == "joint" else HeadsTask)(config, None, model, params, mesh)


def abstract_model(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> tuple[Llama, Any]:
    """A frozen model of this shape, in the settings' dtype."""
    model = Llama(shape, jnp.dtype(config.dtype), config.quantize)
    boxed = abstract_base(model)
    return model, placed(nn.unbox(boxed), tree_shardings(mesh, boxed))


def state_of(config: TrainConfig, task: HeadsTask | BaseTask, mesh: Mesh) -> TrainState:
    optimizer = optimizer_of(config, config.steps or config.joint.heads_alone_steps + 1)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    return abstract_state(task.abstract_params, optimizer, shardings)


def temporaries(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> Temporaries:
    """What XLA's memory analysis says of the train step.

    Layers are unrolled and alike: two depths tell. A frozen base keeps nothing of a layer, so its depth hardly counts;
    through one with an adapter the gradient goes back, and every layer keeps what that needs.
    """
    shallow = SHALLOW
    while config.task != "base" and not drafts_alike(config, shape, shallow):
        shallow += 1
    deeper = shallow + DEEPER - SHALLOW
    if shape.n_layers <= deeper:
        return Temporaries(planned_bytes(config, shape, mesh), extrapolated=False)
    low, high = (planned_bytes(config, shape.replace(n_layers=depth), mesh) for depth in (shallow, deeper))
    per_layer = (high - low) / (deeper - shallow)
    return Temporaries(high + (shape.n_layers - deeper) * per_layer, extrapolated=True)


def drafts_alike(config: TrainConfig, shape: LlamaConfig, n_layers: int) -> bool:
    """Tell whether a base of so many layers has those that the drafter reads; for EAGLE-3 a shallow one has fewer."""
    whole = make_drafter(config.draft, shape, config.dtype)
    try:
        shallow = make_drafter(config.draft, shape.replace(n_layers=n_layers), config.dtype)
    except HydrajaxError:
        return False
    return len(shallow.spec.aux_hidden_layers) == len(whole.spec.aux_hidden_layers)


def planned_bytes(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> int:
    """Temporaries of the compiled train step on one device, and its outputs that do not take the place of inputs.

    Of several passes one is compiled, and the float32 sum of gradients added that the others would leave: in a loop
    over passes XLA's CPU compiler keeps float32 copies of all base weights, which no GPU needs.
    """
    one_pass = dataclasses.replace(config, batch_size=config.batch_size // config.accumulation, accumulation=1)
    task = abstract_task(one_pass, shape, mesh)
    optimizer = optimizer_of(config, config.steps or config.joint.heads_alone_steps + 1)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
    state = abstract_state(task.abstract_params, optimizer, shardings)
    names = ("tokens", "labels", "segments") if config.data.rows == "pack" else ("tokens", "labels")
    rows = jax.ShapeDtypeStruct((one_pass.batch_size, config.data.length), jnp.int32, sharding=batch_sharding(mesh))
    rng = jax.eval_shape(lambda: jax.random.key(0))
    lowered = step.lower(state, task.frozen, dict.fromkeys(names, rows), rng)
    # Unoptimised machine code: the memory is planned before it is made.
    plan = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    sums = bytes_per_device(state.params) if config.accumulation > 1 else 0
    return plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + sums


def placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, home: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), tree, shardings)


def bytes_per_device(tree: Any) -> int:
    """Of abstract arrays with shardings, on the device that holds most."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def millions(tree: Any) -> str:
    return f"{sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) / 1e6:,.1f} million"
