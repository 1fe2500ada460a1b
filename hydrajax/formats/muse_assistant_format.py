"""Files of Muse Glimmer's assistant, as transformers reads and writes them (``muse_glimmer_assistant``).

It has DFlash's layers under other names and all fields at the top level. A window of W reaches W tokens back and W
slots ahead. Slots are embedded without the base's norm of embeddings, and guesses are the lm head's matmul, without the
base's multiplier and cap.
"""

from hydrajax.drafters.dflash import DFlash
from hydrajax.families.config_fields import rope_parameters
from hydrajax.formats.block_parts import SLIDING, BlockFormat, block_size_of, mask_of, read_layers
from hydrajax.formats.interface import CONFIG, MOST, cannot_write, integer

ASSISTANT = "muse_glimmer_assistant"
ASSISTANT_DEFAULTS = {  # transformers'
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201_818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
LISTS = ("layer_types", "target_layer_ids")  # whose null is the default


class MuseAssistantFormat(BlockFormat):
    """Muse Glimmer's assistant, a DFlash draft (transformers' ``muse_glimmer_assistant``)."""

    name = "muse-assistant"
    known_by = "Muse Glimmer's assistant (model_type 'muse_glimmer_assistant')"
    read_by = '`hydrajax generate --base BASE --draft THIS`, and transformers (`speculation_type="dflash"`).'
    drafter_class = DFlash
    first_layer = -1
    fusion = "encoder.fc.weight", "encoder.output_norm_enc.weight"

    def recognises(self, config, names):
        return config.get("model_type") == ASSISTANT

    def drafter(self, config, files, base):
        given = {name: value for name, value in config.items() if value is not None or name not in LISTS}
        fields = ASSISTANT_DEFAULTS | given | {"vocab_size": base.vocab_size}
        n_layers = min(integer(fields, "num_hidden_layers", 1), MOST + 1)
        layers, windows = read_layers({"layer_types": [SLIDING] * n_layers} | fields, base)
        return DFlash(
            layers,
            self.reads(fields["target_layer_ids"], base, "target_layer_ids"),
            mask_of(fields, base, CONFIG),
            block_size_of(fields, 2),
            windows=tuple(window + 1 if window else 0 for window in windows),
            both_ways=True,
            plain_logits=True,
        )

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        for name in ("both_ways", "plain_logits"):
            if not getattr(drafter, name):
                raise cannot_write(name, False, True)
        own = {name: fields[name] for name in fields.keys() & ASSISTANT_DEFAULTS.keys() - {"rope_theta"}}
        return own | {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": ASSISTANT,
            "rope_parameters": rope_parameters(drafter.config.rope_theta, drafter.config.rope_scaling),
            "layer_types": fields.get("layer_types", ["full_attention"] * drafter.config.n_layers),
            "sliding_window": max(drafter.windows) - 1 if any(drafter.windows) else 2048,
            "mask_token_id": drafter.mask_token,
            "target_layer_ids": layers,
        }
