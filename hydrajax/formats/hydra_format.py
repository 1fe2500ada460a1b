"""Files of Hydra heads (docs/design.md 4), with or without grounding and a prefix layer.

The official code writes ``hydra_lm_head.pt`` and ``config.json`` with ``hydra_num_heads``, ``hydra_num_layers``,
``hydra_head_arch`` (``mlp`` or ``prefix-mlp``), ``grounded_heads`` and ``hidden_state_offset``. Tensors:

- ``hydra_mlp.{head}.{block}.linear.*``, and ``.res_connection.*`` in the first block of grounded heads
- ``hydra_lm_head.{head}.*``
- ``prefix_embeding_layer.*`` (sic): the prefix layer, a one-layer LLaMA. Each block and lm head then follows a
  dropout, which takes a number of its own.
- copies of the base's embedding, which are not read

``prefix_window`` is our extension: the official prefix layer attends to all tokens.
"""

from hydrajax.drafters.hydra import HydraHeads
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.formats.interface import CONFIG, About, Files, cannot_write, drafter_name, integer
from hydrajax.formats.stacks import Naming, StackFormat, check_lm_head, check_stack, heads_layout, stack_rows
from hydrajax.models.layout import same

PLAIN = Naming(lambda k, i: f"hydra_mlp.{k}.{i}", ".linear", lambda k: f"hydra_lm_head.{k}")
AFTER_PREFIX = Naming(lambda k, i: f"hydra_mlp.{k}.{2 * i + 1}", ".linear", lambda k: f"hydra_lm_head.{k}.1")
ARCHITECTURES = ("mlp", "prefix-mlp")


class Hydra(StackFormat):
    """`HydraHeads`, or ungrounded heads, which are `MedusaHeads` with ``lm_head_bias``."""

    name = "hydra"
    stem = "hydra_lm_head"
    known_by = "released Hydra (hydra_lm_head, with 'hydra_num_heads')"
    read_by = "`hydrajax generate --base BASE --draft THIS`, and the official Hydra code, which opens the `.pt`."
    torch_only = True
    # The base's embedding (twice) and a rotary buffer.
    ignored = r"input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)"

    def naming(self, drafter):
        return AFTER_PREFIX if drafter.prefix else PLAIN

    def recognises(self, config, names):
        return "hydra_num_heads" in config

    def drafter(self, config, files, base):
        arch = config.get("hydra_head_arch", "mlp")
        if arch not in ARCHITECTURES:
            raise HydrajaxError(f"{CONFIG}: hydra_head_arch: got {arch!r}, expected 'mlp' or 'prefix-mlp'")
        num_draft_heads, n_layers = integer(config, "hydra_num_heads", 1), integer(config, "hydra_num_layers", 1)
        offset = integer(config, "hidden_state_offset", 0, default=0)
        if offset > base.n_layers:
            raise HydrajaxError(
                f"{CONFIG}: hidden_state_offset: got {offset}, expected at most the base's {base.n_layers} layers"
            )
        window = integer(config, "prefix_window", 1) if "prefix_window" in config else None
        if config.get("grounded_heads", False):
            heads = HydraHeads(num_draft_heads, base.width, base.vocab_size, n_layers, False, offset)
        else:
            from hydrajax.drafters.medusa import MedusaHeads

            heads = MedusaHeads(num_draft_heads, base.width, base.vocab_size, n_layers, False, True, offset)
        return self.checked(heads if arch == "mlp" else heads.with_prefix(base, window), files, base)

    def layout(self, drafter, config):
        if drafter.prefix is None:
            return heads_layout(drafter, PLAIN)
        base, prefix = drafter.prefix.config, "prefix_embeding_layer."
        layer = decoder_layer(("prefix", "layer"), f"{prefix}layers.0.", base.plain_layer)
        norm = same(("prefix", "norm", "scale"), f"{prefix}norm.weight", base.width)
        return [*layer, norm, *heads_layout(drafter, AFTER_PREFIX, ("heads",))]

    def config(self, drafter, made_for):
        grounded = isinstance(drafter, HydraHeads)
        if not grounded and not getattr(drafter, "lm_head_bias", False):
            raise cannot_write("drafter", f"{drafter_name(drafter)} without lm_head_bias", "Hydra heads")
        check_lm_head(drafter)
        window = drafter.prefix and drafter.prefix.window
        return {
            "hydra_num_heads": drafter.num_draft_heads,
            "hydra_num_layers": drafter.n_layers,
            "hydra_head_arch": ARCHITECTURES[drafter.prefix is not None],
            "grounded_heads": grounded,
            "hidden_state_offset": drafter.hidden_state_offset,
        } | ({} if window is None else {"prefix_window": window})


FILES = Files((Hydra(),), check_stack, lambda heads: About("Hydra heads", "hydra", stack_rows(heads)))
