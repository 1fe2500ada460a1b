"""Top-n accuracy of each draft head against the base's next tokens (amphista figure 1)."""

import sys

import common

from hydrajax.bench.trees.search import accuracies

TOPS = (1, 2, 3, 4, 5)
FULL = {"count": 1, "calibration": 512, "prompt_tokens": 64, "new_tokens": 64}
QUICK = {"calibration": 64}


def run(args) -> None:
    setup = common.Setup(args)
    rows = []
    for heads in setup.heads:
        for head, shares in enumerate(accuracies(setup.calibrated(heads).at_every_step())):
            rows += [{"drafter": heads, "head": head, "top": n, "accuracy": float(shares[:n].sum())} for n in TOPS]
    remark = "Hydra's heads read the true previous tokens, as on an accepted path"
    common.write(args, "accuracy", "amphista figure 1", "guesses with the token the base writes", rows, [remark])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
