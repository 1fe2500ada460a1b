"""Throughput and tokens per step of Medusa, Hydra and Hydra++ at batch size 1 (hydra figure 2).

Each kind of heads runs with the tree searched for it here and with the released tree of 63 choices, against
autoregressive decoding in the same rounds.
"""

import sys

import common

FULL = {"count": 16, "calibration": 256, "prompt_tokens": 64, "new_tokens": 128, "repeats": 15}
FULL |= {"sizes": [2, 3, 4, 6, 8, 16, 32, 64]}
QUICK = {"count": 8, "calibration": 64, "new_tokens": 64, "repeats": 5, "sizes": [2, 4, 16]}


def run(args) -> None:
    rows = common.contest_of_trees(common.Setup(args), 1, args.sizes)
    common.write(args, "speed", "hydra figure 2", "throughput and tokens_per_step at batch size 1", rows)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
