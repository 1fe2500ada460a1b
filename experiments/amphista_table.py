"""Amphista without its parts, Amphista-α, and the heads it is compared with (amphista tables 4 and 5, A.2.4).

All are trained on the same text in the same number of steps. The quick setting trains each for a minute: enough to run,
not to rank them.
"""

import sys

import ablation
import common

AMPHISTA = ("draft.heads=amphista", *ablation.BOTH)  # its loss: amphista 3.3
VARIANTS = {
    "medusa": ("draft.heads=medusa", *ablation.TEXT),
    "hydra": ablation.TEACHER,
    "hydra_pp": ("draft.n_layers=4", "draft.prefix=true", *ablation.TEACHER),
    "amphista": AMPHISTA,
    "amphista, no auto-embedding": (*AMPHISTA, "draft.auto_embedding_layers=0"),
    "amphista, no positions": (*AMPHISTA, "draft.position_encoding=false"),
    "amphista, no adaptation": (*AMPHISTA, "draft.adaptation_layers=0"),
    "amphista, one adaptation layer": (*AMPHISTA, "draft.adaptation_layers=1"),
    "amphista, no sampled token": (*AMPHISTA, "draft.reads_token=false"),
    "amphista alpha": (*AMPHISTA, "draft.auto_embedding_layers=2"),
}
REMARK = "without adaptation layers nothing reads the sampled token either; alpha: two layers of auto-embedding"


def run(args) -> None:
    rows = ablation.compare(args, {name: VARIANTS[name] for name in args.variants})
    common.write(args, "speed", "amphista tables 4 and 5", "parts of Amphista, released tree", rows, [REMARK])


def add_arguments(parser) -> None:
    ablation.add_arguments(parser)
    ablation.add_choice(parser, "--variants", VARIANTS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, ablation.FULL, ablation.QUICK, add_arguments))
