"""A draft model, Lookahead, Medusa, Hydra++ and Amphista by category of Spec-Bench (amphista tables 1 and 2).

    python experiments/amphista_tables_1_and_2.py --data DIR --draft AMPHISTA

Greedily, and sampled at temperature 0.7 (exact sampling, so that all say what the base alone says with the same seed).
For the shipped model its draft model, Medusa and Hydra++ take part; amphista_table.py trains Amphista heads for it. Of
another name all drafts. Each takes the tree that ``hydrajax tree search --save`` left with it, else its own
default, which is far too large for a CPU.
"""

import sys

import common
import spec_bench

from hydrajax import assets

LOOKAHEAD = "lookahead-5-3-5"  # the smallest window that pays: a CPU has no idle arithmetic to look ahead with
RULES = {"greedy": (), "exact, T 0.7": ("--rule", "exact", "--temperature", 0.7)}
REMARK = "every draft with the tree that was searched for it on this machine, if one was, else its default"
REMARK += "; heads: what --draft names"


def run(args) -> None:
    own = [] if args.base else [assets.path("draft_model"), LOOKAHEAD, assets.path("medusa"), assets.path("hydra_pp")]
    rows = []
    for rule, flags in RULES.items():
        found = spec_bench.by_category(args, [*own, *args.draft], rule.replace(", T ", "-"), flags)
        rows += [row | {"name": f"{row['name']}, {rule}"} for row in found]
    title = "speed-up on Spec-Bench by kind of draft"
    common.write(args, "categories", "amphista tables 1 and 2", title, rows, [REMARK])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, spec_bench.FULL, spec_bench.QUICK, spec_bench.add_arguments))
