"""Files of Medusa heads (docs/design.md 4): Medusa v1, Medusa-2 and vLLM's Medusa.

The official Medusa v1 code writes ``medusa_lm_head.pt`` (or ``.safetensors``) and ``config.json`` with
``medusa_num_heads`` and ``medusa_num_layers``. Tensors: ``{head}.{block}.linear.weight`` and ``.bias``, and
``{head}.{number of blocks}.weight`` for the lm head. Medusa-2 stores the same tensors in the base's file, prefixed with
``medusa_head.``. vLLM has other names and fields.
"""

import re

from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.formats.interface import About, Files, cannot_write, drafter_name, expect, integer
from hydrajax.formats.stacks import Naming, StackFormat, check_lm_head, check_stack, heads_layout, stack_rows
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import MODEL
from hydrajax.models.llama_config import LlamaConfig


class Medusa(StackFormat):
    """Medusa v1, which text-generation-inference reads too."""

    name = "medusa"
    stem = "medusa_lm_head"
    known_by = "Medusa v1 (medusa_lm_head, with 'medusa_num_heads')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`; the official Medusa code opens the `.pt`, "
        "text-generation-inference (versions with Medusa) the `.safetensors`."
    )
    torch_only = True
    prefix = ""  # of all tensor names

    def naming(self, drafter):
        n_layers = drafter.n_layers
        return Naming(lambda k, i: f"{self.prefix}{k}.{i}", ".linear", lambda k: f"{self.prefix}{k}.{n_layers}")

    def recognises(self, config, names):
        return "medusa_num_heads" in config

    def drafter(self, config, files, base):
        # Released files may declare fewer heads in config.json than they hold.
        num_draft_heads = len({match[1] for match in self._matches(files, r"([0-9]{1,4})\..*")})
        if num_draft_heads == 0:
            raise HydrajaxError(f"tensors: got none named like '{self.prefix}0.0.linear.weight', expected Medusa heads")
        lm_heads = self._matches(files, r"[0-9]+\.([0-9]{1,4})\.weight")
        if not lm_heads:
            raise HydrajaxError(
                "tensors: got Medusa heads that share the base's lm head (version 2 of config.json), expected lm heads "
                "of their own"
            )
        # Some released Medusa-2 configurations have no field about the heads.
        n_layers = integer(config, "medusa_num_layers", 1, default=min(int(lm_heads[0][1]), len(files)))
        return self.checked(separate_heads(num_draft_heads, n_layers, base), files, base)

    def _matches(self, files: TensorFiles, pattern: str) -> list[re.Match]:
        whole = re.compile(re.escape(self.prefix) + pattern)
        return [match for name in files if (match := whole.fullmatch(name))]

    def config(self, drafter, made_for):
        check_plain(drafter)
        return {"medusa_num_heads": drafter.num_draft_heads, "medusa_num_layers": drafter.n_layers}


class Medusa2(Medusa):
    """Medusa-2: heads in the same file as their base. Read only."""

    name = "medusa-2"
    stem = MODEL
    known_by = "Medusa-2 (medusa_head. in the base's file)"
    read_by = ""
    prefix = "medusa_head."
    ignored = r"(?!medusa_head\.).*"  # the base

    def recognises(self, config, names):
        return "medusa_num_heads" in config or any(name.startswith(self.prefix) for name in names)


class VLLMMedusa(StackFormat):
    """vLLM's: vllm/transformers_utils/configs/medusa.py and vllm/model_executor/models/medusa.py."""

    name = "vllm-medusa"
    stem = MODEL
    known_by = "vLLM's Medusa (model_type 'medusa')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, and versions of vLLM with the `medusa` method: "
        '`--speculative-config \'{"method": "medusa", "model": "THIS", "num_speculative_tokens": HEADS}\'`.'
    )
    dtype_field = "torch_dtype"

    def naming(self, drafter):
        return Naming(lambda k, i: f"blocks.{k}.layers.{i}", "", lambda k: f"lm_heads.{k}")

    def recognises(self, config, names):
        return config.get("model_type") == "medusa"

    def drafter(self, config, files, base):
        num_draft_heads, n_layers = integer(config, "num_heads", 1), integer(config, "num_hidden_layers", 1)
        # Each head has an lm head of its own over all tokens.
        full = {"truncated_vocab_size": (None, base.vocab_size), "original_lm_head": (None, False)}
        expect(config, full | {"logit_scale": (None, 1)})
        return self.checked(separate_heads(num_draft_heads, n_layers, base), files, base)

    def layout(self, drafter, config):
        return heads_layout(drafter, self.naming(drafter), block_bias=config.get("medusa_fc_bias", False) is True)

    def config(self, drafter, made_for):
        """Write vLLM's names alone: it takes any other with "num" and "heads" or "layers" in it for one of them."""
        check_plain(drafter)
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": drafter.width,
            "vocab_size": drafter.vocab_size,
            "truncated_vocab_size": drafter.vocab_size,
            "num_heads": drafter.num_draft_heads,
            "num_hidden_layers": drafter.n_layers,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        }


def separate_heads(num_draft_heads: int, n_layers: int, base: LlamaConfig) -> MedusaHeads:
    """Return heads for this base without shared blocks."""
    return MedusaHeads(num_draft_heads, base.width, base.vocab_size, n_layers, share_blocks=False)


def check_plain(drafter) -> None:
    """Refuse what Medusa's formats cannot express: grounded heads, lm head biases, a prefix layer, another layer."""
    if not isinstance(drafter, MedusaHeads) or drafter.prefix or drafter.lm_head_bias:
        bias = " with lm_head_bias" if getattr(drafter, "lm_head_bias", False) else ""
        raise cannot_write("drafter", f"{drafter_name(drafter)}{bias}", "MedusaHeads without lm_head_bias")
    if drafter.hidden_state_offset:
        raise cannot_write("hidden_state_offset", drafter.hidden_state_offset, 0)
    check_lm_head(drafter)


def about(heads: MedusaHeads) -> About:
    if heads.lm_head_bias:
        return About("Ungrounded Hydra heads", "hydra", stack_rows(heads))
    return About("Medusa heads", "medusa", stack_rows(heads))


FILES = Files((Medusa(), Medusa2(), VLLMMedusa()), check_stack, about)
