"""Smaller draft lm heads: what they lose in tokens_per_step, what they save in bytes and time, here and at 7B.

Every kind of heads is trained with every kind of lm head on the same text in the same number of steps: one of its own,
the base's, a product of low rank and a vocabulary of the most frequent tokens, the latter two of a quarter of the size.
At 7B, what the roofline says of such drafts with the tokens_per_step that was measured here. The quick setting trains
each for a minute: enough to run, not to rank them.
"""

import sys

import ablation
import common

from hydrajax import assets
from hydrajax.formats.huggingface import read_config
from hydrajax.measure.benchmark import nbytes
from hydrajax.models.llama_config import PRESETS, LlamaConfig
from hydrajax.roofline.devices import DEVICES
from hydrajax.roofline.prediction import predict
from hydrajax.train.run_config import draft_of
from hydrajax.train.tasks.heads_task import make_drafter

FULL = ablation.FULL | {"timed": 8, "rounds": 30}
QUICK = ablation.QUICK | {"timed": 2, "rounds": 5}

HEADS = {
    "medusa": {"heads": "medusa"},
    "hydra": {"heads": "hydra"},
    "hydra_pp": {"heads": "hydra", "n_layers": 4, "prefix": True},
    "amphista": {"heads": "amphista"},
}
LM_HEADS = ("full", "shared", "low rank", "vocabulary")
SHARE = 4  # the smaller lm heads are to a full one as 1 to so many
AT, DEVICE, CONTEXT, ITEMSIZE = "7b", "H100", 1024, 2  # of the prediction


def draft_settings(heads: str, lm_head: str, base: LlamaConfig) -> dict:
    """Of `hydrajax.train.run_config.draft_of`."""
    width, vocab_size = base.width, base.vocab_size
    rank = max(1, width * vocab_size // (SHARE * (width + vocab_size)))
    small = {
        "full": {"lm_head": "full"},
        "shared": {"lm_head": "shared"},
        "low rank": {"lm_head": "low_rank", "lm_rank": rank},
        "vocabulary": {"lm_head": "full", "vocabulary": vocab_size // SHARE},
    }
    return {"n_layers": 1, "prefix": False} | HEADS[heads] | small[lm_head]


def overrides(settings: dict) -> tuple[str, ...]:
    """The settings as the command line takes them.

    All learn from the base's distribution alone: of text that the base has written, it says more than the text.
    """
    return *(f"draft.{name}={str(value).lower()}" for name, value in settings.items()), *ablation.TEACHER


def run(args) -> None:
    base = read_config(args.base or assets.base())
    cells = {f"{heads}, {lm_head}": (heads, lm_head) for heads in args.heads for lm_head in args.lm_heads}
    variants = {name: overrides(draft_settings(*cell, base)) for name, cell in cells.items()}
    ablation.train(args, variants)
    setup = common.Setup(args, list(cells))
    executors = {name: setup.executor(name, setup.released(name)) for name in cells}
    rows = []
    for (name, executor), row in zip(executors.items(), ablation.measure(setup, executors, args)[1:], strict=True):
        heads, lm_head = cells[name]
        own = {"drafter": heads, "lm_head": lm_head, "draft_megabytes": nbytes(executor.params.draft) / 1e6}
        rows.append(row | own | at_another_size(heads, lm_head, executor.spec.tree, row["tokens_per_step"]))
    remarks = [
        *ablation.MEASURED,
        "draft MB: of its own parameters; the base's lm head, where shared, is read on top: by hydra for every level",
        f"low rank and vocabulary: 1/{SHARE} of a full lm head's bytes",
        f"predicted: {AT} on one {DEVICE} in 16 bits, context {CONTEXT}, with the τ measured here",
    ]
    common.write(args, "pareto", "", "draft lm heads of all kinds, released tree", rows, remarks)


def at_another_size(heads: str, lm_head: str, tree, tokens_per_step: float) -> dict[str, float]:
    """The roofline of such a draft for a base of another size."""
    config = PRESETS[AT]
    drafter = make_drafter(draft_of(**draft_settings(heads, lm_head, config)), config, "bfloat16")
    grid = {"trees": {"released": tree}, "batches": [1], "contexts": [CONTEXT]}
    (cell,) = predict(DEVICES[DEVICE], config, drafter, **grid, itemsize=ITEMSIZE, tokens_per_step=[tokens_per_step])
    return {"predicted_gigabytes": cell.draft_bytes / 1e9, "predicted_speedup": cell.speedup}


def add_arguments(parser) -> None:
    ablation.add_arguments(parser, ablation.OWN_TEXT, "runs/lm_heads")
    ablation.add_choice(parser, "--heads", HEADS)
    ablation.add_choice(parser, "--lm-heads", LM_HEADS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
