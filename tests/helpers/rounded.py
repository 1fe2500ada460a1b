"""transformers' models with the weights, and where our kernels do it the inputs, of linear layers rounded to 8 bits."""

import torch

from hydrajax.ops import trace

GROUP = 32


def rounded_weight(weight: torch.Tensor, in_groups: bool) -> torch.Tensor:
    """Return a weight ``[out, in]`` in 255 steps for each output, or for each 32 inputs of one."""
    groups = weight[:, None]
    if in_groups:
        groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    step = groups.abs().amax(dim=-1, keepdim=True) / 127
    step = step.half().float() if in_groups else step
    return (torch.round(groups / step).clamp(-127, 127) * step).flatten(1)[:, : weight.shape[1]]


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Return x in 255 steps for each group of 32 numbers."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    step = padded.abs().amax(dim=-1, keepdim=True) / 127
    rounded = torch.where(step > 0, torch.round(padded / step) * step, 0.0)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def with_int8(model: torch.nn.Module, layers=None) -> torch.nn.Module:
    """Round the linear layers of a model, in place, as ``quantize="int8"`` does; by default all of them."""
    tiles = trace.has_few_bits()
    if layers is None:
        linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        keep_head = model.config.tie_word_embeddings and not tiles
        layers = [layer for name, layer in linear.items() if not (keep_head and name == "lm_head")]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(rounded_weight(layer.weight, in_groups=tiles))
        if tiles:
            layer.register_forward_pre_hook(lambda layer, inputs: (rounded_inputs(inputs[0]), *inputs[1:]))
    return model
