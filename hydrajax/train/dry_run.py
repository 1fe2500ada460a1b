"""Estimate what a training run needs without running it: parameters, bytes per device and time.

Nothing is allocated, and neither data nor weights are read. The mesh is simulated on a CPU, where the train step is
compiled for abstract sharded arrays; XLA's memory analysis gives the size of its temporaries.
"""

import dataclasses
import math
import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.filesize import decimal

from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.shapes import PRESETS
from hydrajax.bench.shapes import SHAPES as PUBLISHED
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.hub import without_hub
from hydrajax.formats.huggingface import read_config
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh, tree_shardings
from hydrajax.train.optimizer import optimizer_of
from hydrajax.train.run_config import TrainConfig, check_length
from hydrajax.train.tasks.base_task import BaseTask
from hydrajax.train.tasks.heads_task import HeadsTask, make_drafter
from hydrajax.train.tasks.joint_task import JointTask
from hydrajax.train.train_step import TrainState, abstract_state, batch_sharding, make_train_step, state_shardings

SHAPES = PUBLISHED | {
    "vicuna-7b": PRESETS["7b"],
    "vicuna-13b": PRESETS["13b"],
    "vicuna-33b": PRESETS["33b"],
    "llama3-8b": PRESETS["8b"],
}

ASSUMED_MFU = 0.4
GB = 1e9
GPU_MEMORY = 80.0  # GB of an A100 or H100
GPU_SHARE = 0.75  # of a GPU's memory, which JAX preallocates by default
# Two depths are compiled and the temporaries extrapolated: 60 unrolled layers would take minutes.
SHALLOW, DEEPER = 2, 4


def dry_run(config: TrainConfig, console: Console, device_memory: float | None = None) -> bool:
    """Print what the run needs on each device.

    Args:
        config: ``model`` and ``teacher`` may be a name in `SHAPES` or a directory with a ``config.json``.
        device_memory: of one device, in GB (10^9 bytes); default `GPU_MEMORY`, and on a CPU its share of the machine's.
            If the run does not fit, more accumulation is tried.

    Returns:
        True if the run fits.
    """
    shape = config.scratch or named_shape(config, "model")
    count, where = config.mesh.data * config.mesh.model, ""
    # From JAX's settings and plugins, as starting an accelerator takes its memory.
    has_accelerator = jax.config.jax_platforms != "cpu" and (entry_points(group="jax_plugins") or find_spec("libtpu"))
    if device_memory is None and not has_accelerator:
        device_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB / count
        where = ", each device's share of this machine's memory" if count > 1 else ", this machine's memory"
    simulate_devices(count)
    mesh = make_mesh(config.mesh.data, config.mesh.model)
    task = abstract_task(config, shape, mesh)
    state = abstract_run(config, task, mesh)[2]
    console.print(summary(config, task, state, mesh))

    trained = {"base": {"weights": state.params}, "heads": {"draft weights": state.params}}.get(config.task)
    if trained is None:
        trained = {"adapter": state.params["adapter"], "draft weights": state.params["draft"]}
    resident = {"teacher" if config.teacher else "base weights": task.frozen, **trained, "optimizer": state.opt_state}
    sizes = {label: bytes_per_device(tree) for label, tree in resident.items()}
    held = sum(sizes.values())
    temporary, depths = temporaries(config, shape, mesh)
    total = held + temporary
    console.print("\nper device")
    for label, size in (sizes | {"temporaries": temporary, "total": total}).items():
        console.print(f"  {label:14s}{decimal(int(size), precision=3):>10s}")
    how = f"extrapolated from {depths[0]} and {depths[1]} layers of the base, " if depths else ""
    console.print(
        f"temporaries (activations, gradients, casts): {how}as planned by XLA's CPU compiler. It multiplies bfloat16 "
        "as float32 copies and schedules differently, so a GPU or TPU may need less or more."
    )
    if config.joint.remat:
        console.print(
            "joint.remat: XLA's CPU compiler undoes it and keeps all activations; a GPU or TPU needs far less"
        )
    print_verdict(config, shape, mesh, held, total, device_memory or GPU_MEMORY, where, console)
    print_time(config, task.flops_per_token, mesh.size, console)
    return total <= (device_memory or GPU_MEMORY) * GB


def summary(config: TrainConfig, task: HeadsTask | BaseTask, state: TrainState, mesh: Mesh) -> str:
    """The lines about the base, the trained parameters and the mesh."""
    name = config.model or "from scratch"
    lines, trained, what = [], state.params, f"base {name}"
    if config.task != "base":
        dtype, what = config.quantize or config.dtype, type(task.drafter).__name__
        lines.append(f"base   {name}: {millions(task.frozen)} parameters in {dtype}, frozen")
    if config.task == "joint":
        adapter, trained = trained["adapter"], trained["draft"]
        lines.append(f"train  adapter, rank {config.adapter.rank}: {millions(adapter)} parameters in float32")
    lines += [
        f"train  {what}: {millions(trained)} parameters in float32, computing in {config.dtype}",
        f"mesh   {mesh.shape['data']} x {mesh.shape['model']} (data x model); batch {config.batch_size} x "
        f"{config.data.length} tokens, in {config.accumulation} micro-batches",
    ]
    if config.teacher:
        lines.append(f"teacher {config.teacher}: {millions(task.frozen)} parameters in {config.dtype}, frozen")
    return "\n".join(lines)


def print_verdict(
    config: TrainConfig, shape: LlamaConfig, mesh: Mesh, held: float, total: float, memory: float, where: str,
    console: Console,
) -> None:  # fmt: skip
    """Print whether the run fits and, if not, the smallest accumulation with which it would."""
    limit = memory * GB
    if total <= limit:
        console.print(f"\nfits in {memory:.4g} GB{where}: {total / limit:.0%} used")
        if total > GPU_SHARE * limit and not where:
            console.print(
                f"  JAX preallocates {GPU_SHARE:.0%} of a GPU's memory; set XLA_PYTHON_CLIENT_MEM_FRACTION to use more"
            )
        return
    console.print(f"\nDOES NOT FIT in {memory:.4g} GB{where}: {decimal(int(total))} needed on each device")
    accumulation = 2 * config.accumulation
    while held < limit and config.batch_size % (accumulation * config.mesh.data) == 0:
        need = held + temporaries(dataclasses.replace(config, accumulation=accumulation), shape, mesh)[0]
        console.print(f"  accumulation={accumulation}: {decimal(int(need))}" + ", fits" * (need <= limit))
        if need <= limit:
            return
        accumulation *= 2
    more = "" if where else "; a larger mesh.model splits the base and the optimizer over more devices"
    console.print(f"  no accumulation fits{more}")


def print_time(config: TrainConfig, flops_per_token: float, n_devices: int, console: Console) -> None:
    """Print the time at an assumed MFU: of the run if ``steps`` is set, else per token, as the data is not read."""
    tokens, what = 10**6, "per million tokens"
    if config.steps:
        tokens = config.steps * config.batch_size * config.data.length
        what = f"for {config.steps} steps, {tokens:,} tokens"
    console.print(f"\n{flops_per_token / 1e9:.3g} GFLOP per token; time {what} on GPUs at an MFU of {ASSUMED_MFU}")
    for device in ("A100", "H100"):
        seconds = flops_per_token * tokens / (n_devices * DEVICES[device].flops * ASSUMED_MFU)
        console.print(f"  {n_devices} x {device}: {duration(seconds)}")


def duration(seconds: float) -> str:
    """Return a time such as ``1.5 h`` in the largest unit of which it has one."""
    units = {"days": 86400, "h": 3600, "min": 60, "s": 1}
    return next((f"{seconds / size:.3g} {unit}" for unit, size in units.items() if seconds >= size), "less than 1 s")


# --- the run, abstract ----------------------------------------------------------------------------------------------


def named_shape(config: TrainConfig, field: str) -> LlamaConfig:
    name = getattr(config, field)
    if name in SHAPES:
        return SHAPES[name]
    directory = without_hub(name, field)
    if not (directory / "config.json").is_file():
        raise not_allowed(field, name, SHAPES, " or a directory with a config.json")
    shape = read_config(directory, field)
    check_length(config, shape)
    return shape


def simulate_devices(count: int) -> None:
    """Split the CPU into ``count`` devices, which JAX allows before its first array only."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # JAX has started; `make_mesh` reports too few devices
    jax.config.update("jax_platforms", "cpu")


def abstract_task(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> HeadsTask | BaseTask:
    """The task on a base of this shape, for its shapes, shardings and loss only."""
    if config.task == "base":
        teacher = abstract_model(config, named_shape(config, "teacher"), mesh) if config.teacher else None
        return BaseTask(config, None, mesh, shape, teacher=teacher)
    model, params = abstract_model(config, shape, mesh)
    return (JointTask if config.task == "joint" else HeadsTask)(config, None, model, params, mesh)


def abstract_model(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> tuple[Llama, Any]:
    """A frozen model and its parameters as sharded ShapeDtypeStructs."""
    model = Llama(shape, jnp.dtype(config.dtype), config.quantize)
    boxed = abstract_base(model)
    shardings = tree_shardings(mesh, boxed)
    return model, jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nn.unbox(boxed), shardings
    )


def abstract_run(
    config: TrainConfig, task: HeadsTask | BaseTask, mesh: Mesh
) -> tuple[optax.GradientTransformation, TrainState, TrainState]:
    """``(optimizer, shardings of the state, abstract state)``."""
    optimizer = optimizer_of(config, config.steps or config.joint.heads_alone_steps + 1, mesh)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    return optimizer, shardings, abstract_state(task.abstract_params, optimizer, shardings)


def temporaries(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> tuple[float, tuple[int, int] | None]:
    """Bytes per device besides the arguments, and the two depths from which they were extrapolated, if they were.

    Layers are unrolled and equal, so two depths suffice. A frozen base keeps nothing of a layer and its depth hardly
    counts; with an adapter the gradient passes through the base, and every layer keeps its activations.
    """
    shallow = SHALLOW
    while config.task != "base" and not same_hidden_layers(config, shape, shallow):
        shallow += 1
    deeper = shallow + DEEPER - SHALLOW
    if shape.n_layers <= deeper:
        return planned_bytes(config, shape, mesh), None
    low, high = (planned_bytes(config, shape.replace(n_layers=depth), mesh) for depth in (shallow, deeper))
    per_layer = (high - low) / (deeper - shallow)
    return high + (shape.n_layers - deeper) * per_layer, (shallow, deeper)


def same_hidden_layers(config: TrainConfig, shape: LlamaConfig, n_layers: int) -> bool:
    """Return True if the drafter reads as many layers from a base of ``n_layers``; EAGLE-3 may read fewer."""
    full = make_drafter(config.draft, shape, config.dtype)
    try:
        shallow = make_drafter(config.draft, shape.replace(n_layers=n_layers), config.dtype)
    except HydrajaxError:
        return False
    return len(shallow.spec.aux_hidden_layers) == len(full.spec.aux_hidden_layers)


def planned_bytes(config: TrainConfig, shape: LlamaConfig, mesh: Mesh) -> int:
    """Temporaries of the compiled train step on one device, with outputs that do not reuse the memory of inputs.

    One micro-batch is compiled and the float32 sum of gradients is added for the others: in a loop over micro-batches
    XLA's CPU compiler keeps float32 copies of all base weights, which no GPU needs.
    """
    one_pass = dataclasses.replace(config, batch_size=config.batch_size // config.accumulation, accumulation=1)
    task = abstract_task(one_pass, shape, mesh)
    optimizer, shardings, state = abstract_run(config, task, mesh)
    step = make_train_step(task.loss, optimizer, 1, shardings, task.frozen_shardings)
    names = ("tokens", "labels", "segments") if config.data.rows == "pack" else ("tokens", "labels")
    ids = jax.ShapeDtypeStruct((one_pass.batch_size, config.data.length), jnp.int32, sharding=batch_sharding(mesh))
    rng = jax.eval_shape(lambda: jax.random.key(0))
    lowered = step.lower(state, task.frozen, dict.fromkeys(names, ids), rng)
    # Without optimising the machine code: the memory is planned before it is generated.
    plan = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    sums = bytes_per_device(state.params) if config.accumulation > 1 else 0
    return plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + sums


def bytes_per_device(tree: Any) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def millions(tree: Any) -> str:
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) / 1e6
    return f"{count:,.{1 if count >= 1 else 3}f} million"
