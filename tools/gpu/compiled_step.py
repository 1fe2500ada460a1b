"""Compile the programs of `compile_report.py` for a described device, and count in those of a GPU."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import described_gpu
import flax.linen as nn
import jax
import jax.numpy as jnp
from collectives import counted
from compiled_program import CompiledProgram, Instruction, Kernel, array_bytes
from draft_lm_heads import drafter_for
from expert_blocks import moved_by_experts

from hydrajax import ops, plugins
from hydrajax.bench.benchmark import autoregressive_bytes, first_nodes
from hydrajax.bench.device_memory import asleep, nbytes
from hydrajax.bench.shapes import SHAPES
from hydrajax.bench.timing import example_topology
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode_loop import run_steps
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import SamplingParams
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter, Proposal
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.trainable import Trainable, abstract_draft
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.cache import after_reads
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.ops import trace
from hydrajax.ops.gpu import append_rows, tree_attention
from hydrajax.ops.gpu import experts as experts_gpu
from hydrajax.ops.gpu.backend import Gpu
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

MAX_NEW = 64  # new tokens of the loops; the rest of the context is prompt
LARGE = 1_000_000  # bytes of a copied cache or weight, more than a few hidden states
BASE_ALONE = ("ar", "ar-step", "verify", "prefill")


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        weights: Of the base: "float" or a name of the weight types of `hydrajax.plugins`.
        lm_head: A name of `draft_lm_heads.LM_HEADS`, for the draft heads.
        layers: Layers of the base (None: the shape's).
        devices: One, or several that share the weights. The program of several begins with the prompt, as XLA finds
            where caches and states lie.
        more: Programs that the caller compiles itself.
    """

    what: str
    shape: str
    batch: int
    context: int
    nodes: int
    dtype: str
    weights: str
    lm_head: str
    device: str
    layers: int | None = None
    devices: int = 1
    more: tuple[str, ...] = ()

    def __post_init__(self):
        known = {"--shape": (self.shape, SHAPES), "--what": (self.what, (*BASE_ALONE, *KINDS, *self.more))}
        known["--weights"] = (self.weights, ("float", *plugins.Group("weights")))
        for flag, (found, names) in known.items():
            if found not in names:
                raise HydrajaxError(f"{flag}: got {found}, expected one of {', '.join(names)}")
        if not 1 <= self.nodes <= presets.sparse().size:
            raise HydrajaxError(f"--nodes: got {self.nodes}, expected 1 to {presets.sparse().size}")
        for flag, found, least in (("--batches", self.batch, 1), ("--contexts", self.context, MAX_NEW + 1)):
            if found < least:
                raise HydrajaxError(f"{flag}: got {found}, expected at least {least}")
        if self.layers is not None and self.layers < 1:
            raise HydrajaxError(f"--layers: got {self.layers}, expected at least 1")

    @property
    def quantize(self) -> str | None:
        """The type of the base's low-bit weights, if it has any."""
        return None if self.weights == "float" else self.weights

    @property
    def tokens(self) -> int:
        """The tokens of a pass of the base in a loop."""
        return self.batch * (1 if self.what in ("ar", "ar-step") else self.nodes)

    @property
    def stored_as(self) -> str:
        """The type of the base's weights."""
        return self.quantize or self.dtype

    @property
    def name(self) -> str:
        """A Python identifier under which XLA dumps the program."""
        words = [self.what.replace("+", "p").replace("-", "_"), self.shape, f"b{self.batch}_c{self.context}"]
        words.append(f"n{self.nodes}")
        return "_".join(["hydrajax", *words, self.weights, f"l{self.layers or 0}", f"d{self.devices}"])


@dataclass(frozen=True)
class Compiled:
    """Optimised HLO, bytes that a step must move, operations of the base's products, temporary bytes, seconds."""

    hlo: str
    floor: int
    flops: int
    temporary: int
    seconds: float


def compile_case(case: Case, devices: ModuleType = described_gpu) -> Compiled:
    """Compile a case for ``case.device`` as ``devices`` describes it: `described_gpu`, or that of TPUs."""
    with (
        trace.tracing(platform=devices.platform(case.device, case.devices)),
        devices.described(case.device, case.devices),
    ):
        return _compile(case, devices.placed_on(case.device, case.devices))


def _compile(case: Case, place: Callable) -> Compiled:
    config = SHAPES[case.shape]
    config = config.replace(
        n_layers=case.layers or config.n_layers, max_positions=max(config.max_positions, case.context)
    )
    model = Llama(config, jnp.dtype(case.dtype), case.quantize)
    drafter, tree = _drafter_and_tree(case, model)
    boxed = Params(abstract_base(model), _weights_of(drafter, model))
    engine, params = Engine(model, Program(drafter, tree, max_new_tokens=MAX_NEW)), nn.unbox(boxed)
    alone = case.what == "prefill"
    prompt = jax.ShapeDtypeStruct((case.batch, case.context - (0 if alone else MAX_NEW)), jnp.int32)
    inputs = [prompt, jax.ShapeDtypeStruct((case.batch,), jnp.int32)]
    sampling = SamplingParams(jax.random.key(0), Greedy())

    def prefill(params, prompt, lengths):
        return engine.prefill(params, prompt, lengths, sampling)

    began = time.perf_counter()
    if alone:
        lowered = _jitted(case, prefill).lower(*place(boxed, *inputs))
    elif case.devices > 1:
        call, carry_of = _turn(case.what, engine)
        whole = _jitted(case, lambda params, *given: call(params, carry_of(prefill(params, *given))))
        with _without_cudnn():
            lowered = whole.lower(*place(boxed, *inputs))
    else:
        call, carry_of = _turn(case.what, engine)
        with _without_cudnn():
            carry = jax.eval_shape(lambda *given: carry_of(prefill(*given)), params, *inputs)
        lowered = _jitted(case, call, donate_argnums=1).lower(*place(boxed, carry))
    program = lowered.compile(compiler_options=ops.compiler_options())
    tokens = prompt.shape[1] if alone else engine.program.tree.size  # of a sequence
    floor = autoregressive_bytes(model, params.base, case.batch, 0 if alone else case.context, tokens)
    floor += 0 if case.what == "verify" else nbytes(params.draft)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params.base))
    numbers -= asleep(params.base, config, 1, lambda leaf: leaf.size)  # a token multiplies with its own experts
    numbers -= 0 if config.tied_lm_head else params.base["embedding"].size
    flops = 2 * case.batch * tokens * numbers
    if alone:  # only the last token's logits are computed
        flops -= 2 * case.batch * (tokens - 1) * config.width * config.vocab_size
    temporary = program.memory_analysis().temp_size_in_bytes
    return Compiled(program.as_text(), floor, flops, temporary, time.perf_counter() - began)


def _weights_of(drafter: Drafter, model: BaseModel):
    """Return the shapes of a drafter's parameters, boxed with logical axes if it has any."""
    if isinstance(drafter, Trainable):
        return abstract_draft(drafter, model)
    base = nn.unbox(abstract_base(model))
    return jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base)


def _drafter_and_tree(case: Case, model: BaseModel) -> tuple[Drafter, TreeTopology]:
    if case.what in ("ar", "ar-step", "prefill"):
        return NoDrafter(), presets.root()
    kind = "medusa" if case.what == "verify" else case.what
    tree = next(iter(first_nodes(presets.sparse(), [case.nodes]).values()))
    return drafter_for(model, kind, case.lm_head), tree


def _turn(what: str, engine: Engine) -> tuple[Callable, Callable]:
    """Return a function of parameters and carry, and one that makes the carry of the state after the prompt."""
    if what == "ar-step":
        return engine.decode_step, lambda state: state
    if what != "verify":
        return lambda params, state: run_steps(engine, params, state), lambda state: state

    def turns(params, carry):
        """Verify eight times. Cache and tokens depend on the logits, so that no pass is dropped or hoisted."""

        def verified(_, carry):
            cache, tokens = carry
            _, logits = engine.verify(params, cache, Proposal(tokens, example_topology(engine, len(tokens))))
            shift = (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)
            cache = cache._replace(lengths=after_reads(cache.lengths, shift[:, 0]))
            return cache, (tokens + shift) % engine.model.config.vocab_size

        return jax.lax.fori_loop(0, 8, verified, carry)

    def carry_of(state):
        return state.target.cache, jnp.broadcast_to(
            state.target.root[:, None], (len(state.target.root), engine.program.tree.size)
        )

    return turns, carry_of


def _without_cudnn() -> contextlib.AbstractContextManager:
    """Return a context in which a prompt's attention, which does not count, needs no cuDNN, a GB to install."""
    return mock.patch.object(Gpu, "text_kernel", return_value=None)


def _jitted(case: Case, call: Callable, **settings):
    def named(*args):
        return call(*args)

    named.__name__ = named.__qualname__ = case.name
    return jax.jit(named, **settings)


# --- counting --------------------------------------------------------------------------------------------------


def kernels_of(case: Case, hlo: str) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of a step, and those outside the loop."""
    program, moves = CompiledProgram(hlo), _moved_by_our_kernels(case)
    outside = program.entry(moves)
    return (outside, []) if case.what in ("ar-step", "prefill") else (program.loop(moves), outside)


def _moved_by_our_kernels(case: Case):
    """Return a function for the bytes of the package's own kernels, whose programs show only shapes of whole caches.

    Attention reads the filled slots only, and appending moves the given rows. Each block of tokens reads its expert.
    """

    def moves(instruction: Instruction, operands: tuple[str, ...]) -> tuple[int, int] | None:
        if append_rows.NAME in instruction.attributes:
            rows = math.prod(_dims(operands[0]))  # batch times tokens
            per_row = sum(array_bytes(shape) // _dims(shape)[0] // _dims(shape)[2] for shape in operands[2:]) // 2
            return rows * per_row, rows * per_row
        if experts_gpu.NAME in instruction.attributes:
            return moved_by_experts(case, instruction, operands)
        if tree_attention.NAME in instruction.attributes:
            lines = _dims(operands[0])[1]  # each tile of them reads all keys and values
            tiles = -(-lines // tree_attention.MOST_LINES)
            caches = [shape for shape in operands if _is_cache(shape, case.context)]
            filled = sum(array_bytes(shape) * case.context // _dims(shape)[1] for shape in caches)
            others = sum(array_bytes(shape) for shape in operands if shape not in caches)
            return tiles * filled + others, array_bytes(instruction.shape)
        return None

    return moves


def _is_cache(shape: str, context: int) -> bool:
    """Test for the shape ``[B * kv, slots, H]`` with more slots than the context."""
    dims = _dims(shape)
    return len(dims) == 3 and dims[1] > context


def _dims(shape: str) -> list[int]:
    return [int(dim) for dim in re.match(r"\w+\[([\d,]*)\]", shape)[1].split(",") if dim]


def row_of(case: Case, dumps: Path) -> tuple[dict, str]:
    """Return a row of a "program" result, and the HLO."""
    whole = compile_case(case)
    step, outside = kernels_of(case, whole.hlo)
    # Kernels per layer: two more layers add twice as many.
    few = [len(kernels_of(case, compile_case(replace(case, layers=n)).hlo)[0]) for n in (2, 4) if n != case.layers]
    few += [len(step)] * (2 - len(few))
    graphs, alone = graphs_of(dumps, case), case.devices == 1
    counted_kernels = step + outside if alone else step  # the program of several devices begins with the prompt
    copies = [kernel for kernel in counted_kernels if kernel.kind == "copy" and kernel.moved > LARGE]
    row = {
        "what": case.what,
        "batch": case.batch,
        "context": case.context,
        "nodes": 1 if case.what in ("ar", "ar-step", "prefill") else case.nodes,
        "weights": case.stored_as,
        "kernels": len(step),
        "kernels_per_layer": abs(few[1] - few[0]) / 2,
        "gigabytes": sum(kernel.moved for kernel in step) / 1e9,
        "floor_gigabytes": whole.floor / case.devices / 1e9,
        "copies": len(copies),
        "copied_megabytes": sum(kernel.moved for kernel in copies) / 1e6,
        "temporary_megabytes": whole.temporary / 1e6,
        "one_graph": graphs == ["kCommandBuffer"] if alone else "kWhile" not in graphs,
        "graphs": graphs,
        "compile_seconds": whole.seconds,
    }
    if not alone:
        row |= {"devices": case.devices, **counted(whole.hlo)}
    return row, whole.hlo


def graphs_of(dumps: Path, case: Case) -> list[str]:
    """List the CUDA graphs and host loops that the host launches, in order."""
    files = sorted(dumps.glob(f"*{case.name}*thunk_sequence_after_thunk_passes.txt"))
    lines = files[-1].read_text().splitlines() if files else []
    indents = [(len(line) - len(line.lstrip()), re.search(r"\bk[A-Z]\w+", line)) for line in lines]
    found, inside = [], None
    for indent, kind in indents:
        if inside is not None and indent > inside:
            continue
        inside = None
        if kind and kind[0] in ("kWhile", "kConditional", "kCommandBuffer"):
            found.append(kind[0])
            inside = indent if kind[0] == "kCommandBuffer" else None
    return found
