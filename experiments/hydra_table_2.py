"""Speed-up by category of Spec-Bench (hydra table 2).

    python experiments/hydra_table_2.py --data DIR      (DIR holds spec_bench_question.jsonl, as Spec-Bench releases it)

The shipped model was trained on Python code only, so its answers are meaningless and the default only tests the script.
"""

import sys

import common
import spec_bench

from hydrajax import assets


def run(args) -> None:
    rows = spec_bench.by_category(args, args.draft or [assets.path(name) for name in assets.HEADS], "greedy")
    common.write(args, "categories", "hydra table 2", "speed-up on Spec-Bench", rows)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, spec_bench.FULL, spec_bench.QUICK, spec_bench.add_arguments))
