"""Hydra heads with and without a prefix layer, which attends to the whole text (hydra figure 6)."""

import sys

import ablation
import common

VARIANTS = {"teacher": ablation.TEACHER, "teacher, prefix": (*ablation.TEACHER, "draft.prefix=true")}
REMARK = "teacher: the paper's MLP heads; teacher, prefix: its PrefixMLP heads"


def run(args) -> None:
    rows = ablation.compare(args, VARIANTS)
    common.write(args, "speed", "hydra figure 6", "Hydra heads with a prefix layer, released tree", rows, [REMARK])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, ablation.FULL, ablation.QUICK, ablation.add_arguments))
