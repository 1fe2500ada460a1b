"""Files of P-EAGLE drafts: EAGLE-3's (`hydrajax.formats.eagle_format`) with more layers and ``mask_hidden``.

Released drafts have EAGLE-3's tensors, the further layers as ``layers.1.*`` and on, ``mask_hidden`` (one vector as wide
as fc's input) and the mask token as ``ptd_token_id`` or ``pard_token``. speculators has ``speculators_model_type``
``peagle``, ``mask_token_id``, ``layers.0.*`` for ``midlayer.*``, and a trained ``embed_tokens``, which is read.
"""

from typing import Any

from hydrajax.drafters.peagle import PEagle
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import to_llama_config
from hydrajax.formats import eagle_parts as parts
from hydrajax.formats import interface
from hydrajax.formats.block_parts import about, check, mask_of, read_windows
from hydrajax.formats.eagle_format import IGNORED, MASK_HIDDEN, P_EAGLE, FeatureFormat
from hydrajax.formats.interface import CONFIG
from hydrajax.models.layout import Entry, Layout, Parameter, same, transposed
from hydrajax.models.llama_config import LlamaConfig

MASKS = ("ptd_token_id", "pard_token", "mask_token_id")
GUESSES = 8  # if the file does not tell
VARIANTS = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), parts.OFF)


class PEagleFormat(FeatureFormat):
    """P-EAGLE in EAGLE-3's layout, as released."""

    name = "p-eagle"
    known_by = "P-EAGLE (mask_hidden)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS --tree best-32`, and versions of vLLM with parallel drafting: "
        '`--speculative-config \'{"method": "eagle3", "model": "THIS", "parallel_drafting": true}\'`.'
    )
    layer = "midlayer."

    def recognises(self, config, names):
        return MASK_HIDDEN in names and f"{self.layer}hidden_norm.weight" in names and parts.KIND not in config

    def drafter(self, config, files, base):
        name = next((name for name in MASKS if name in config), MASKS[0])
        mask = mask_of({"mask_token_id": config.get(name)}, base, f"{CONFIG}: {name}")
        return self.read(config, config, mask, files, base)

    def read(self, config, fields, mask: int, files, base: LlamaConfig, own_embedding: bool = False) -> PEagle:
        """Return the drafter; ``fields`` are those of its layers."""
        interface.expect(config, VARIANTS)
        interface.refuse_quantized(config)
        interface.refuse_quantized(fields)
        n_layers = interface.integer(fields, "num_hidden_layers", 1)
        if n_layers > interface.MOST:
            raise HydrajaxError(f"{CONFIG}: num_hidden_layers: got {n_layers}, expected at most {interface.MOST}")
        if read_windows(fields, n_layers):
            raise HydrajaxError(f"{CONFIG}: layer_types: got a sliding window, expected full_attention in every layer")
        layers = to_llama_config(fields | {"model_type": "llama"}, CONFIG)
        interface.check_sizes((layers.vocab_size, layers.width), base)
        return PEagle(
            layers.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head),
            parts.read_aux_layers(config.get(parts.AUX_LAYERS), base, parts.AUX_LAYERS),
            mask,
            guesses_of(config),
            parts.draft_vocabulary(config, files, base),
            norm_before_residual=interface.flag(config, "norm_before_residual", default=False),
            own_embedding=own_embedding,
        )

    def layout(self, drafter, config):
        return peagle_layout(drafter, self.layer)

    def config(self, drafter, made_for):
        parts.check_class(drafter, PEagle)
        if drafter.own_embedding:
            raise interface.cannot_write("own_embedding", True, False)
        layers = parts.layers_read(drafter, made_for)[0]
        one = parts.layer_fields(drafter.config.replace(n_layers=1))
        return one | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": drafter.config.n_layers,
            "draft_vocab_size": drafter.lm_head.size(drafter.config.vocab_size),
            "norm_before_residual": drafter.norm_before_residual,
            parts.AUX_LAYERS: layers,
            MASKS[0]: drafter.mask_token,
            "num_speculative_tokens": drafter.block_size,
        }


class SpecForgePEagle(PEagleFormat):
    """P-EAGLE with vLLM's name of the first layer, as SpecForge writes it. Read only."""

    name = "specforge-p-eagle"
    known_by = "P-EAGLE of SpecForge (mask_hidden and layers.0.hidden_norm)"
    read_by = ""
    layer = "layers.0."


class SpeculatorsPEagle(PEagleFormat):
    """P-EAGLE of speculators. Read only."""

    name = "speculators-p-eagle"
    known_by = "P-EAGLE of speculators (speculators_model_type 'peagle')"
    read_by = ""
    ignored = IGNORED.replace(r"embed_tokens\.weight|", "")
    layer = "layers.0."

    def recognises(self, config, names):
        return config.get(parts.KIND) == P_EAGLE

    def drafter(self, config, files, base):
        fields = parts.nested_layer(config)
        interface.expect(fields, {"model_type": ("llama",)}, f"{CONFIG}: {parts.LAYER}")
        return self.read(config, fields, mask_of(config, base, CONFIG), files, base, parts.EMBEDDING in files)


def guesses_of(config: dict[str, Any]) -> int:
    """Return the number of guesses that a ``config.json`` names, by default `GUESSES`."""
    found = config.get("num_speculative_tokens")
    nested = config.get("speculators_config")
    methods = nested.get("proposal_methods") if isinstance(nested, dict) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        found = methods[0].get("speculative_tokens", found)
    if found is None:
        return GUESSES
    if type(found) is not int or not 1 <= found <= interface.MOST:
        raise HydrajaxError(
            f"{CONFIG}: speculative_tokens: got {found!r}, expected an integer from 1 to {interface.MOST}"
        )
    return found


def peagle_layout(drafter: PEagle, first: str) -> Layout:
    """Return the key map; ``first`` is the prefix of the first layer's tensors."""
    c, width = drafter.config, drafter.config.width
    inputs = len(drafter.aux_hidden_layers) * width
    layout = [
        transposed(("fc",), "fc.weight", width, inputs),
        Entry(
            (("mask_hidden",),),
            {MASK_HIDDEN: (1, 1, inputs)},
            lambda x: (Parameter((x.reshape(-1),)),),
            lambda x: (x.reshape(1, 1, -1),),
        ),
        same(("embedding_norm", "scale"), f"{first}input_layernorm.weight", width),
        same(("hidden_norm", "scale"), f"{first}hidden_norm.weight", width),
        *decoder_layer(("layers_0",), first, c, attention_width=2 * width),
        same(("norm", "scale"), "norm.weight", width),
        transposed(("lm_kernel",), parts.LM_HEAD, drafter.lm_head.size(c.vocab_size), width),
    ]
    for i in range(1, c.n_layers):
        layout += decoder_layer((f"layers_{i}",), f"layers.{i}.", c)
    if drafter.own_embedding:
        layout.append(same(("embedding",), parts.EMBEDDING, c.vocab_size, width))
    return layout


FILES = interface.Files((PEagleFormat(), SpecForgePEagle(), SpeculatorsPEagle()), check, about)
