"""Smaller draft lm heads: tokens per step against bytes and time, measured here and predicted at 7B.

Every kind of draft head is trained with four kinds of lm head, on the same text for the same number of steps: its own,
the base's, a low-rank product, and a vocabulary of the most frequent tokens. The latter two have a quarter of the size.
The roofline predicts the speed-up at 7B from the tokens per step measured here. ``--quick`` trains each for a minute,
which tests the script but does not rank the heads.
"""

import sys

import ablation
import common

from hydrajax import assets
from hydrajax.bench.device_memory import nbytes
from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.roofline.prediction import predict
from hydrajax.bench.shapes import PRESETS
from hydrajax.formats.huggingface import read_config
from hydrajax.models.llama_config import LlamaConfig
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
SHARE = 4  # a full lm head has this many times the bytes of a smaller one
AT, DEVICE, CONTEXT, ITEMSIZE = "7b", "H100", 1024, 2  # the predicted setting


def draft_settings(heads: str, lm_head: str, base: LlamaConfig) -> dict:
    """Return the settings for `hydrajax.train.run_config.draft_of`."""
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
    """Return the settings as command line overrides, with teacher loss only.

    On text that the base has written, its distribution carries more information than the text.
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
        rows.append(row | own | at_another_size(heads, lm_head, executor.program.tree, row["tokens_per_step"]))
    remarks = [
        *ablation.MEASURED,
        "draft MB: its own parameters; a shared lm head of the base is read in addition, by hydra once per level",
        f"low rank and vocabulary: 1/{SHARE} of a full lm head's bytes",
        f"predicted: {AT} on one {DEVICE} in 16 bits, context {CONTEXT}, with the τ measured here",
    ]
    common.write(args, "pareto", "", "draft lm heads of all kinds, released tree", rows, remarks)


def at_another_size(heads: str, lm_head: str, tree, tokens_per_step: float) -> dict[str, float]:
    """Predict the draft's bytes and speed-up for a base of the size `AT`."""
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
