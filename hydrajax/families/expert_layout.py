"""Key maps of mixtures of experts: tensors of each expert, or of all experts of a layer together."""

from __future__ import annotations

from collections.abc import Container

from hydrajax.families.mlp_layout import gate_up, of_parts, parts_of
from hydrajax.families.tensor_names import FUSED_EXPERTS, in_files
from hydrajax.models.layout import Entry, Layout, Parameter, Path, Stack, same, transposed
from hydrajax.models.llama_config import LlamaConfig

# By `Experts.block`: the names of an expert's gate, up and down projections.
PROJECTIONS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
FUSED = "mlp."  # the block's name where its experts are fused
BIAS = "e_score_correction_bias"


def expert_mlp(path: Path, prefix: str, c: LlamaConfig, files: Container[str]) -> Layout:
    """Return the key map of one layer's experts (`hydrajax.models.experts.ExpertMLP`).

    Args:
        path: the layer's path in our parameters.
        prefix: the start of its tensors' names.
        files: names of their tensors; transformers 5 without conversion has one for all experts of a layer.
    """
    e, path = c.experts, (*path, "experts")
    if e.biases:
        return _interleaved(path, f"{prefix}{FUSED}", c)
    fused = c.names in FUSED_EXPERTS or in_files(f"{prefix}{FUSED}experts.gate_up_proj", c) in files
    block = f"{prefix}{FUSED if fused else f'{e.block}.'}"
    layout = [transposed((*path, "router"), f"{block}gate.weight", e.count, c.width)]
    if e.choice_bias:
        layout.append(same((*path, "choice_bias"), f"{block}gate.{BIAS}", e.count))
    if e.with_mlp:
        layout.append(same((*path, "scale"), f"{prefix}router.per_expert_scale", e.count))
    layout += _fused(path, block, c) if fused else _of_each(path, block, c)
    if e.shared_width:
        shared = f"{block}{'shared_expert' if e.shared_gate else 'shared_experts'}."
        layout += [
            gate_up((*path, "shared_gate_up"), shared, c, e.shared_width),
            transposed((*path, "shared_down"), f"{shared}down_proj.weight", c.width, e.shared_width),
        ]
    if e.shared_gate:
        layout.append(transposed((*path, "shared_gate"), f"{block}shared_expert_gate.weight", 1, c.width))
    return layout


def _of_each(path: Path, block: str, c: LlamaConfig) -> Layout:
    e = c.experts
    *gated, down = PROJECTIONS[e.block]
    inner = gated[-1:] if c.activation == "relu2" else gated
    n, experts = len(inner), [f"{block}experts.{i}." for i in range(e.count)]
    return [
        Entry(
            ((*path, "gate_up"),),
            {f"{expert}{part}.weight": (e.width, c.width) for expert in experts for part in inner},
            lambda *each: (Stack(tuple(of_parts(*each[i : i + n]) for i in range(0, len(each), n))),),
            lambda all_experts: tuple(part for expert in all_experts for part in parts_of(expert)),
        ),
        Entry(
            ((*path, "down"),),
            {f"{expert}{down}.weight": (c.width, e.width) for expert in experts},
            lambda *each: (Stack(tuple(Parameter((part.T,)) for part in each)),),
            lambda all_experts: tuple(expert.T for expert in all_experts),
        ),
    ]


def _fused(path: Path, block: str, c: LlamaConfig) -> Layout:
    e = c.experts
    halves = (e.count, 2, e.width, c.width)
    return [
        Entry(
            ((*path, "gate_up"),),
            {f"{block}experts.gate_up_proj": (e.count, 2 * e.width, c.width)},
            lambda fused: (Stack(tuple(Parameter((part,), order=(2, 0, 1)) for part in fused.reshape(halves))),),
            lambda fused: (fused.transpose(0, 2, 3, 1).reshape(e.count, 2 * e.width, c.width),),
        ),
        Entry(
            ((*path, "down"),),
            {f"{block}experts.down_proj": (e.count, c.width, e.width)},
            lambda fused: (Stack(tuple(Parameter((part.T,)) for part in fused)),),
            lambda fused: (fused.transpose(0, 2, 1),),
        ),
    ]


def _interleaved(path: Path, block: str, c: LlamaConfig) -> Layout:
    """Return the key map of gpt-oss: kernels with inputs first, gate and up feature by feature, and biases."""
    e = c.experts

    def interleaved(name: str, part: str, *inputs: int) -> Entry:
        pairs, last = (e.count, *inputs, e.width, 2), len(inputs) + 2
        order = (*range(last - 2), last - 1, last - 2)  # of one expert's axes
        return Entry(
            ((*path, name),),
            {f"{block}experts.{part}": (e.count, *inputs, 2 * e.width)},
            lambda fused: (Stack(tuple(Parameter((one,), order=order) for one in fused.reshape(pairs))),),
            lambda ours: (ours.swapaxes(-1, -2).reshape(e.count, *inputs, 2 * e.width),),
        )

    return [
        transposed((*path, "router"), f"{block}gate.weight", e.count, c.width),
        same((*path, "router_bias"), f"{block}gate.bias", e.count),
        interleaved("gate_up", "gate_up_proj", c.width),
        interleaved("gate_up_bias", "gate_up_proj_bias"),
        Entry(
            ((*path, "down"),),
            {f"{block}experts.down_proj": (e.count, e.width, c.width)},
            lambda kernels: (Stack(tuple(Parameter((one,)) for one in kernels)),),
            lambda kernels: (kernels,),
        ),
        same((*path, "down_bias"), f"{block}experts.down_proj_bias", e.count, c.width),
    ]
