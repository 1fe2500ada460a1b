"""A draft model, Lookahead, Medusa, Hydra++ and Amphista by category of Spec-Bench (amphista tables 1 and 2).

    python experiments/amphista_tables_1_and_2.py --data DIR --draft AMPHISTA

Measured with greedy decoding and with exact sampling at temperature 0.7. The shipped model runs with its draft model,
Medusa and Hydra++; amphista_table.py trains Amphista heads for it. For another base, name all drafts. Each draft uses
the tree saved by ``hydrajax tree search --save``, or else its default tree, which is too large for a CPU.
"""

import sys

import common
import spec_bench

from hydrajax import assets

LOOKAHEAD = "lookahead-5-3-5"  # the smallest useful window: a CPU has no idle compute
RULES = {"greedy": (), "exact, T 0.7": ("--rule", "exact", "--temperature", 0.7)}
REMARK = "trees: searched on this machine where available, else the default"
REMARK += "; heads: the drafts of --draft"


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
